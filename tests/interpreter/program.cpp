#include "program.h"

#include <algorithm>
#include <map>

namespace streamoverlap::interpreter {
namespace {

using plan::Buffer;
using plan::Kind;
using plan::Operation;
using plan::Region;

bool gathers(const plan::Spec& spec) {
  return spec.operation == Operation::AllGatherGemm || spec.operation == Operation::AllGather;
}

// The regions of a buffer that belong to the caller.
std::vector<Region> caller_regions(const plan::Spec& spec, Buffer buffer, int rank) {
  const bool reduces_all = spec.operation == Operation::AllReduce || spec.operation == Operation::GemmAllReduce;
  const bool all_shards = reduces_all || gathers(spec) != (buffer == Buffer::Input || buffer == Buffer::Scales);
  std::vector<Region> regions;
  for (int shard = 0; shard < spec.world; ++shard) {
    if (!all_shards && shard != rank) continue;
    for (int chunk = 0; chunk < spec.chunks; ++chunk) regions.push_back({buffer, rank, shard, chunk});
  }
  return regions;
}

// The join of a call, as a stream.
constexpr plan::Stream kJoin = plan::kMaxStreams;

// The start of the join can be told from the rest of it only where it does what others could wait for.
bool has_join(const plan::Plan& plan) {
  bool joins = false, works = false;
  for (const plan::Op& op : plan.ops) {
    if (op.stream != plan::kMain) continue;
    joins |= op.kind == Kind::Wait;
    works |= joins && op.kind != Kind::Wait;
  }
  return works;
}

std::string malformed(const plan::Op& op, int rank, int world, int events) {
  if (op.stream < 0 || op.stream >= plan::kMaxStreams) return "stream " + std::to_string(op.stream);
  if (op.is_data()) {
    const std::size_t most = op.kind == Kind::Reduce ? op.reads.size() : op.kind == Kind::Gemm ? 3 : 1;
    if (op.reads.empty() || op.reads.size() > most) return std::to_string(op.reads.size()) + " reads";
    if (op.writes.size() != 1) return std::to_string(op.writes.size()) + " writes, expected 1";
    return "";
  }
  if (op.kind == Kind::Record || op.kind == Kind::Wait) {
    return op.event < 0 || op.event >= events ? "event " + std::to_string(op.event) : "";
  }
  const plan::Flag& flag = op.flag;
  const auto in_range = [&](int r) { return r >= 0 && r < world; };
  if (!in_range(flag.sender) || !in_range(flag.receiver) || flag.sender == flag.receiver || flag.index < 0) {
    return "no such flag";
  }
  const int actor = op.kind == Kind::Notify ? flag.setter() : flag.owner();
  return actor != rank ? "the flag belongs to rank " + std::to_string(actor) : "";
}

}  // namespace

class Program::Builder {
 public:
  explicit Builder(Program& program, Queues queues) : p_(program), queues_(queues) {}

  void add_rank(int rank) {
    const int first = static_cast<int>(p_.chains.size());
    std::map<std::pair<int, plan::Stream>, int> chain_of;
    const auto chain = [&](int call, plan::Stream stream) {
      if (queues_ == Queues::Folded) stream = plan::kMain;
      if (stream == plan::kMain) call = 0;
      const auto [it, fresh] = chain_of.try_emplace({call, stream}, static_cast<int>(p_.chains.size()));
      if (fresh) p_.chains.emplace_back();
      return it->second;
    };
    for (int call = 0; call < static_cast<int>(p_.calls.size()); ++call) {
      const plan::Plan& plan = p_.calls[call][rank];
      begin(call, plan, chain(call, plan::kMain));
      std::map<int, int> records;
      bool joined = false;  // main has come to its first Wait
      bool starts_join = has_join(plan);
      for (const plan::Op& op : plan.ops) {
        const std::string what = malformed(op, rank, p_.world, plan.events);
        if (!what.empty()) {
          p_.faults.push_back("malformed: rank " + std::to_string(rank) + " [" + plan::to_string(op) + "]: " + what);
          continue;
        }
        joined |= op.stream == plan::kMain && op.kind == Kind::Wait;
        const bool joins = op.stream == plan::kMain && joined;
        if (joins && starts_join) add(Step::Type::Join, call, rank, chain(call, kJoin));
        starts_join &= !joins;
        add_op(call, rank, op, chain(call, joins ? kJoin : op.stream), records);
      }
      if (plan.spec.copy_input) issued(call, plan, chain(call, plan::kMain));
      end(call, plan, chain(call, kJoin));
    }
    p_.chains_of.emplace_back(first, static_cast<int>(p_.chains.size()));
  }

