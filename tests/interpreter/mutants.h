// Mutants: a plan with one sync op deleted, moved or redirected.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "../../csrc/plan/plan.h"

namespace streamoverlap::interpreter {

struct Mutation {
  enum class Kind {
    Delete,  // with a Record go its Waits: CUDA would let them pass, so deleting it alone is the same
    Move,    // in the order of its own stream, to just before or just after another op of that stream
    Peer,    // of a flag
    Index,   // of a full flag
    Flag,    // Notify: full becomes empty, or the other way round
    Stream,  // of a Record or Wait
    Event,   // of a Wait
  };
  Kind kind = Kind::Delete;
  int op = 0;     // its place in the plan
  int value = 0;  // Move: the place it goes to; Peer: the distance from this rank; else the new number
};

// The set for one plan: every sync op is deleted; moved by one and by two ops of its stream both ways and to both
// ends; a flag's peer, index and (Notify) kind are each replaced by every other one; a Record and a Wait go to every
// other stream in use; a Wait gets the event begun with, or one of the three recorded last. Moves of Waits past Waits
// and Records past Records alone change nothing and are left out.
std::vector<Mutation> mutations(const plan::Plan&);

// Nothing if the op at that place of this plan cannot be mutated so (ranks' plans need not be alike).
std::optional<plan::Plan> apply(const plan::Plan&, const Mutation&);

std::string describe(const plan::Plan&, const Mutation&);

}  // namespace streamoverlap::interpreter
