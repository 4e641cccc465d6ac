#include "call.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

namespace streamoverlap {

namespace {

constexpr std::int64_t kTile = 128;  // rows of a GEMM's tile; part of one takes as long as all of it

// Where a chunk begins, the chunks after the last one at the end of the shard.
std::int64_t tapered_begin(std::int64_t shard_rows, const plan::Spec& spec, int chunk, std::int64_t least_unit) {
  if (chunk == spec.chunks) return shard_rows;
  const bool first = spec.taper != plan::Taper::Last, last = spec.taper != plan::Taper::First;
  const std::int64_t halves = 2 * spec.chunks - first - last;
  const std::int64_t before = chunk > 0 ? 2 * chunk - first : 0;
  const std::int64_t unit = shard_rows >= kTile * halves ? kTile : least_unit;
  return std::min((2 * shard_rows * before + unit * halves) / (2 * unit * halves) * unit, shard_rows);
}

}  // namespace

Rows chunk_rows(std::int64_t shard_rows, const plan::Spec& spec, int chunk, std::int64_t available) {
  const std::int64_t unit = spec.scaled ? kScaleAlignment / kScaleBytes : 1;
  const std::int64_t even = round_up((shard_rows + spec.chunks - 1) / spec.chunks, unit);
  const auto begins = [&](int c) {
    const bool tapers = spec.taper != plan::Taper::None && spec.chunks > 1;
    return std::min(tapers ? tapered_begin(shard_rows, spec, c, unit) : c * even, available);
  };
  const std::int64_t begin = begins(chunk);
  return {begin, begins(chunk + 1) - begin};
}

void Call::pack(std::int64_t element_bytes) {
  std::int64_t elements = row_bytes(plan::Buffer::Slot) / element_bytes;
  if (elements < kShortRow / 2) elements = kShortRow;
  packed_unit = elements * element_bytes;
  views[static_cast<int>(plan::Buffer::Packed)].row_bytes = packed_row_bytes(elements);
}

namespace {

// Where rows of a shard are packed.
Block packed_block(const Call& call, const plan::Region& region, Rows rows, std::byte* base) {
  const std::int64_t unit = call.packed_unit, row = call.row_bytes(plan::Buffer::Slot);
  const std::int64_t packed_row = call.row_bytes(plan::Buffer::Packed);
  const Rows packed = {rows.begin * row / unit + region.chunk, (rows.count * row + unit - 1) / unit};
  if (region.buffer == plan::Buffer::Packed) base += call.scratch_packed_offset();
  base += region.shard * call.packed_shard_bytes() + packed.begin * packed_row;
  return {base, packed, region.shard, packed_row, true};
}

}  // namespace

Block block_of(const Call& call, const plan::Region& region, std::byte* base) {
  const View& view = call.views[static_cast<int>(region.buffer)];
  const bool own_layout = region.buffer == plan::Buffer::Slot || region.buffer == plan::Buffer::Scratch;
  const bool in_slot_scales = region.buffer == plan::Buffer::SlotScales;
  const std::int64_t shard_bytes = in_slot_scales ? scales_stride(call.shard_rows)
                                   : own_layout   ? call.shard_rows * view.row_bytes
                                                  : view.shard_bytes;
  const plan::Spec& spec = call.plan->spec;
  const std::int64_t present = spec.world * call.shard_rows - call.missing_rows;
  const std::int64_t before = plan::data_shard(spec, region) * call.shard_rows;
  const std::int64_t available = std::clamp<std::int64_t>(present - before, 0, call.shard_rows);
  const Rows rows = chunk_rows(call.shard_rows, spec, region.chunk, available);
  if (plan::is_packed(spec, region)) return packed_block(call, region, rows, base);
  if (in_slot_scales) base += call.slot_scales_offset();
  std::int64_t shard = region.shard;
  if (region.buffer == plan::Buffer::Slot) {
    shard -= call.packed_slot_shards();
    base += call.slot_rows_offset();
  }
  return {base + shard * shard_bytes + rows.begin * view.row_bytes, rows, region.shard, view.row_bytes};
}

void require_recorded_events(const plan::Plan& plan) {
  std::vector<char> recorded(static_cast<std::size_t>(plan.events));
  for (const plan::Op& op : plan.ops) {
    if (op.kind == plan::Kind::Record) recorded.at(op.event) = 1;
    if (op.kind != plan::Kind::Wait || recorded.at(op.event)) continue;
    throw std::invalid_argument("call.plan waits on " + plan::name(op.stream) + " for event " +
                                std::to_string(op.event) + " before it is recorded, expected the record first");
  }
}

}  // namespace streamoverlap
