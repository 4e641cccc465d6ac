// Everything that must be ordered for the plans to be right, as pairs of nodes; clocks.h says what is.
#pragma once

#include <string>
#include <vector>

#include "clocks.h"
#include "graph.h"
#include "report.h"

namespace streamoverlap::plan {

struct Requirement {
  enum class Rule {
    Race,            // one of the two before the other
    Reuse,           // the slot or scratch memory of an earlier call, touched last by `before`
    FlagCleared,     // the Await that clears a flag, the Notify that sets it again
    AwaitsInTurn,    // two Awaits of a flag: either could take the other's Notify
    Started,         // the begin of the call on main, the first work of a stream
    Joined,          // the last work of a stream, the end of the call on main
    CreditTaken,     // the Await of a credit, a write to the slot or Notify that needs it
    CreditReturned,  // the last use of a slot, the Notify that gives it back
  };
  Rule rule = Rule::Race;
  int before = 0, after = 0;
  int region = -1;  // Race
};

std::vector<Requirement> requirements(const Graph&);

// Where `before` must be over. An Await's own edge from its Notify proves neither that the Await has its turn nor that
// the call has begun, since it could as well take what is meant for another: there, the node that precedes `after` in
// its chain, -1 where there is none.
int deadline(const Requirement&, const Graph&);

bool holds(const Requirement&, const Graph&, const Clocks&);
void report_broken(const Requirement&, const Graph&, const Clocks&, Report&);

}  // namespace streamoverlap::plan
