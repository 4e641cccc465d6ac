#include "mutants.h"

#include <algorithm>
#include <set>

namespace streamoverlap::interpreter {
namespace {

using plan::FlagKind;
using plan::Op;
using plan::Plan;
using OpKind = plan::Kind;
using Kind = Mutation::Kind;

bool has_flag(const Op& op) { return op.kind == OpKind::Notify || op.kind == OpKind::Await; }

// A rank sends full flags and awaits empty ones as the sender; otherwise it is the receiver.
int& peer_of(plan::Flag& flag, int rank) { return flag.sender == rank ? flag.receiver : flag.sender; }

int distance(const Plan& plan, const Op& op) {
  plan::Flag flag = op.flag;
  return ((peer_of(flag, plan.rank) - plan.rank) % plan.spec.world + plan.spec.world) % plan.spec.world;
}

void add_moves(const Plan& plan, int at, std::vector<Mutation>& all) {
  std::vector<int> places;  // of the ops of this stream
  int mine = 0;
  for (int i = 0; i < static_cast<int>(plan.ops.size()); ++i) {
    if (plan.ops[i].stream != plan.ops[at].stream) continue;
    if (i == at) mine = static_cast<int>(places.size());
    places.push_back(i);
  }
  const int last = static_cast<int>(places.size()) - 1;
  const OpKind kind = plan.ops[at].kind;
  std::set<int> goals = {0, mine - 2, mine - 1, mine + 1, mine + 2, last};
  for (const int goal : goals) {
    if (goal < 0 || goal > last || goal == mine) continue;
    const bool commutes = kind == OpKind::Record || kind == OpKind::Wait;
    const auto alike = [&](int place) { return plan.ops[place].kind == kind; };
    const auto from = places.begin() + std::min(goal, mine), to = places.begin() + std::max(goal, mine) + 1;
    if (!commutes || !std::all_of(from, to, alike)) all.push_back({Kind::Move, at, places[goal]});
  }
}

void add_flags(const Plan& plan, int at, std::vector<Mutation>& all) {
  const Op& op = plan.ops[at];
  for (int d = 1; d < plan.spec.world; ++d) {
    if (d != distance(plan, op)) all.push_back({Kind::Peer, at, d});
  }
  if (op.flag.kind == FlagKind::Full) {
    std::set<int> indices = {op.flag.index + 1};
    for (const Op& other : plan.ops) {
      if (has_flag(other) && other.flag.kind == FlagKind::Full) indices.insert(other.flag.index);
    }
    indices.erase(op.flag.index);
    for (const int index : indices) all.push_back({Kind::Index, at, index});
  }
  if (op.kind == OpKind::Notify) all.push_back({Kind::Flag, at, 0});
}

void add_events(const Plan& plan, int at, std::vector<Mutation>& all) {
  const Op& op = plan.ops[at];
  std::set<plan::Stream> streams;
  for (const Op& other : plan.ops) streams.insert(other.stream);
  streams.erase(op.stream);
  for (const plan::Stream stream : streams) all.push_back({Kind::Stream, at, stream});
  if (op.kind != OpKind::Wait) return;
  std::vector<int> recorded;
  for (int i = 0; i < at; ++i) {
    if (plan.ops[i].kind == OpKind::Record && plan.ops[i].event != op.event) recorded.push_back(plan.ops[i].event);
  }
  for (std::size_t i = 0; i < recorded.size(); ++i) {
    if (i == 0 || i + 3 >= recorded.size()) all.push_back({Kind::Event, at, recorded[i]});
  }
}

Plan without(const Plan& plan, int at) {
  Plan result = plan;
  const Op op = plan.ops[at];
  result.ops.erase(result.ops.begin() + at);
  if (op.kind == OpKind::Record) {
    const auto orphan = [&](const Op& o) { return o.kind == OpKind::Wait && o.event == op.event; };
    result.ops.erase(std::remove_if(result.ops.begin(), result.ops.end(), orphan), result.ops.end());
  }
  return result;
}

}  // namespace

std::vector<Mutation> mutations(const Plan& plan) {
  std::vector<Mutation> all;
  for (int at = 0; at < static_cast<int>(plan.ops.size()); ++at) {
    if (plan.ops[at].is_data()) continue;
    all.push_back({Kind::Delete, at, 0});
    add_moves(plan, at, all);
    has_flag(plan.ops[at]) ? add_flags(plan, at, all) : add_events(plan, at, all);
  }
  return all;
}

std::optional<Plan> apply(const Plan& plan, const Mutation& m) {
  const int count = static_cast<int>(plan.ops.size());
  if (m.op >= count || plan.ops[m.op].is_data() || (m.kind == Kind::Move && m.value >= count)) return std::nullopt;
  const bool of_flag = m.kind == Kind::Peer || m.kind == Kind::Index || m.kind == Kind::Flag;
  const bool of_event = m.kind == Kind::Stream || m.kind == Kind::Event;
  if ((of_flag && !has_flag(plan.ops[m.op])) || (of_event && has_flag(plan.ops[m.op]))) return std::nullopt;
  if (m.kind == Kind::Delete) return without(plan, m.op);

  Plan result = plan;
  Op& op = result.ops[m.op];
  switch (m.kind) {
    case Kind::Delete:
      break;
    case Kind::Move: {
      const auto from = result.ops.begin() + m.op, to = result.ops.begin() + m.value;
      m.op < m.value ? std::rotate(from, from + 1, to + 1) : std::rotate(to, from, from + 1);
      break;
    }
    case Kind::Peer:
      peer_of(op.flag, plan.rank) = (plan.rank + m.value) % plan.spec.world;
      break;
    case Kind::Index:
      op.flag.index = m.value;
      break;
    case Kind::Flag:  // set by the same rank, for the same peer
      op.flag.kind = op.flag.kind == FlagKind::Full ? FlagKind::Empty : FlagKind::Full;
      std::swap(op.flag.sender, op.flag.receiver);
      op.flag.index = 0;
      break;
    case Kind::Stream:
      op.stream = m.value;
      break;
    case Kind::Event:
      op.event = m.value;
      break;
  }
  return result;
}

std::string describe(const Plan& plan, const Mutation& m) {
  const auto text = [](const Op& op) { return plan::name(op.stream) + " [" + plan::to_string(op) + "]"; };
  const std::string what = "op " + std::to_string(m.op) + " " + text(plan.ops[m.op]);
  const auto number = std::to_string(m.value);
  switch (m.kind) {
    case Kind::Delete:
      return "delete " + what;
    case Kind::Move:
      return "move " + what + (m.value < m.op ? " before op " : " after op ") + number + " " + text(plan.ops[m.value]);
    case Kind::Peer:
      return "redirect " + what + " to rank " + std::to_string((plan.rank + m.value) % plan.spec.world);
    case Kind::Index:
      return "redirect " + what + " to index " + number;
    case Kind::Flag:
      return "redirect " + what + " to the other kind of flag";
    case Kind::Stream:
      return "redirect " + what + " to stream " + plan::name(plan::Stream{m.value});
    case Kind::Event:
      return "redirect " + what + " to event " + number;
  }
  return what;
}

}  // namespace streamoverlap::interpreter
