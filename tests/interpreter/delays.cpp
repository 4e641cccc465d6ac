// Delays: every step in turn is held back for ever while all else runs as far as it can.
//
// Holding a step is the worst that an order can do to it, and each run is a real schedule: what it shows is broken.
// It is also all there is to show, as long as no two chains compete for one flag: then nothing that can run is ever
// kept from running by another step, so what runs while a step is held does not depend on the order. Two steps that
// each run while the other is held could run at the same time; the run that holds both shows it. Where two chains do
// compete, some run shows both at the same flag, and `delayed` stays false. The exhaustive search confirms all of this
// where it is affordable (test_interpreter.py).
//
// These runs also say what waits for the caller: while the join is held, every other step of the call must run.
#include "search.h"

namespace streamoverlap::interpreter {
namespace {

class Delay {
 public:
  Delay(const Program& program, Machine& machine) : program_(program), machine_(machine) {}

  bool competed() const { return competed_; }

  // Holds back the steps `a` and `b`; -1: none.
  std::optional<std::string> run(State& state, int a, int b) {
    const Word* s = state.data();
    const int chains = static_cast<int>(program_.chains.size());
    for (bool moved = true; moved;) {
      moved = false;
      for (int chain = 0; chain < chains; ++chain) {
        for (int step = machine_.head(s, chain); step >= 0; step = machine_.head(s, chain)) {
          if (step == a || step == b || !machine_.enabled(s, step)) break;
          note_rivals(s, step);
          if (auto broken = machine_.execute(state.data(), step)) return broken;
          moved = true;
        }
      }
    }
    if (a < 0) return machine_.halt(s);
    if (machine_.at_head(s, a)) note_rivals(s, a);
    if (b >= 0 && machine_.at_head(s, a) && machine_.at_head(s, b)) return torn(program_, {a, b});
    return std::nullopt;
  }

  // What should have run while the join was held.
  std::optional<std::string> held_up(const State& state, int held) const {
    const Word* s = state.data();
    const Step& by = program_.steps[held];
    if (by.type != Step::Type::Join || !machine_.at_head(s, held)) return std::nullopt;
    for (std::size_t other = 0; other < program_.steps.size(); ++other) {
      const Step& step = program_.steps[other];
      if (step.chain == by.chain || step.call > by.call || machine_.done(s, static_cast<int>(other))) continue;
      return "the exchange is held up: " + program_.describe(static_cast<int>(other)) + " waits for " +
             program_.describe(held);
    }
    return std::nullopt;
  }

 private:
  void note_rivals(const Word* s, int step) {
    for (const int rival : program_.steps[step].rivals) competed_ |= machine_.at_head(s, rival);
  }

  const Program& program_;
  Machine& machine_;
  bool competed_ = false;
};

}  // namespace

void delays(const Program& program, const Limits& limits, Report& report) {
  Machine machine(program);
  Delay delay(program, machine);
  const State first = machine.initial();
  const int steps = static_cast<int>(program.steps.size());
  std::vector<State> without(steps);  // where everything gets while a step is held
  for (int held = -1; held < steps; ++held) {
    if (held >= 0 && program.steps[held].passes()) continue;
    State state = first;
    auto broken = delay.run(state, held, -1);
    if (!broken && held >= 0) broken = delay.held_up(state, held);
    if (broken && !add(report, limits, *broken)) return;
    if (held >= 0) without[held] = std::move(state);
  }
  for (int a = 0; a < steps; ++a) {
    for (int b = a + 1; b < steps; ++b) {
      if (!program.conflict(a, b)) continue;
      if (!machine.done(without[a].data(), b) || !machine.done(without[b].data(), a)) continue;
      State state = first;
      const auto broken = delay.run(state, a, b);
      if (broken && !add(report, limits, *broken)) return;
    }
  }
  report.delayed = !delay.competed();
}

}  // namespace streamoverlap::interpreter
