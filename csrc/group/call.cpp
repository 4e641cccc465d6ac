#include "call.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

namespace streamoverlap {

Rows chunk_rows(std::int64_t shard_rows, int chunks, int chunk, std::int64_t available, std::int64_t unit) {
  const std::int64_t size = round_up((shard_rows + chunks - 1) / chunks, unit);
  const std::int64_t begin = std::min(chunk * size, available);
  return {begin, std::min(size, available - begin)};
}

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
  const std::int64_t unit = spec.scaled ? kScaleAlignment / kScaleBytes : 1;
  const Rows rows = chunk_rows(call.shard_rows, spec.chunks, region.chunk, available, unit);
  if (in_slot_scales) base += call.slot_scales_offset();
  return {base + region.shard * shard_bytes + rows.begin * view.row_bytes, rows, region.shard, view.row_bytes};
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
