#include "call.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

namespace streamoverlap {

Rows chunk_rows(std::int64_t shard_rows, int chunks, int chunk) {
  const std::int64_t size = (shard_rows + chunks - 1) / chunks;
  const std::int64_t begin = std::min(chunk * size, shard_rows);
  return {begin, std::min(size, shard_rows - begin)};
}

Block block_of(const Call& call, const plan::Region& region, std::byte* base) {
  const View& view = call.views[static_cast<int>(region.buffer)];
  const bool own_layout = region.buffer == plan::Buffer::Slot || region.buffer == plan::Buffer::Scratch;
  const std::int64_t shard_bytes = own_layout ? call.shard_rows * view.row_bytes : view.shard_bytes;
  const Rows rows = chunk_rows(call.shard_rows, call.plan->spec.chunks, region.chunk);
  return {base + region.shard * shard_bytes + rows.begin * view.row_bytes, rows, region.shard, view.row_bytes};
}

std::size_t join_begin(const plan::Plan& plan) {
  const auto first = std::find_if(plan.ops.begin(), plan.ops.end(), [](const plan::Op& op) {
    return op.stream == plan::kMain && op.kind == plan::Kind::Wait;
  });
  return static_cast<std::size_t>(first - plan.ops.begin());
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
