#include "prune.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "check.h"
#include "clocks.h"
#include "deadlock.h"
#include "graph.h"
#include "report.h"
#include "requirements.h"

namespace streamoverlap::plan {
namespace {

// Dropping a Wait takes order away and changes nothing else, so of all that the checker asks only the requirements and
// the deadlock in any order can fail; values follow from races being absent. Two calls in a row ask all that one asks.
class Pruner {
 public:
  explicit Pruner(const std::vector<Plan>& plans)
      : calls_{plans, plans},
        graph_(calls_),
        clocks_(graph_, Edges::All),
        local_(graph_, Edges::Local),
        dropped_(graph_.nodes.size(), 0),
        seen_(graph_.nodes.size(), 0) {
    Report report;
    order_ = order_of(graph_, report);
    local_.compute(order_);
  }

  void drop_implied() {
    for (const bool by_earlier : {true, false}) {
      std::vector<int> implied;
      for (int rank = 0; rank < graph_.world; ++rank) {
        for (int node = graph_.begin(0, rank); node < graph_.end(0, rank); ++node) {
          if (!graph_.nodes[node].is(Kind::Wait) || dropped_[node]) continue;
          if (by_earlier ? known(node, graph_.previous(node)) : known_soon(node)) implied.push_back(node);
        }
      }
      for (const int node : implied) drop(node, true);
      local_.compute(order_, &dropped_);
    }
  }

  void drop_unneeded() {
    if (!aligned()) return;
    clocks_.compute(order_);
    list_requirements();
    clocks_.compute(order_, &dropped_);
    const auto count = static_cast<int>(calls_[0][0].ops.size());
    for (int op = 0; op < count; ++op) {
      const int node = node_of(0, op);
      if (!graph_.nodes[node].is(Kind::Wait) || dropped_[node]) continue;
      drop_everywhere(op, true);
      if (!sound(op)) drop_everywhere(op, false);
    }
  }

  std::vector<Plan> result() const {
    std::vector<Plan> plans;
    for (int rank = 0; rank < graph_.world; ++rank) plans.push_back(without_dropped(rank));
    return plans;
  }

 private:
  int node_of(int rank, int op) const { return graph_.begin(0, rank) + 1 + op; }

  void drop(int node, bool value) {
    const int rank = graph_.nodes[node].rank;
    dropped_[node] = value;
    dropped_[node - graph_.begin(0, rank) + graph_.begin(1, rank)] = value;
  }

  void drop_everywhere(int op, bool value) {
    for (int rank = 0; rank < graph_.world; ++rank) drop(node_of(rank, op), value);
  }

  // The last node that a Record stands for, -1 where its stream has done nothing yet.
  int recorded(int wait) const {
    int node = graph_.nodes[wait].source;
    while (node >= 0 && (graph_.nodes[node].is(Kind::Record) || dropped_[node])) node = graph_.previous(node);
    return node;
  }

  // Whether by the rank's own edges what `wait` waits for is over at `node` anyway.
  bool known(int wait, int node) const {
    const int last = recorded(wait);
    return last < 0 || (node >= 0 && local_.before_or_same(last, node));
  }

  // Whether another Wait follows at once that covers this one.
  bool known_soon(int wait) const {
    const auto& chain = graph_.chains[graph_.nodes[wait].chain];
    for (std::size_t i = graph_.nodes[wait].position + 1; i < chain.size() && graph_.nodes[chain[i]].is(Kind::Wait);
         ++i) {
      if (!dropped_[chain[i]] && known(wait, graph_.nodes[chain[i]].source)) return true;
    }
    return false;
  }

  // Ranks whose plans differ in more than their numbers would not drop the same Waits.
  bool aligned() const {
    const std::vector<Op>& first = calls_[0][0].ops;
    for (int rank = 1; rank < graph_.world; ++rank) {
      const std::vector<Op>& ops = calls_[0][rank].ops;
      if (ops.size() != first.size()) return false;
      for (std::size_t op = 0; op < ops.size(); ++op) {
        const int node = node_of(rank, static_cast<int>(op)), reference = node_of(0, static_cast<int>(op));
        if (ops[op].kind != first[op].kind || dropped_[node] != dropped_[reference]) return false;
      }
    }
    return true;
  }

  // By the node that comes after.
  void list_requirements() {
    std::vector<Requirement> all = requirements(graph_);
    first_requirement_.assign(graph_.nodes.size() + 1, 0);
    for (Requirement& r : all) {
      if (r.rule == Requirement::Rule::Race && clocks_.before(r.after, r.before)) std::swap(r.before, r.after);
      ++first_requirement_[r.after + 1];
    }
    std::partial_sum(first_requirement_.begin(), first_requirement_.end(), first_requirement_.begin());
    std::vector<int> next(first_requirement_.begin(), first_requirement_.end() - 1);
    requirements_.resize(all.size());
    for (const Requirement& r : all) requirements_[next[r.after]++] = r;
    last_of_.assign(graph_.nodes.size(), -1);
    for (const Requirement& r : requirements_) {
      next_of_.push_back(last_of_[r.before]);
      last_of_[r.before] = static_cast<int>(next_of_.size()) - 1;
    }
  }