  void relate() {
    const std::size_t n = p_.steps.size();
    p_.conflicts_.assign(n * n, false);
    std::vector<std::vector<std::pair<int, bool>>> accesses(p_.places.size());  // step, writes
    for (std::size_t s = 0; s < n; ++s) {
      if (!p_.steps[s].touches()) continue;
      for (const int place : p_.steps[s].reads) accesses[place].emplace_back(s, false);
      for (const int place : p_.steps[s].writes) accesses[place].emplace_back(s, true);
    }
    for (const auto& list : accesses) {
      for (const auto& [a, a_writes] : list) {
        for (const auto& [b, b_writes] : list) {
          const bool both_callers = p_.steps[a].op == nullptr && p_.steps[b].op == nullptr;
          if (a != b && (a_writes || b_writes) && !both_callers) p_.conflicts_[a * n + b] = true;
        }
      }
    }
    if (p_.calls.size() > 1) relate_calls(accesses);
    relate_awaits();
  }

 private:
  Step& add(Step::Type type, int call, int rank, int chain) {
    Step step;
    step.type = type;
    step.call = call;
    step.rank = rank;
    step.chain = chain;
    step.index = static_cast<int>(p_.chains[chain].size());
    p_.chains[chain].push_back(static_cast<int>(p_.steps.size()));
    p_.steps.push_back(std::move(step));
    return p_.steps.back();
  }

  int place(int call, const Region& region) {
    const auto [it, fresh] = places_.try_emplace({call, region}, static_cast<int>(p_.places.size()));
    if (fresh) p_.places.push_back(it->first);
    return it->second;
  }

  std::vector<int> places(int call, const std::vector<Region>& regions) {
    std::vector<int> ids;
    for (const Region& region : regions) ids.push_back(place(call, region));
    return ids;
  }

  std::vector<int> results(int call, const plan::Plan& plan) {
    std::vector<int> ids = places(call, caller_regions(plan.spec, Buffer::Output, plan.rank));
    if (plan.spec.keep_gathered) {
      const auto more = places(call, caller_regions(plan.spec, Buffer::Gathered, plan.rank));
      ids.insert(ids.end(), more.begin(), more.end());
    }
    return ids;
  }

  // What the caller has given to the call.
  std::vector<int> given(int call, const plan::Plan& plan) {
    std::vector<int> ids = places(call, caller_regions(plan.spec, Buffer::Input, plan.rank));
    if (plan.spec.scaled) {
      const auto more = places(call, caller_regions(plan.spec, Buffer::Scales, plan.rank));
      ids.insert(ids.end(), more.begin(), more.end());
    }
    return ids;
  }

  // The caller has just written the input, on main, and allocated the results.
  void begin(int call, const plan::Plan& plan, int chain) {
    std::vector<int> writes = given(call, plan);
    const std::vector<int> garbage = results(call, plan);
    writes.insert(writes.end(), garbage.begin(), garbage.end());
    Step& step = add(Step::Type::Begin, call, plan.rank, chain);
    step.writes = std::move(writes);
    if (call > 0) step.record = ended_;
    last_.assign(p_.chains.size() + plan::kMaxStreams + 1, -1);
  }

  // The input was copied: the caller may overwrite it.
  void issued(int call, const plan::Plan& plan, int chain) {
    Step& step = add(Step::Type::Issued, call, plan.rank, chain);
    step.writes = places(call, caller_regions(plan.spec, Buffer::Input, plan.rank));
  }

  // The caller reads the results and may overwrite the input.
  void end(int call, const plan::Plan& plan, int chain) {
    ended_ = static_cast<int>(p_.steps.size());
    Step& step = add(Step::Type::End, call, plan.rank, chain);
    step.reads = results(call, plan);
    step.writes = given(call, plan);
    for (const int last : last_) {
      if (last >= 0) step.joins.push_back(last);
    }
  }

