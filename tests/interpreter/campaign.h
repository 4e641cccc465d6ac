// The campaign: what the interpreter breaks, the checker must report.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "../../csrc/plan/plan.h"

namespace streamoverlap::interpreter {

struct Campaign {
  int mutants = 0;      // of rank 0 alone (plans are symmetric under rotation), and of all ranks alike
  int broken = 0;       // by the interpreter: in one call, or in two on one slot (see Tally::add)
  int missed = 0;       // of those: neither check() nor check_sequence() of those pairs reports anything
  int by_sequence = 0;  // of those: check_sequence() alone reports it, so the contract of one call has a gap
  int stricter = 0;     // reported by the checker, not broken by the interpreter
  int redundant = 0;    // neither
  int undecided = 0;    // neither broken nor searched to the end
  int exhaustive = 0;   // not broken, and every interleaving of one call and of all pairs was seen
  std::vector<std::string> missed_texts;       // with what broke
  std::vector<std::string> by_sequence_texts;  // with what broke
  std::vector<std::string> stricter_texts;     // with what the checker said
  std::vector<std::string> redundant_texts;
};

// `states` bounds the exhaustive search of each call or pair of calls. Where the plan itself has more, its mutants are
// searched by delaying each op in turn (delays.cpp) alone; from world 4 on always so, and with random schedules on top.
Campaign mutate(const plan::Spec&, bool prune, std::size_t states, std::uint64_t seed);

}  // namespace streamoverlap::interpreter
