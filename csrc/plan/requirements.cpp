#include "requirements.h"

#include <algorithm>
#include <array>

namespace streamoverlap::plan {
namespace {

using Rule = Requirement::Rule;

// The accesses of a whole buffer of a rank in one call.
struct Span {
  const Access* first;
  const Access* last;
  const Access* begin() const { return first; }
  const Access* end() const { return last; }
};

Span accesses_of(const Graph& graph, int call, int rank, Buffer buffer) {
  const int from = graph.region_id(call, {buffer, rank, 0, 0});
  const auto at = [&](int region) {
    return std::lower_bound(graph.accesses.data(), graph.accesses.data() + graph.accesses.size(), region,
                            [](const Access& access, int id) { return access.region < id; });
  };
  return {at(from), at(from + graph.regions_of_buffer(call))};
}

// Memory that consecutive calls share, each laying it out anew: what one has in any part of it overlaps all of
// another's.
const std::vector<Buffer> kShared[] = {{Buffer::Slot, Buffer::SlotScales}, {Buffer::Scratch, Buffer::Packed}};

std::vector<Access> accesses_of(const Graph& graph, int call, int rank, const std::vector<Buffer>& memory) {
  std::vector<Access> found;
  for (const Buffer buffer : memory) {
    const Span span = accesses_of(graph, call, rank, buffer);
    found.insert(found.end(), span.begin(), span.end());
  }
  return found;
}

class Collector {
 public:
  explicit Collector(const Graph& graph) : g_(graph), calls_(static_cast<int>(graph.calls.size())) {}

  std::vector<Requirement> collect() {
    races();
    reuse();
    flags();
    for (int call = 0; call < calls_; ++call) {
      for (int rank = 0; rank < g_.world; ++rank) streams(call, rank);
    }
    credits();
    return std::move(found_);
  }

 private:
  void require(Rule rule, int before, int after, int region = -1) { found_.push_back({rule, before, after, region}); }

  void races() {
    const auto& all = g_.accesses;
    for (std::size_t i = 0; i < all.size(); ++i) {
      for (std::size_t j = i + 1; j < all.size() && all[j].region == all[i].region; ++j) {
        const Node& a = g_.nodes[all[i].node];
        const Node& b = g_.nodes[all[j].node];
        const bool both_callers = !a.op && !b.op;
        if ((all[i].write || all[j].write) && a.chain != b.chain && !both_callers) {
          require(Rule::Race, all[i].node, all[j].node, all[i].region);
        }
      }
    }
  }

  // The ends of what a chain does to a buffer in a call; all between is ordered by the chain itself.
  struct Reach {
    int chain;
    int first = -1, last = -1, first_write = -1, last_write = -1;
  };

  std::vector<Reach> reach(int call, int rank, const std::vector<Buffer>& memory) const {
    std::vector<Reach> chains;
    for (const Access& access : accesses_of(g_, call, rank, memory)) {
      const int chain = g_.nodes[access.node].chain;
      auto it = std::find_if(chains.begin(), chains.end(), [&](const Reach& r) { return r.chain == chain; });
      if (it == chains.end()) it = chains.insert(it, Reach{chain});
      const auto widen = [&](int& first, int& last) {
        if (first < 0 || access.node < first) first = access.node;
        last = std::max(last, access.node);
      };
      widen(it->first, it->last);
      if (access.write) widen(it->first_write, it->last_write);
    }
    return chains;
  }

  // Sizes and chunks may differ from call to call, so across calls all of a rank's slot is one region, and so is all
  // of its scratch memory.
  void reuse() {
    if (calls_ == 1) return;
    for (const std::vector<Buffer>& memory : kShared) {
      for (int rank = 0; rank < g_.world; ++rank) {
        std::vector<std::vector<Reach>> of_call;
        for (int call = 0; call < calls_; ++call) of_call.push_back(reach(call, rank, memory));
        for (int earlier = 0; earlier < calls_; ++earlier) {
          for (int later = earlier + 1; later < calls_; ++later) reuse(of_call[earlier], of_call[later]);
        }
      }
    }
  }

  void reuse(const std::vector<Reach>& earlier, const std::vector<Reach>& later) {
    for (const Reach& a : earlier) {
      for (const Reach& b : later) {
        if (b.first_write >= 0) require(Rule::Reuse, a.last, b.first_write);
        if (a.last_write >= 0 && (b.first != b.first_write || a.last != a.last_write)) {
          require(Rule::Reuse, a.last_write, b.first);
        }
      }
    }
  }

  void flags() {
    for (const FlagUses& flag : g_.flags) {
      const int count = flag.last - flag.middle;
      for (int k = 1; k < count; ++k) {
        require(Rule::AwaitsInTurn, g_.uses[flag.middle + k - 1], g_.uses[flag.middle + k]);
      }
      // The k-th Notify follows the Await that took the one before; an Empty flag starts set, as if by one more.
      const int ahead = flag.flag.kind == FlagKind::Full ? 1 : 0;
      for (int k = ahead; k < flag.middle - flag.first && k - ahead < count; ++k) {
        require(Rule::FlagCleared, g_.uses[flag.middle + k - ahead], g_.uses[flag.first + k]);
      }
    }
  }

  void streams(int call, int rank) {
    std::array<int, kMaxStreams> first, last;
    first.fill(-1);
    last.fill(-1);
    for (int node = g_.begin(call, rank) + 1; node < g_.issued(call, rank); ++node) {
      if (!g_.nodes[node].works()) continue;
      const Stream stream = g_.nodes[node].op->stream;
      if (first[stream] < 0) first[stream] = node;
      last[stream] = node;
    }
    for (Stream stream = 0; stream < kMaxStreams; ++stream) {
      if (first[stream] < 0) continue;
      require(Rule::Started, g_.begin(call, rank), first[stream]);
      require(Rule::Joined, last[stream], g_.end(call, rank));
    }
  }

