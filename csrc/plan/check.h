// The checker: proves, before anything runs, that the plans of all ranks together cannot race, hang, leak a
// stream or a flag, or use a shard or partial any number of times but once.
#pragma once

#include <string>
#include <vector>

#include "plan.h"

namespace streamoverlap::plan {

enum class FaultKind : std::uint8_t {
  Race,             // two accesses to one region, one of them a write, that nothing orders
  Deadlock,         // streams independent, or streams folded into one queue, or any topological order
  NotJoined,        // work that main does not wait for, or that does not wait for main
  UnrecordedEvent,  // a Wait issued before its Record (CUDA makes that a silent no-op), or recorded twice
  FlagState,        // a flag that can be set twice, is never set, or is not back in its first state
  Credit,           // a slot written before its credit was taken, or a credit returned too early, twice or never
  HeldUp,           // the exchange waits for the caller's join, or is a part of it
  WrongValue,       // a shard or partial used zero or two times, a bias added zero or two times, an unwritten read
  Malformed,        // an op that has not what its kind needs, a rank or stream out of range
};

struct Place {
  int call = 0, rank = 0;
  int op = 0;  // index in the ops of the plan
};

struct Fault {
  FaultKind kind;
  std::string message;     // names the ops, their ranks and streams
  std::vector<Place> ops;  // those that the message names; none where it is about a sum or a count
};

const char* name(FaultKind);

// plans[r] is rank r's plan. Empty result: no fault.
std::vector<Fault> check(const std::vector<Plan>& plans);

// Consecutive calls on one slot: calls[k][r] is what rank r runs in call k. On each rank call k+1 starts after all that
// the join of call k waits for is over there, whether or not somebody has joined; ranks are not synchronised in
// between. Across calls a slot is one region. Calls on different slots share no flag and no memory, so any number of
// them may be in flight at once.
std::vector<Fault> check_sequence(const std::vector<std::vector<Plan>>& calls);

}  // namespace streamoverlap::plan
