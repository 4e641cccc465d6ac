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

// A packed row: a float8_e4m3fn an element and, aligned behind them, the float32 scale that all of them share. What its
// elements times that scale stand for is the row.
inline constexpr std::int64_t kPackedAlignment = 16;
constexpr std::int64_t packed_scale_offset(std::int64_t elements) { return round_up(elements, kPackedAlignment); }
constexpr std::int64_t packed_row_bytes(std::int64_t elements) {
  return packed_scale_offset(elements) + kPackedAlignment;
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
  std::int64_t missing_rows = 0;  // by which all shards together have fewer than world * shard_rows, at their end
  // Slot, SlotScales, Scratch, Packed: only row_bytes; the executor picks the slot. Packed rows are others, see pack().
  View views[plan::kBuffers];
  std::int64_t packed_unit = 0;      // bytes of what one packed row stands for; 0: nothing is packed
  std::shared_ptr<CallTrace> trace;  // told when each op was done; null: nobody asks

  // Rows that are sent packed hold as many elements each, once the slot's row_bytes are set: a row of the tensor, or
  // kShortRow where rows are shorter than half of that, in a chunk the last one less.
  void pack(std::int64_t element_bytes);

  // The slot: what is packed, then rows as they are, then their scales, as far as the plan has any.
  std::int64_t slot_bytes() const {
    if (row_bytes(plan::Buffer::SlotScales) == 0) return slot_rows_offset() + slot_row_bytes();
    return slot_scales_offset() + scales_stride(shard_rows) * plan::slot_shards(plan->spec);
  }
  std::int64_t slot_scales_offset() const { return round_up(slot_rows_offset() + slot_row_bytes(), kSlotAlignment); }
  std::int64_t slot_rows_offset() const { return round_up(packed_bytes(), kSlotAlignment); }
  int packed_slot_shards() const { return packed_unit > 0 ? plan->spec.world : 0; }
  std::int64_t slot_row_bytes() const {
    return row_bytes(plan::Buffer::Slot) * shard_rows * (plan::slot_shards(plan->spec) - packed_slot_shards());
  }
  // Scratch memory: rows as they are, then what is packed.
  std::int64_t scratch_bytes() const { return scratch_packed_offset() + packed_bytes(); }
  std::int64_t scratch_packed_offset() const {
    return round_up(row_bytes(plan::Buffer::Scratch) * shard_rows * plan->spec.world, kSlotAlignment);
  }
  // Of the shards of all ranks. Each chunk of one may end in a row that is not full.
  std::int64_t packed_bytes() const { return packed_unit > 0 ? packed_shard_bytes() * plan->spec.world : 0; }
  std::int64_t packed_shard_bytes() const {
    return row_bytes(plan::Buffer::Packed) *
           (shard_rows * row_bytes(plan::Buffer::Slot) / packed_unit + plan->spec.chunks);
  }
  std::int64_t row_bytes(plan::Buffer b) const { return views[static_cast<int>(b)].row_bytes; }
};
inline constexpr std::int64_t kShortRow = 1024;  // elements

// Throws std::invalid_argument where a Wait comes before its Record. A CUDA stream would pass it in silence, a thread
// would wait for ever.
void require_recorded_events(const plan::Plan& plan);

// A region in memory.
struct Block {
  std::byte* data = nullptr;
  Rows rows;               // within the shard
  std::int64_t shard = 0;  // its row 0 is row `shard * shard_rows + rows.begin` of a buffer that holds all shards
  std::int64_t row_bytes = 0;
  bool packed = false;  // `rows` are packed rows
  std::int64_t bytes() const { return rows.count * row_bytes; }
};

// `base`: where the region's buffer starts; for a Slot and its scales the slot of the region's rank, for what is the
// caller's the view's.
Block block_of(const Call& call, const plan::Region& region, std::byte* base);

}  // namespace streamoverlap