  // Rule 3 of the slot contract. That each credit is taken and returned once is counted in flags.cpp.
  void credits() {
    std::vector<int> taken(calls_ * g_.world * g_.world, -1);  // the Await of (call, sender, receiver)
    const auto pair = [&](int call, int sender, int receiver) {
      return (call * g_.world + sender) * g_.world + receiver;
    };
    for (const FlagUses& flag : g_.flags) {
      if (flag.flag.kind != FlagKind::Empty) continue;
      for (int k = flag.last - 1; k >= flag.middle; --k) {
        taken[pair(g_.nodes[g_.uses[k]].call, flag.flag.sender, flag.flag.receiver)] = g_.uses[k];
      }
    }
    for (int call = 0; call < calls_; ++call) {
      for (int rank = 0; rank < g_.world; ++rank) credits_of(call, rank, &taken[pair(call, rank, 0)]);
    }
  }

  void credits_of(int call, int rank, const int* taken) {
    std::array<int, kMaxStreams> last_use;
    last_use.fill(-1);
    for (int node = g_.begin(call, rank) + 1; node < g_.issued(call, rank); ++node) {
      const Op& op = *g_.nodes[node].op;
      const bool full = op.flag.kind == FlagKind::Full;
      if (op.writes_peer(rank) || (op.kind == Kind::Notify && full)) {
        const int to = op.kind == Kind::Notify ? op.flag.receiver : op.writes[0].rank;
        if (taken[to] >= 0) require(Rule::CreditTaken, taken[to], node);
      }
      const auto own_slot = [&](const Region& region) { return in_slot(region.buffer) && region.rank == rank; };
      if ((op.kind == Kind::Await && full) || std::any_of(op.reads.begin(), op.reads.end(), own_slot) ||
          std::any_of(op.writes.begin(), op.writes.end(), own_slot)) {
        last_use[op.stream] = node;
      }
    }
    for (int node = g_.begin(call, rank) + 1; node < g_.issued(call, rank); ++node) {
      const Op& op = *g_.nodes[node].op;
      if (op.kind != Kind::Notify || op.flag.kind != FlagKind::Empty) continue;
      for (const int use : last_use) {
        if (use >= 0) require(Rule::CreditReturned, use, node);
      }
    }
  }

  const Graph& g_;
  const int calls_;
  std::vector<Requirement> found_;
};

// Names every pair of accesses that a broken Reuse stands for.
void report_reuse(const Requirement& broken, const Graph& graph, const Clocks& clocks, Report& report) {
  const Node& before = graph.nodes[broken.before];
  const Node& after = graph.nodes[broken.after];
  for (const std::vector<Buffer>& memory : kShared) {
    for (int rank = 0; rank < graph.world; ++rank) {
      for (const Access& a : accesses_of(graph, before.call, rank, memory)) {
        if (graph.nodes[a.node].chain != before.chain) continue;
        for (const Access& b : accesses_of(graph, after.call, rank, memory)) {
          if (graph.nodes[b.node].chain != after.chain || (!a.write && !b.write)) continue;
          if (clocks.before(a.node, b.node) || !report.wants(FaultKind::Race)) continue;
          report.add(FaultKind::Race,
                     "race on " + std::string(name(memory.front())) + "@" + std::to_string(rank) +
                         " across calls: " + graph.describe(b.node) + " does not come after " + graph.describe(a.node),
                     graph.places({a.node, b.node}));
        }
      }
    }
  }
}

}  // namespace

std::vector<Requirement> requirements(const Graph& graph) { return Collector(graph).collect(); }

int deadline(const Requirement& r, const Graph& graph) {
  return r.rule == Rule::AwaitsInTurn || r.rule == Rule::Started ? graph.previous(r.after) : r.after;
}

bool holds(const Requirement& r, const Graph& graph, const Clocks& clocks) {
  const int node = deadline(r, graph);
  return (node >= 0 && clocks.before_or_same(r.before, node)) ||
         (r.rule == Rule::Race && clocks.before(r.after, r.before));
}

void report_broken(const Requirement& r, const Graph& graph, const Clocks& clocks, Report& report) {
  const std::string before = graph.describe(r.before), after = graph.describe(r.after);
  const std::vector<Place> both = graph.places({r.before, r.after});
  switch (r.rule) {
    case Rule::Race:
      return report.add(
          FaultKind::Race,
          "race on " + to_string(graph.region(r.region)) + ": " + before + " and " + after + " are not ordered", both);
    case Rule::Reuse:
      return report_reuse(r, graph, clocks, report);
    case Rule::FlagCleared:
      return report.add(FaultKind::FlagState,
                        "a flag can be set twice: " + after + " does not come after " + before + ", which clears it",
                        both);
    case Rule::AwaitsInTurn:
      return report.add(FaultKind::FlagState,
                        "two awaits of a flag are not ordered, each could take what the other "
                        "waits for: " +
                            before + " and " + after,
                        both);
    case Rule::Started:
      return report.add(FaultKind::NotJoined, after + " does not wait for main: it can start before the call does",
                        both);
    case Rule::Joined:
      return report.add(FaultKind::NotJoined,
                        before +
                            " is not joined: main does not wait for it before the call "
                            "ends",
                        both);
    case Rule::CreditTaken:
      return report.add(FaultKind::Credit, after + " does not come after " + before + ", which takes the credit", both);
    case Rule::CreditReturned:
      return report.add(FaultKind::Credit, "credit returned too early: " + after + " does not come after " + before,
                        both);
  }
}

}  // namespace streamoverlap::plan
