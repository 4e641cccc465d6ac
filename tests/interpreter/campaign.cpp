#include "campaign.h"

#include <algorithm>

#include "../../csrc/plan/builders.h"
#include "../../csrc/plan/check.h"
#include "../../csrc/plan/prune.h"
#include "interpreter.h"
#include "mutants.h"

namespace streamoverlap::interpreter {
namespace {

constexpr int kExhaustiveWorld = 3;
constexpr int kSchedules = 16;

using Ranks = std::vector<plan::Plan>;

struct Verdict {
  std::string broken;  // the first thing that did, if any
  bool decided = true;
  bool exhaustive = true;
};

struct Depth {
  Limits quick;      // without the exhaustive search
  Limits one, two;   // with it, by the number of calls
  Limits undecided;  // where the quick search does not decide
};

Verdict judge(const std::vector<Calls>& sequences, const Depth& depth) {
  Verdict verdict;
  // Most mutants break without the exhaustive search.
  std::vector<bool> decided;
  for (const Calls& calls : sequences) {
    const Report report = interpret(calls, depth.quick);
    if (!report.breakages.empty()) {
      verdict.broken = report.breakages[0];
      return verdict;
    }
    decided.push_back(report.decided());
  }
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    const Limits& limits = !decided[i] ? depth.undecided : sequences[i].size() == 1 ? depth.one : depth.two;
    const Report report = limits.states > 0 ? interpret(sequences[i], limits) : Report{};
    if (!report.breakages.empty()) {
      verdict.broken = report.breakages[0];
      return verdict;
    }
    verdict.decided &= decided[i] || report.decided();
    verdict.exhaustive &= report.exhaustive;
  }
  return verdict;
}

// A call that uses every rank's slot, so it shows a credit that a ring of neighbours returned too early.
Ranks probe(int world) {
  plan::Spec spec;
  spec.operation = plan::Operation::AllGather;
  spec.algorithm = plan::Algorithm::Direct;
  spec.world = world;
  return plan::build_all(spec);
}

class Tally {
 public:
  Tally(const Ranks& good, const Depth& depth) : good_(good), probe_(probe(good[0].spec.world)), depth_(depth) {}

  void add(const Ranks& mutant, const std::string& text) {
    ++result.mutants;
    const std::vector<Calls> sequences = {
        {mutant}, {mutant, mutant}, {mutant, good_}, {good_, mutant}, {mutant, probe_}};
    const auto faults = plan::check(mutant);
    std::string said = faults.empty() ? "" : faults[0].message;
    for (std::size_t i = 1; i < sequences.size() && said.empty(); ++i) {
      const auto more = plan::check_sequence(sequences[i]);
      if (!more.empty()) said = more[0].message;
    }
    const Verdict verdict = judge(sequences, depth_);
    if (!verdict.broken.empty()) {
      ++result.broken;
      if (said.empty()) {
        note(result.missed, result.missed_texts, text, verdict.broken);
      } else if (faults.empty()) {
        note(result.by_sequence, result.by_sequence_texts, text, verdict.broken);
      }
      return;
    }
    if (verdict.exhaustive) ++result.exhaustive;
    if (!verdict.decided) {
      ++result.undecided;
    } else if (!said.empty()) {
      note(result.stricter, result.stricter_texts, text, said);
    } else {
      note(result.redundant, result.redundant_texts, text, "nothing breaks");
    }
  }

  Campaign result;

 private:
  static void note(int& count, std::vector<std::string>& texts, const std::string& text, const std::string& why) {
    ++count;
    texts.push_back(text + ": " + why);
  }

  const Ranks& good_;
  const Ranks probe_;
  const Depth& depth_;
};

}  // namespace

Campaign mutate(const plan::Spec& spec, bool prune, std::size_t states, std::uint64_t seed) {
  Ranks good = plan::build_all(spec);
  if (prune) good = plan::prune(std::move(good));
  Depth depth;
  depth.quick.breakages = 1;
  depth.quick.seed = seed;
  depth.quick.states = 0;
  depth.quick.schedules = spec.world <= kExhaustiveWorld ? 0 : kSchedules;
  depth.one = depth.two = depth.undecided = depth.quick;
  depth.undecided.states = states;
  if (spec.world <= kExhaustiveWorld) {
    // A mutant has about as many states as the plan itself: where that is too large, do not start on every mutant.
    depth.one.states = depth.two.states = states;
    if (!interpret({good, good}, depth.two).exhaustive) depth.two.states = 0;
    if (!interpret({good}, depth.one).exhaustive) depth.one.states = 0;
  }

  Tally tally(good, depth);
  for (const Mutation& mutation : mutations(good[0])) {
    const std::string text = plan::to_string(spec) + ", " + describe(good[0], mutation);
    Ranks one = good, all = good;
    one[0] = *apply(good[0], mutation);
    bool symmetric = spec.world > 1;
    for (plan::Plan& plan : all) {
      const auto mutated = apply(plan, mutation);
      symmetric &= mutated.has_value();
      if (mutated) plan = *mutated;
    }
    tally.add(one, text + " on rank 0");
    if (symmetric) tally.add(all, text + " on all ranks");
  }
  return std::move(tally.result);
}

}  // namespace streamoverlap::interpreter
