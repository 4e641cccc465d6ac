// Runs the plans of all ranks in every order that the hardware may choose, and says how they break. It judges the
// checker, so it shares nothing with it but plan.h, and reasons about order by executing.
//
// The model. A region holds a symbolic value (values.h). A step is one op; Begin and End of a call are steps of main:
// at Begin the caller has just written the input and allocated the results, at End it reads the results and may
// overwrite the input. In between, where main's part of the issue ends, is its own work: the step Issued, which may
// overwrite an input that was copied. Main goes on from call to call; every other stream of a call, and its join with
// End, is ordered by its Waits alone.
// Ranks are not synchronised between calls. Slot and scratch are raw memory: whatever two calls have there overlaps.
//
// Reported as broken: two conflicting accesses at one time (torn), an unwritten read, a wrong value at End, an access
// to the slot or scratch before those of an earlier call are over, a flag set while it is set, flags not back in
// their first state, a Wait on an event not yet recorded, an op not over when main ends the call, an exchange
// that waits for the caller to join (delays.cpp), and deadlocks with
//   streams independent,
//   each rank's streams folded into one queue in issue order,
//   each rank's ops in any topological order of its own edges (a CUDA graph): see topological.cpp.
//
// Every op is one step, though on hardware it has a start and an end: an op that is under way while another touches
// the same region is a state in which both are next on their streams, since nothing but its own stream can tell
// whether it has started. So it is enough to look at all pairs of steps that could run now.
// Record and Wait pass as soon as they can: they touch nothing, and what a later Record or Wait would keep from
// running is also kept from running by stopping the chain at its next op, so holding them back shows nothing new.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "program.h"

namespace streamoverlap::interpreter {

struct Limits {
  std::size_t states = 2'000'000;  // of the exhaustive search
  std::size_t breakages = 16;      // stop after so many
  int schedules = 0;               // random ones, on top
  std::uint64_t seed = 0;
};

struct Report {
  std::vector<std::string> breakages;
  std::size_t states = 0;
  bool exhaustive = false;  // every interleaving was seen
  // Every step was delayed for as long as anything else moves, which decides as well, unless two streams compete for
  // one flag: see delays.cpp.
  bool delayed = false;

  bool decided() const { return exhaustive || delayed || !breakages.empty(); }
};

Report interpret(const Calls&, const Limits&);

}  // namespace streamoverlap::interpreter
