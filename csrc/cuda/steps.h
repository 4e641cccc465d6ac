// A plan made ready to be issued again and again: what does not change from call to call is worked out once.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "../group/call.h"
#include "../group/layout.h"
#include "driver.h"
#include "registered.h"

namespace streamoverlap::cuda {

// Where buffers start in a call: this rank's by plan::Buffer (but Slot), then the slot of every rank.
inline constexpr int kSlotOf = plan::kBuffers;
using Bases = std::array<std::byte*, kSlotOf + plan::kMaxWorld>;

struct Address {
  int base = -1;  // -1: nothing
  std::int64_t offset = 0;

  std::byte* in(const Bases& bases) const { return base < 0 ? nullptr : bases[base] + offset; }
};

struct Step {
  enum class Kind : std::uint8_t { Gemm, Copy, Quantise, Reduce, Memory, Record, Wait };

  Kind kind = Kind::Record;
  plan::Stream stream = plan::kMain;
  bool join = false;                       // of main: what an async call leaves to others; see plan::join_begin
  bool bias = false;                       // Gemm
  int event = -1;                          // Record, Wait
  int first = 0, count = 0;                // Reduce: terms; Memory: operations
  Address a, scales, c, d;                 // Gemm: D = A W^T (+ C), scales of A; Copy, Quantise: D = A; Reduce: D
  std::int64_t a_row_bytes = 0, rows = 0;  // Gemm
  std::int64_t output_row = 0;             // Gemm: of D in an output of all shards
  std::int64_t bytes = 0;                  // of D
  std::int64_t a_bytes = 0;                // Quantise: of A
  std::uint64_t packed_terms = 0;          // Reduce: a bit for each that is packed
};

struct Steps {
  std::vector<Step> steps;  // in issue order
  std::vector<int> of_op;   // which of them, by op of the plan; -1: it has no data to work on
  std::vector<Address> terms;
  std::int64_t packed_unit = 0;               // of the call
  std::vector<std::vector<MemoryOp>> memory;  // by slot
  std::vector<plan::Flag> awaited;            // flags of this rank
  int events = 0;
  unsigned streams = 0;     // that the plan uses besides main: a bit for each role
  int compute_streams = 0;  // up to the last one it uses
  int workspaces = 0;       // compute streams up to the last one that multiplies
};

Steps compile(const Call& call, const Layout& layout, const RegisteredControls& controls);

}  // namespace streamoverlap::cuda
