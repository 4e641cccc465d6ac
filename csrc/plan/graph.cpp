#include "graph.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "builders.h"

namespace streamoverlap::plan {
namespace {

std::uint64_t key_of(const Flag& flag) {
  const auto part = [](int value) { return static_cast<std::uint64_t>(value); };
  return part(flag.kind == FlagKind::Empty) << 48 | part(flag.sender) << 40 | part(flag.receiver) << 32 |
         part(flag.index);
}

template <class Visit>
void for_each_region(const Spec& spec, Buffer buffer, int rank, Visit visit) {
  const Shards shards = shards_of(spec, buffer, rank);
  for (int shard = shards.first; shard < shards.last; ++shard) {
    for (int chunk = 0; chunk < spec.chunks; ++chunk) visit(Region{buffer, rank, shard, chunk});
  }
}

}  // namespace

Graph::Graph(const Calls& all) : calls(all), world(static_cast<int>(all.front().size())) {
  std::size_t count = 0;
  region_bases_.push_back(0);
  for (const auto& plans : calls) {
    for (const Plan& plan : plans) count += plan.ops.size() + 3;
    const int call = static_cast<int>(region_bases_.size()) - 1;
    region_bases_.push_back(region_bases_.back() + world * kBuffers * regions_of_buffer(call));
  }
  nodes.reserve(count);
  begins_.resize(calls.size() * world);
  for (int rank = 0; rank < world; ++rank) add_rank(rank);
  first_chain.push_back(static_cast<int>(chains.size()));
  match_flags();
  list_accesses();
}

void Graph::add_rank(int rank) {
  const int main = static_cast<int>(chains.size());
  first_chain.push_back(main);
  chains.emplace_back();
  std::vector<int> records;
  for (int call = 0; call < static_cast<int>(calls.size()); ++call) {
    const Plan& plan = calls[call][rank];
    std::array<int, kMaxStreams> chain_of;
    chain_of.fill(-1);
    chain_of[kMain] = main;
    records.assign(plan.events, -1);
    begins_[call * world + rank] = add_node(Node::Type::Begin, nullptr, call, rank, main);
    if (call > 0) nodes.back().source = end(call - 1, rank);
    const std::size_t join = join_begin(plan);
    for (std::size_t i = 0; i < plan.ops.size(); ++i) {
      const Op& op = plan.ops[i];
      if (i == join) chain_of[kMain] = -1;
      int& chain = chain_of[op.stream];
      if (chain < 0) {
        chain = static_cast<int>(chains.size());
        chains.emplace_back();
      }
      const int node = add_node(Node::Type::Op, &op, call, rank, chain);
      if (op.kind == Kind::Record) {
        if (records[op.event] >= 0) recorded_twice.push_back(node);
        records[op.event] = node;
      } else if (op.kind == Kind::Wait) {
        nodes[node].source = records[op.event];
        if (records[op.event] < 0) unrecorded.push_back(node);
      }
    }
    add_node(Node::Type::Issued, nullptr, call, rank, main);
    const bool waits = join < plan.ops.size();
    if (!waits) chains.emplace_back();
    add_node(Node::Type::End, nullptr, call, rank, waits ? chain_of[kMain] : static_cast<int>(chains.size()) - 1);
  }
}

int Graph::add_node(Node::Type type, const Op* op, int call, int rank, int chain) {
  const int id = static_cast<int>(nodes.size());
  nodes.push_back({type, op, call, rank, chain, static_cast<int>(chains[chain].size()), -1});
  chains[chain].push_back(id);
  return id;
}

int Graph::previous(int node) const {
  const Node& n = nodes[node];
  return n.position == 0 ? -1 : chains[n.chain][n.position - 1];
}

// The k-th Await of a flag takes the k-th Notify; of an Empty flag, which starts set, the one before. All Notifies of
// a flag are of one rank and so are all its Awaits, so nodes in the order of their numbers are in issue order.
void Graph::match_flags() {
  std::vector<std::pair<std::uint64_t, int>> sorted;  // flag and whether awaited, node
  for (int node = 0; node < static_cast<int>(nodes.size()); ++node) {
    const bool awaits = nodes[node].is(Kind::Await);
    if (awaits || nodes[node].is(Kind::Notify)) sorted.emplace_back(key_of(nodes[node].op->flag) << 1 | awaits, node);
  }
  std::sort(sorted.begin(), sorted.end());
  uses.reserve(sorted.size());
  for (const auto& [key, node] : sorted) {
    const bool fresh = uses.empty() || key >> 1 != key_of(flags.back().flag);
    const int position = static_cast<int>(uses.size());
    if (fresh) flags.push_back({nodes[node].op->flag, position, position, position});
    uses.push_back(node);
    FlagUses& flag = flags.back();
    if (nodes[node].is(Kind::Notify)) ++flag.middle;
    ++flag.last;
  }
  for (const FlagUses& flag : flags) {
    const int taken_from_start = flag.flag.kind == FlagKind::Empty ? 1 : 0;
    for (int k = taken_from_start; flag.middle + k < flag.last; ++k) {
      const int notify = flag.first + k - taken_from_start;
      const int await = uses[flag.middle + k];
      if (notify < flag.middle) {
        nodes[await].source = uses[notify];
      } else {
        never_set.push_back(await);
      }
    }
  }
}

void Graph::list_accesses() {
  std::vector<Access> unsorted;
  unsorted.reserve(3 * nodes.size());
  for (int id = 0; id < static_cast<int>(nodes.size()); ++id) {
    const Node& node = nodes[id];
    const auto add = [&](const Region& region, bool write) {
      unsorted.push_back({region_id(node.call, region), id, write});
    };
    if (node.op) {
      for (const Region& region : node.op->reads) add(region, false);
      for (const Region& region : node.op->writes) add(region, true);
      continue;
    }
    // The caller wrote the input just before and allocated the results; as soon as the call has ended on main, it
    // reads the results and may overwrite or free the input. Where that is copied, it may so once the call is issued.
    const Spec& spec = calls[node.call][node.rank].spec;
    const bool begins = node.type == Node::Type::Begin;
    if (node.type == Node::Type::Issued) {
      if (spec.copy_input) {
        for_each_region(spec, Buffer::Input, node.rank, [&](const Region& region) { add(region, true); });
      }
      continue;
    }
    for_each_region(spec, Buffer::Input, node.rank, [&](const Region& region) { add(region, true); });
    if (spec.scaled) {
      for_each_region(spec, Buffer::Scales, node.rank, [&](const Region& region) { add(region, true); });
    }
    for_each_region(spec, Buffer::Output, node.rank, [&](const Region& region) { add(region, begins); });
    if (!spec.keep_gathered) continue;
    for_each_region(spec, Buffer::Gathered, node.rank, [&](const Region& region) { add(region, begins); });
  }
  std::vector<int> next(regions() + 1, 0);
  for (const Access& access : unsorted) ++next[access.region + 1];
  for (int region = 0; region < regions(); ++region) next[region + 1] += next[region];
  accesses.resize(unsorted.size());
  for (const Access& access : unsorted) accesses[next[access.region]++] = access;
}

int Graph::region_id(int call, const Region& region) const {
  const int chunks = calls[call].front().spec.chunks;
  const int buffer = region.rank * kBuffers + static_cast<int>(region.buffer);
  return region_bases_[call] + buffer * regions_of_buffer(call) + region.shard * chunks + region.chunk;
}

int Graph::regions_of_buffer(int call) const {
  const Spec& spec = calls[call].front().spec;
  return slot_shards(spec) * spec.chunks;
}

int Graph::call_of_region(int id) const {
  return static_cast<int>(std::upper_bound(region_bases_.begin(), region_bases_.end(), id) - region_bases_.begin()) - 1;
}

Region Graph::region(int id) const {
  const int call = call_of_region(id);
  const int chunks = calls[call].front().spec.chunks;
  const int size = regions_of_buffer(call);
  const int buffer = (id - region_bases_[call]) / size, index = (id - region_bases_[call]) % size;
  return {static_cast<Buffer>(buffer % kBuffers), buffer / kBuffers, index / chunks, index % chunks};
}

std::vector<Place> Graph::places(const std::vector<int>& ids) const {
  std::vector<Place> found;
  for (const int id : ids) {
    const Node& node = nodes[id];
    if (node.op) found.push_back({node.call, node.rank, id - begin(node.call, node.rank) - 1});
  }
  return found;
}

std::string Graph::describe(int id) const {
  const Node& node = nodes[id];
  std::string text = calls.size() > 1 ? "call " + std::to_string(node.call) + " " : "";
  text += "rank " + std::to_string(node.rank) + " ";
  if (node.type == Node::Type::Begin) return text + "main [the caller, before the call]";
  if (node.type == Node::Type::Issued) return text + "main [the caller, once the call is issued]";
  if (node.type == Node::Type::End) return text + "main [the caller, after the call]";
  return text + name(node.op->stream) + " [" + to_string(*node.op) + "]";
}

}  // namespace streamoverlap::plan
