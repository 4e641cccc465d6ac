#include "call.h"

#include <algorithm>

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

}  // namespace streamoverlap
