// When each op of a call would start and end on a machine of given costs: discrete events over the plans of all ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "costs.h"
#include "plan.h"

namespace streamoverlap::plan {

// What a plan leaves open: the rows of a region, and the widths of this call on every rank.
struct Sizes {
  std::function<std::int64_t(const Region&)> rows, bytes;
  std::int64_t n = 0, k = 0;  // of each rank's GEMMs
};

struct Span {
  double start = 0, end = 0;  // seconds since all ranks began to issue the call
};

// The span of every op of every rank, by its place in plan.ops: from when it occupies its stream until the next op may.
// All resources are idle and all credits there at first. The CPU of a rank issues its ops one after the other, or in a
// CUDA graph (`graph`) all at once. Streams run in order. Kernels of a rank (Gemm, Reduce, Quantise) share its
// multiprocessors in equal parts; Puts, and Gemms that store in a peer's slot, share the sender's outgoing and the
// receiver's incoming link.
//
// Throws std::invalid_argument for malformed plans, for costs that cannot be, and for plans that deadlock, naming the
// op that waits for ever.
std::vector<std::vector<Span>> simulate(const std::vector<Plan>& plans, const Costs&, const Sizes&, bool graph);

}  // namespace streamoverlap::plan