  void add_op(int call, int rank, const plan::Op& op, int chain, std::map<int, int>& records) {
    constexpr Step::Type of_sync_ops[] = {Step::Type::Notify, Step::Type::Await, Step::Type::Record, Step::Type::Wait};
    if (op.kind == Kind::Wait && !records.count(op.event)) {
      // CUDA lets such a wait pass at once.
      p_.faults.push_back("wait on an event not yet recorded: rank " + std::to_string(rank) + " " +
                          plan::name(op.stream) + " [" + plan::to_string(op) + "]");
      return;
    }
    const int id = static_cast<int>(p_.steps.size());
    Step& step =
        add(op.is_data() ? Step::Type::Data : of_sync_ops[static_cast<int>(op.kind) - static_cast<int>(Kind::Notify)],
            call, rank, chain);
    step.op = &op;
    step.reads = places(call, op.reads);
    step.writes = places(call, op.writes);
    if (op.kind == Kind::Record) records[op.event] = id;
    if (op.kind == Kind::Wait) step.record = records[op.event];  // the latest issued before, as in CUDA
    if (op.kind == Kind::Notify || op.kind == Kind::Await) {
      const auto [it, fresh] = flags_.try_emplace(op.flag, static_cast<int>(p_.flags.size()));
      if (fresh) p_.flags.push_back(op.flag);
      step.flag = it->second;
    }
    if (!step.passes()) last_[chain] = id;
  }

  // Slot and scratch are raw memory: whatever another call has there overlaps.
  void relate_calls(const std::vector<std::vector<std::pair<int, bool>>>& accesses) {
    std::map<std::pair<Buffer, int>, std::vector<std::pair<int, bool>>> memory;
    for (std::size_t i = 0; i < accesses.size(); ++i) {
      const Region& region = p_.places[i].region;
      const Buffer buffer = region.buffer == Buffer::SlotScales ? Buffer::Slot
                            : region.buffer == Buffer::Packed   ? Buffer::Scratch
                                                                : region.buffer;
      if (buffer != Buffer::Slot && buffer != Buffer::Scratch) continue;
      auto& list = memory[{buffer, region.rank}];
      list.insert(list.end(), accesses[i].begin(), accesses[i].end());
    }
    for (const auto& [key, list] : memory) {
      for (const auto& [a, a_writes] : list) {
        for (const auto& [b, b_writes] : list) {
          if (p_.steps[a].call < p_.steps[b].call && (a_writes || b_writes)) p_.steps[b].earlier.push_back(a);
        }
      }
    }
  }

  void relate_awaits() {
    std::vector<std::vector<int>> awaits(p_.flags.size());
    for (std::size_t s = 0; s < p_.steps.size(); ++s) {
      if (p_.steps[s].type == Step::Type::Await) awaits[p_.steps[s].flag].push_back(static_cast<int>(s));
    }
    for (const auto& list : awaits) {
      for (const int a : list) {
        for (const int b : list) {
          if (p_.steps[a].chain != p_.steps[b].chain) p_.steps[a].rivals.push_back(b);
        }
      }
    }
  }

  Program& p_;
  Queues queues_;
  std::map<Place, int> places_;
  std::map<plan::Flag, int> flags_;
  std::vector<int> last_;  // per chain, of the call being added
  int ended_ = -1;         // the End of the call added last
};

Program::Program(const Calls& all, Queues queues) : calls(all) {
  world = calls.empty() ? 0 : static_cast<int>(calls[0].size());
  for (const auto& ranks : calls) {
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      if (static_cast<int>(ranks.size()) != world || ranks[r].rank != static_cast<int>(r) ||
          ranks[r].spec.world != world) {
        faults.push_back("malformed: a call has " + std::to_string(ranks.size()) + " plans; plan " + std::to_string(r) +
                         " is of rank " + std::to_string(ranks[r].rank) + " of " + std::to_string(ranks[r].spec.world) +
                         "; expected plans of ranks 0 to " + std::to_string(world - 1));
        return;
      }
    }
  }
  Builder builder(*this, queues);
  for (int rank = 0; rank < world; ++rank) builder.add_rank(rank);
  builder.relate();
}

std::string Program::describe(int s) const {
  const Step& step = steps[s];
  std::string text = "rank " + std::to_string(step.rank);
  if (calls.size() > 1) text += " call " + std::to_string(step.call);
  if (step.type == Step::Type::Issued) return text + " main [the caller's work after the issue]";
  if (step.type == Step::Type::Join) return text + " main [the caller joins]";
  if (step.op == nullptr)
    return text + " main [" + (step.type == Step::Type::Begin ? "begin" : "end") + " of the call]";
  return text + " " + plan::name(step.op->stream) + " [" + plan::to_string(*step.op) + "]";
}

}  // namespace streamoverlap::interpreter
