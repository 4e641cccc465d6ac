// What an op costs on a machine: the constants of the simulator, all of them measured or marked as assumed where they
// are kept (streamoverlap/costs).
#pragma once

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "plan.h"

namespace streamoverlap::plan {

// Seconds, bytes, bytes/s and FLOP/s.
struct Costs {
  double gemm_flops = 1;  // of a full wave of tiles
  int sms = 1, tile_m = 1, tile_n = 1;
  double gemm_latency = 0;     // from the start of the kernel until its tiles run, and their end
  double gemm_accumulate = 1;  // factor where C is read
  // Bandwidth of one Put alone on its links by size, sizes rising; in between linear in the logarithm of the size,
  // constant beyond the ends.
  std::vector<std::pair<double, double>> link_bandwidth;
  double put_latency = 0;
  double store_efficiency = 1;  // of that bandwidth, for a Gemm that stores in a peer's slot
  double copy_bandwidth = 1;    // bytes copied
  double copy_latency = 0;      // also of a Reduce and a Quantise
  double reduce_bandwidth = 1;  // bytes read and written, also of a Quantise
  double notify = 0, await = 0, record = 0, wait = 0;
  double flag_latency = 0;                // from the end of a Notify until its flag is seen at the peer
  std::array<double, kKinds> issue = {};  // CPU time by Kind
};

// Throws std::invalid_argument, naming the constant that cannot be.
void validate(const Costs&);

struct GemmCost {
  double seconds = 0;  // alone on the GPU
  double share = 1;    // of the multiprocessors that it keeps busy, in the mean over its waves
  double waves = 1;
};

// Of rows x k by k x n. Tiles run in waves of one a multiprocessor, and the last wave takes as long as the others;
// their shape is the one that takes least.
GemmCost gemm_cost(const Costs&, std::int64_t rows, std::int64_t n, std::int64_t k, bool accumulates);
double link_bandwidth(const Costs&, double bytes);

struct StoreCost {
  double seconds = 0;  // as of the GEMM
  double share = 1;    // of the multiprocessors
  double link = 1;     // share of the links
};
// The same GEMM where its result of `bytes` goes to a peer: a wave of tiles is on its way while the next one is made.
StoreCost store_cost(const Costs&, const GemmCost&, double bytes);

}  // namespace streamoverlap::plan
