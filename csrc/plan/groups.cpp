#include "groups.h"

#include <algorithm>
#include <array>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

namespace streamoverlap::plan {
namespace {

struct Step {
  const Op* op;  // null: the end of a call on main
  int call, process;
};

using Edges = std::vector<std::vector<int>>;  // by node, the nodes it waits for

class Processes {
 public:
  Processes(const std::vector<GroupCall>& calls, const std::vector<std::vector<int>>& orders) : calls_(calls) {
    first_.push_back(0);
    for (int process = 0; process < static_cast<int>(orders.size()); ++process) {
      int end = -1;
      for (const int call : orders[process]) end = add(call, process, end);
      first_.push_back(static_cast<int>(steps_.size()));
    }
    match();
  }

  void check(std::vector<Fault>& faults) const {
    for (const int await : never_set_) report({await}, "on a flag that nobody sets", faults);
    report(cycle(with_peers(local_)), "with streams independent", faults);
    Edges queued(steps_.size());
    for (std::size_t process = 0; process + 1 < first_.size(); ++process) {
      for (int node = first_[process] + 1; node < first_[process + 1]; ++node) queued[node] = {node - 1};
    }
    report(cycle(with_peers(std::move(queued))), "with the streams of a process in one queue", faults);
    report(adversary(), "with the ops of a process in any order that its own edges allow", faults);
  }

 private:
  int add(int call, int process, int previous_end) {
    const GroupCall& group = calls_[call];
    const auto member = std::find(group.members.begin(), group.members.end(), process);
    const Plan& plan = group.plans[member - group.members.begin()];
    std::array<int, kMaxStreams> last;
    last.fill(-1);
    last[kMain] = previous_end;
    std::vector<int> records(plan.events, -1);
    const auto node = [&](const Op* op, Stream stream) {
      const int id = static_cast<int>(steps_.size());
      steps_.push_back({op, call, process});
      local_.emplace_back();
      if (last[stream] >= 0) local_[id].push_back(last[stream]);
      return last[stream] = id;
    };
    for (const Op& op : plan.ops) {
      const int id = node(&op, op.stream);
      if (op.kind == Kind::Record) records[op.event] = id;
      if (op.kind == Kind::Wait) local_[id].push_back(records[op.event]);
    }
    return node(nullptr, kMain);
  }

  // As in one group: an Await takes the Notify of its turn, and the first credit is there from the start.
  void match() {
    std::map<std::pair<std::vector<int>, Flag>, std::pair<std::vector<int>, std::vector<int>>> uses;
    for (int id = 0; id < static_cast<int>(steps_.size()); ++id) {
      const Op* op = steps_[id].op;
      if (!op || (op->kind != Kind::Notify && op->kind != Kind::Await)) continue;
      auto& [notifies, awaits] = uses[{calls_[steps_[id].call].members, op->flag}];
      (op->kind == Kind::Notify ? notifies : awaits).push_back(id);
    }
    notify_of_.assign(steps_.size(), -1);
    for (const auto& [key, use] : uses) {
      const std::size_t free = key.second.kind == FlagKind::Empty ? 1 : 0;
      for (std::size_t k = free; k < use.second.size(); ++k) {
        if (k - free < use.first.size()) {
          notify_of_[use.second[k]] = use.first[k - free];
        } else {
          never_set_.push_back(use.second[k]);
        }
      }
    }
  }

  Edges with_peers(Edges edges) const {
    for (std::size_t id = 0; id < steps_.size(); ++id) {
      if (notify_of_[id] >= 0) edges[id].push_back(notify_of_[id]);
    }
    return edges;
  }

  // Nodes of a cycle, empty if there is none.
  static std::vector<int> cycle(const Edges& edges) {
    enum : char { kNew, kOpen, kDone };
    std::vector<char> state(edges.size(), kNew);
    std::vector<std::pair<int, std::size_t>> path;
    for (int start = 0; start < static_cast<int>(edges.size()); ++start) {
      if (state[start] != kNew) continue;
      path.assign(1, {start, 0});
      state[start] = kOpen;
      while (!path.empty()) {
        auto& [node, next] = path.back();
        if (next == edges[node].size()) {
          state[node] = kDone;
          path.pop_back();
          continue;
        }
        const int target = edges[node][next++];
        if (state[target] == kOpen) {
          std::vector<int> found;
          for (auto step = path.rbegin(); step->first != target; ++step) found.push_back(step->first);
          found.push_back(target);
          return found;
        }
        if (state[target] != kNew) continue;
        state[target] = kOpen;
        path.emplace_back(target, 0);
      }
    }
    return {};
  }