  // Whether the plans are free of faults without the Waits marked so far, of which `op` of every rank is the last.
  bool sound(int op) {
    for (const int call : {0, 1}) {
      const int wait = graph_.begin(call, 0) + 1 + op;
      if (breaks_what_follows(wait) || breaks_what_came_before(wait)) return false;
    }
    local_.compute(order_, &dropped_);
    if (!runs_in_any_order(graph_, local_)) return false;
    Clocks clocks(graph_, Edges::All);
    clocks.compute(order_, &dropped_);
    const auto kept = [&](const Requirement& r) { return holds(r, graph_, clocks); };
    if (!std::all_of(requirements_.begin(), requirements_.end(), kept)) return false;
    clocks_ = std::move(clocks);
    return true;
  }

  // Most Waits are needed by the very next op of their stream, which is found without clocks of all the plans.
  bool breaks_what_follows(int wait) {
    const int source = graph_.nodes[wait].source;
    const auto& chain = graph_.chains[graph_.nodes[wait].chain];
    for (std::size_t i = graph_.nodes[wait].position + 1; i < chain.size(); ++i) {
      const int node = chain[i];
      if (graph_.nodes[node].is(Kind::Wait) && !dropped_[node]) return false;
      for (int k = first_requirement_[node]; k < first_requirement_[node + 1]; ++k) {
        const Requirement& r = requirements_[k];
        if (!clocks_.before_or_same(r.before, source)) continue;
        if (!reaches(r.before, deadline(r, graph_))) return true;
      }
    }
    return false;
  }

  // Others are needed by whoever needs what was recorded: a peer that a Notify behind the Wait lets read it.
  bool breaks_what_came_before(int wait) {
    const int last = recorded(wait);
    if (last < 0) return false;
    for (int k = last_of_[last]; k >= 0; k = next_of_[k]) {
      if (!reaches(last, deadline(requirements_[k], graph_))) return true;
    }
    return false;
  }

  // Walks back from `to` over the edges that are left. The clocks are of a time with more edges.
  bool reaches(int from, int to) {
    ++walk_;
    open_.assign(1, to);
    while (!open_.empty()) {
      const int node = open_.back();
      open_.pop_back();
      if (node < 0 || seen_[node] == walk_ || !clocks_.before_or_same(from, node)) continue;
      if (graph_.nodes[node].chain == graph_.nodes[from].chain) return true;
      seen_[node] = walk_;
      open_.push_back(graph_.previous(node));
      if (!dropped_[node]) open_.push_back(graph_.nodes[node].source);
    }
    return false;
  }

  Plan without_dropped(int rank) const {
    const Plan& plan = calls_[0][rank];
    std::vector<char> awaited(plan.events, 0);
    for (std::size_t op = 0; op < plan.ops.size(); ++op) {
      if (plan.ops[op].kind == Kind::Wait && !dropped_[node_of(rank, static_cast<int>(op))]) {
        awaited[plan.ops[op].event] = 1;
      }
    }
    Plan pruned{plan.spec, plan.rank, 0, {}};
    std::vector<int> renamed(plan.events, -1);
    for (std::size_t i = 0; i < plan.ops.size(); ++i) {
      Op op = plan.ops[i];
      if (op.kind == Kind::Wait && dropped_[node_of(rank, static_cast<int>(i))]) continue;
      if (op.kind == Kind::Record) {
        if (!awaited[op.event]) continue;
        renamed[op.event] = pruned.events++;
      }
      if (op.event >= 0) op.event = renamed[op.event];
      pruned.ops.push_back(std::move(op));
    }
    return pruned;
  }

  const Calls calls_;
  const Graph graph_;
  std::vector<int> order_;
  Clocks clocks_, local_;  // clocks_ is of the Waits dropped for good
  std::vector<char> dropped_;
  std::vector<Requirement> requirements_;
  std::vector<int> first_requirement_;  // by the node that comes after
  std::vector<int> last_of_, next_of_;  // by the node that comes before, as lists
  std::vector<int> seen_, open_;        // of a walk
  int walk_ = 0;
};

}  // namespace

std::vector<Plan> prune_implied(const std::vector<Plan>& plans) {
  Pruner pruner(plans);
  pruner.drop_implied();
  return pruner.result();
}

std::vector<Plan> prune(std::vector<Plan> plans) {
  const std::vector<Fault> faults = check(plans);
  if (!faults.empty()) {
    throw std::invalid_argument("plans have " + std::to_string(faults.size()) +
                                " faults, expected none; the first: " + faults.front().message);
  }
  Pruner pruner(plans);
  pruner.drop_implied();
  pruner.drop_unneeded();
  return pruner.result();
}

}  // namespace streamoverlap::plan
