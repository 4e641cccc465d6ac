// Deadlocks that depend on how a rank's streams share the hardware.
#include <algorithm>
#include <random>

#include "search.h"

namespace streamoverlap::interpreter {
namespace {

// Of targets of all ranks. Beyond that the same choice on all ranks is tried (plans are alike), every choice of two
// ranks, and so many random ones of all.
constexpr std::size_t kMaxChoices = 1500;
constexpr int kRandomChoices = 200;

// How far a rank goes in each of its chains.
using Goals = std::vector<Word>;

struct Target {
  int await = -1;  // -1: the rank runs everything
  Goals goals;
};

// What must be over before `step` can start, by stream order and Record -> Wait.
Goals needed_by(const Program& program, int step) {
  const auto [first, last] = program.chains_of[program.steps[step].rank];
  Goals goals(last - first, 0);
  goals[program.steps[step].chain - first] = program.steps[step].index;
  for (bool changed = true; changed;) {
    changed = false;
    for (int chain = first; chain < last; ++chain) {
      for (int i = 0; i < goals[chain - first]; ++i) {
        const int record = program.steps[program.chains[chain][i]].record;
        if (record < 0) continue;
        Word& goal = goals[program.steps[record].chain - first];
        if (goal <= program.steps[record].index) {
          goal = program.steps[record].index + 1;
          changed = true;
        }
      }
    }
  }
  return goals;
}

std::vector<Target> targets_of(const Program& program, int rank) {
  const auto [first, last] = program.chains_of[rank];
  Target all;
  for (int chain = first; chain < last; ++chain) all.goals.push_back(program.chains[chain].size());
  std::vector<Target> targets = {all};
  for (std::size_t s = 0; s < program.steps.size(); ++s) {
    const Step& step = program.steps[s];
    if (step.rank != rank || step.type != Step::Type::Await) continue;
    targets.push_back({static_cast<int>(s), needed_by(program, static_cast<int>(s))});
  }
  return targets;
}

}  // namespace

void one_queue(const Calls& calls, const Limits& limits, Report& report) {
  const Program program(calls, Queues::Folded);
  const Machine machine(program);
  State state = machine.initial();
  Goals goals;
  for (const auto& chain : program.chains) goals.push_back(chain.size());
  machine.run(state.data(), goals.data());
  std::string blocked;
  for (int rank = 0; rank < program.world; ++rank) {
    const int step = machine.head(state.data(), rank);
    if (step >= 0) blocked += (blocked.empty() ? "" : "; ") + program.describe(step);
  }
  if (!blocked.empty()) add(report, limits, "deadlock, one queue a rank: blocked at " + blocked);
}

namespace {

// An adversary picks for each rank an Await that it blocks at, and runs before it only what that Await needs. Once it
// passes, the rank runs everything. Whatever is blocked when nothing moves hangs. An order that runs more before it
// blocks sets no fewer flags, so these are the worst.
class Adversary {
 public:
  explicit Adversary(const Program& program) : program_(program), machine_(program), first_(machine_.initial()) {
    for (int rank = 0; rank < program.world; ++rank) targets.push_back(targets_of(program, rank));
  }

  // pick[r] chooses among targets[r]. Says what hangs.
  std::optional<std::string> hangs(std::vector<std::size_t> pick) {
    State state = first_;
    for (bool passed = true; passed;) {
      passed = false;
      goals_.clear();
      for (int rank = 0; rank < program_.world; ++rank) {
        const Goals& more = targets[rank][pick[rank]].goals;
        goals_.insert(goals_.end(), more.begin(), more.end());
      }
      machine_.run(state.data(), goals_.data());
      for (int rank = 0; rank < program_.world; ++rank) {
        const int await = targets[rank][pick[rank]].await;
        if (await < 0 || !machine_.at_head(state.data(), await) || !machine_.enabled(state.data(), await)) continue;
        pick[rank] = kEverything;
        passed = true;
      }
    }
    std::string blocked;
    for (int rank = 0; rank < program_.world; ++rank) {
      const int await = targets[rank][pick[rank]].await;
      if (await >= 0) blocked += (blocked.empty() ? "" : "; ") + program_.describe(await);
    }
    if (blocked.empty()) return std::nullopt;
    return "deadlock, any topological order: blocked at " + blocked;
  }

  static constexpr std::size_t kEverything = 0;  // the target that is none
  std::vector<std::vector<Target>> targets;

 private:
  const Program& program_;
  const Machine machine_;
  const State first_;
  Goals goals_;
};

}  // namespace

void topological_orders(const Program& program, const Limits& limits, Report& report) {
  Adversary adversary(program);
  const auto& targets = adversary.targets;
  std::vector<std::size_t> pick(program.world, Adversary::kEverything);
  const auto hangs = [&] {
    const auto broken = adversary.hangs(pick);
    return broken && !add(report, limits, *broken);
  };
  std::size_t choices = 1;
  for (const auto& of_rank : targets) choices = std::min(choices * of_rank.size(), kMaxChoices + 1);
  if (choices <= kMaxChoices) {
    for (std::size_t choice = 0; choice < choices; ++choice) {
      std::size_t rest = choice;
      for (int rank = 0; rank < program.world; ++rank) {
        pick[rank] = rest % targets[rank].size();
        rest /= targets[rank].size();
      }
      if (hangs()) return;
    }
    return;
  }
  for (std::size_t same = 1; same < targets[0].size(); ++same) {
    for (int rank = 0; rank < program.world; ++rank) pick[rank] = std::min(same, targets[rank].size() - 1);
    if (hangs()) return;
  }
  std::fill(pick.begin(), pick.end(), Adversary::kEverything);
  for (int a = 0; a < program.world; ++a) {
    for (int b = a + 1; b < program.world; ++b) {
      for (pick[a] = 1; pick[a] < targets[a].size(); ++pick[a]) {
        for (pick[b] = 1; pick[b] < targets[b].size(); ++pick[b]) {
          if (hangs()) return;
        }
      }
      pick[a] = pick[b] = Adversary::kEverything;
    }
  }
  std::mt19937_64 random(limits.seed);
  for (int i = 0; i < kRandomChoices; ++i) {
    for (int rank = 0; rank < program.world; ++rank) pick[rank] = random() % targets[rank].size();
    if (hangs()) return;
  }
}

}  // namespace streamoverlap::interpreter
