// Every interleaving: depth first over all states, each seen once.
#include <random>

#include "search.h"

namespace streamoverlap::interpreter {
namespace {

// A set of 64-bit hashes of states, with open addressing. At 2 million states the chance that any two of them share
// one is about 1e-7.
class HashSet {
 public:
  HashSet() : slots_(1 << 10, 0) {}

  std::size_t size() const { return size_; }

  bool insert(std::uint64_t key) {
    key |= key == 0;
    if (2 * size_ >= slots_.size()) grow();
    if (!place(key)) return false;
    ++size_;
    return true;
  }

 private:
  bool place(std::uint64_t key) {
    for (std::size_t i = key & (slots_.size() - 1);; i = (i + 1) & (slots_.size() - 1)) {
      if (slots_[i] == key) return false;
      if (slots_[i] == 0) return slots_[i] = key, true;
    }
  }

  void grow() {
    std::vector<std::uint64_t> old(2 * slots_.size(), 0);
    old.swap(slots_);
    for (const std::uint64_t key : old) {
      if (key != 0) place(key);
    }
  }

  std::vector<std::uint64_t> slots_;
  std::size_t size_ = 0;
};

std::uint64_t hash(const Word* s, std::size_t words) {
  std::uint64_t h = 0x9e3779b97f4a7c15u;
  const auto mix = [&](std::uint64_t v) {
    h = (h ^ v) * 0xff51afd7ed558ccdu;
    h ^= h >> 32;
  };
  std::size_t i = 0;
  for (; i + 4 <= words; i += 4) {
    mix(s[i] | std::uint64_t{s[i + 1]} << 16 | std::uint64_t{s[i + 2]} << 32 | std::uint64_t{s[i + 3]} << 48);
  }
  for (; i < words; ++i) mix(s[i]);
  return h;
}

}  // namespace

void movable_steps(const Program& program, const Machine& machine, const Word* state, std::vector<int>& steps) {
  steps.clear();
  for (std::size_t chain = 0; chain < program.chains.size(); ++chain) {
    const int step = machine.head(state, static_cast<int>(chain));
    if (step >= 0 && machine.enabled(state, step)) steps.push_back(step);
  }
}

std::optional<std::string> torn(const Program& program, const std::vector<int>& movable) {
  for (std::size_t i = 0; i < movable.size(); ++i) {
    for (std::size_t j = i + 1; j < movable.size(); ++j) {
      if (program.conflict(movable[i], movable[j])) {
        return "torn: " + program.describe(movable[i]) + " and " + program.describe(movable[j]) +
               " touch one region at the same time";
      }
    }
  }
  return std::nullopt;
}

void every_interleaving(const Program& program, const Limits& limits, Report& report) {
  Machine machine(program);
  const std::size_t words = machine.words();
  State open = machine.initial();  // states to go on from, one after the other
  State state(words);
  HashSet seen;
  seen.insert(hash(open.data(), words));
  std::vector<int> movable;
  const auto finish = [&](bool exhaustive) {
    report.states = seen.size();
    report.exhaustive = exhaustive;
  };

  while (!open.empty()) {
    std::copy(open.end() - words, open.end(), state.begin());
    open.resize(open.size() - words);
    movable_steps(program, machine, state.data(), movable);
    // After a tear contents mean nothing: such a state is not continued.
    std::optional<std::string> broken = movable.empty() ? machine.halt(state.data()) : torn(program, movable);
    if (broken) {
      if (!add(report, limits, *broken)) return finish(false);
      continue;
    }
    for (const int step : movable) {
      open.insert(open.end(), state.begin(), state.end());
      Word* next = open.data() + open.size() - words;
      broken = machine.execute(next, step);
      if (broken && !add(report, limits, *broken)) return finish(false);
      if (broken || !seen.insert(hash(next, words))) open.resize(open.size() - words);
      if (seen.size() > limits.states) return finish(false);
    }
  }
  finish(true);
}

void random_schedules(const Program& program, const Limits& limits, Report& report) {
  Machine machine(program);
  std::mt19937_64 random(limits.seed);
  std::vector<int> movable;
  for (int i = 0; i < limits.schedules; ++i) {
    State state = machine.initial();
    std::optional<std::string> broken;
    while (!broken) {
      movable_steps(program, machine, state.data(), movable);
      if (movable.empty()) {
        broken = machine.halt(state.data());
        break;
      }
      broken = torn(program, movable);
      if (!broken) broken = machine.execute(state.data(), movable[random() % movable.size()]);
    }
    if (broken && !add(report, limits, *broken)) return;
  }
}

}  // namespace streamoverlap::interpreter