  // Await a may hang on Await b of another process if b can be reached there before what notifies a.
  std::vector<int> adversary() const {
    std::vector<std::vector<bool>> before(steps_.size());
    for (std::size_t process = 0; process + 1 < first_.size(); ++process) {
      const int base = first_[process];
      for (int node = base; node < first_[process + 1]; ++node) {
        before[node].assign(first_[process + 1] - base, false);
        for (const int source : local_[node]) {
          before[node][source - base] = true;
          for (int i = base; i < source; ++i) {
            if (before[source][i - base]) before[node][i - base] = true;
          }
        }
      }
    }
    Edges hangs(steps_.size());
    for (int a = 0; a < static_cast<int>(steps_.size()); ++a) {
      const int notify = notify_of_[a];
      if (notify < 0) continue;
      const int process = steps_[notify].process;
      for (int b = first_[process]; b < first_[process + 1]; ++b) {
        if (notify_of_[b] >= 0 && !before[b][notify - first_[process]]) hangs[a].push_back(b);
      }
    }
    return cycle(hangs);
  }

  void report(const std::vector<int>& nodes, const char* model, std::vector<Fault>& faults) const {
    if (nodes.empty()) return;
    std::string text = std::string("deadlock ") + model + ":";
    for (const int id : nodes) {
      const Step& step = steps_[id];
      if (!step.op || (step.op->kind != Kind::Notify && step.op->kind != Kind::Await)) continue;
      text += " process " + std::to_string(step.process) + " call " + std::to_string(step.call) + " " +
              name(step.op->stream) + " [" + to_string(*step.op) + "]";
    }
    faults.push_back({FaultKind::Deadlock, text, {}});  // places are within one group; this is between several
  }

  const std::vector<GroupCall>& calls_;
  std::vector<Step> steps_;
  std::vector<int> first_;  // node of each process, and one past the last
  Edges local_;
  std::vector<int> notify_of_;  // by node: what releases this Await, -1 where nothing need or can
  std::vector<int> never_set_;  // Awaits whose Notify is in no call that its setter makes
};

}  // namespace

std::vector<Fault> check_groups(const std::vector<GroupCall>& calls, std::vector<std::vector<int>> orders) {
  int processes = 0;
  std::vector<Fault> faults;
  for (const GroupCall& call : calls) {
    if (call.plans.size() != call.members.size()) {
      throw std::invalid_argument("a call has " + std::to_string(call.plans.size()) +
                                  " plans; expected one for each of " + std::to_string(call.members.size()) +
                                  " members");
    }
    for (const int member : call.members) processes = std::max(processes, member + 1);
    const std::vector<Fault> own = plan::check(call.plans);
    faults.insert(faults.end(), own.begin(), own.end());
  }
  if (!faults.empty()) return faults;
  if (orders.empty()) {
    orders.resize(processes);
    for (int call = 0; call < static_cast<int>(calls.size()); ++call) {
      for (const int member : calls[call].members) orders[member].push_back(call);
    }
  }
  if (static_cast<int>(orders.size()) != processes) {
    throw std::invalid_argument("orders has " + std::to_string(orders.size()) + " lists; expected one for each of " +
                                std::to_string(processes) + " processes");
  }
  for (int process = 0; process < processes; ++process) {
    for (const int call : orders[process]) {
      const bool known = call >= 0 && call < static_cast<int>(calls.size()) &&
                         std::count(calls[call].members.begin(), calls[call].members.end(), process) == 1 &&
                         std::count(orders[process].begin(), orders[process].end(), call) == 1;
      if (known) continue;
      throw std::invalid_argument("orders[" + std::to_string(process) + "] has call " + std::to_string(call) +
                                  "; expected calls that process " + std::to_string(process) + " is a member of, once");
    }
  }
  Processes(calls, orders).check(faults);
  return faults;
}

}  // namespace streamoverlap::plan
