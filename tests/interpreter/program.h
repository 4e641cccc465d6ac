// The plans of all ranks, for one call or several in a row, laid out for stepping through.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "../../csrc/plan/plan.h"

namespace streamoverlap::interpreter {

using Calls = std::vector<std::vector<plan::Plan>>;  // calls[k][r]: what rank r runs in call k

enum class Queues {
  Streams,  // every stream of every rank is a queue of its own
  Folded,   // all streams of a rank share one queue, in issue order
};

struct Step {
  enum class Type : std::uint8_t { Begin, Data, Notify, Await, Record, Wait, Issued, Join, End };
  Type type = Type::Data;
  int call = 0, rank = 0;
  int chain = 0, index = 0;      // where it stands
  const plan::Op* op = nullptr;  // none for what the caller does
  std::vector<int> reads, writes;
  int flag = -1;
  int record = -1;           // Wait: the step it waits for; Begin: the End of the call before
  std::vector<int> earlier;  // steps of earlier calls that must be over: they touch the same raw memory
  std::vector<int> joins;    // End: the last step of each chain of this call and rank
  std::vector<int> rivals;   // Await: awaits of the same flag in other chains

  // Steps that are over as soon as they can be; see interpreter.h.
  bool passes() const { return type == Type::Record || type == Type::Wait; }
  bool touches() const { return !reads.empty() || !writes.empty(); }
};

struct Place {
  int call = 0;
  plan::Region region;
  auto tie() const { return std::tie(call, region); }
  bool operator<(const Place& o) const { return tie() < o.tie(); }
};

// A chain is a queue that runs in order. Main goes on over all calls; every other stream is a chain of its own in
// each call, ordered after main by its Waits alone. So is the join of each call, which may be done on any stream: an
// executor starts a slot's next call after it.
struct Program {
  Program(const Calls&, Queues);

  const Calls& calls;
  int world = 0;
  std::vector<Step> steps;
  std::vector<std::vector<int>> chains;
  std::vector<std::pair<int, int>> chains_of;  // rank -> first chain, one past its last
  std::vector<plan::Flag> flags;
  std::vector<Place> places;
  std::vector<std::string> faults;  // what can be said without running: malformed ops, waits on unrecorded events

  // Both touch a region of one call, and one of them writes it.
  bool conflict(int a, int b) const { return conflicts_[static_cast<std::size_t>(a) * steps.size() + b]; }
  std::string describe(int step) const;

 private:
  class Builder;
  std::vector<bool> conflicts_;
};

}  // namespace streamoverlap::interpreter
