// One call as an executor sees it: the plan, and where each of its regions lies in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "../plan/plan.h"
#include "call_trace.h"

namespace streamoverlap {

// Rows of a chunk within its shard. All chunks have ceil(shard_rows / chunks) rows but the last, which may have
// fewer; where rows are fewer than chunks the last ones are empty. Where they taper (plan::Taper), the first, the last
// or both have half as many as those between, and once the smallest would have 128, all but the last are multiples of
// 128. Where rows have scales, which a GEMM reads as an aligned vector, all but the last are multiples of 4. Of a shard
// that has only `available` of its rows the last chunks fall short.
struct Rows {
  std::int64_t begin = 0;
  std::int64_t count = 0;
};
Rows chunk_rows(std::int64_t shard_rows, const plan::Spec& spec, int chunk, std::int64_t available);

// Rows have scales of 4 bytes, and a GEMM reads those of a block as a vector; it wants data to be aligned to 16 bytes.
inline constexpr std::int64_t kScaleBytes = 4;
inline constexpr std::int64_t kScaleAlignment = 16;
inline constexpr std::int64_t kSlotAlignment = 256;  // what allocators give

constexpr std::int64_t round_up(std::int64_t value, std::int64_t unit) { return (value + unit - 1) / unit * unit; }
// Bytes between the scales of one shard and of the next.
constexpr std::int64_t scales_stride(std::int64_t shard_rows) {
  return round_up(shard_rows * kScaleBytes, kScaleAlignment);
}

// Where a buffer of this rank lies. A buffer that holds a single shard (the input of an all-gather, the output of a
// reduce-scatter) has shard_bytes 0.
struct View {
  std::byte* base = nullptr;
  std::int64_t row_bytes = 0;
  std::int64_t shard_bytes = 0;
};

struct Call {
  const plan::Plan* plan = nullptr;
  std::uint32_t signature = 0;  // of plan and shapes, equal on all ranks that agree; see signature.h
  std::int64_t shard_rows = 0;
  std::int64_t missing_rows = 0;     // by which all shards together have fewer than world * shard_rows, at their end
  View views[plan::kBuffers];        // Slot, SlotScales, Scratch: only row_bytes; the executor picks the slot
  std::shared_ptr<CallTrace> trace;  // told when each op was done; null: nobody asks

  // The slot's rows, then their scales, if the plan has some there.
  std::int64_t slot_bytes() const {
    if (row_bytes(plan::Buffer::SlotScales) == 0) return slot_row_bytes();
    return slot_scales_offset() + scales_stride(shard_rows) * plan::slot_shards(plan->spec);
  }
  std::int64_t slot_scales_offset() const { return round_up(slot_row_bytes(), kSlotAlignment); }
  std::int64_t slot_row_bytes() const {
    return row_bytes(plan::Buffer::Slot) * shard_rows * plan::slot_shards(plan->spec);
  }
  std::int64_t scratch_bytes() const { return row_bytes(plan::Buffer::Scratch) * shard_rows * plan->spec.world; }
  std::int64_t row_bytes(plan::Buffer b) const { return views[static_cast<int>(b)].row_bytes; }
};

// Throws std::invalid_argument where a Wait comes before its Record. A CUDA stream would pass it in silence, a thread
// would wait for ever.
void require_recorded_events(const plan::Plan& plan);

// A region in memory.
struct Block {
  std::byte* data = nullptr;
  Rows rows;               // within the shard
  std::int64_t shard = 0;  // its row 0 is row `shard * shard_rows + rows.begin` of a buffer that holds all shards
  std::int64_t row_bytes = 0;
  std::int64_t bytes() const { return rows.count * row_bytes; }
};

// `base`: where the region's buffer starts; for a Slot and its scales the slot of the region's rank, for what is the
// caller's the view's.
Block block_of(const Call& call, const plan::Region& region, std::byte* base);

}  // namespace streamoverlap
