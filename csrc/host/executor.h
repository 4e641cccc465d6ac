// Carries out plans with threads as streams and shared memory between the ranks.
//
// It knows op kinds, never operations or algorithms: what happens in which order is the plan's business.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "../group/call.h"
#include "../group/group.h"
#include "pending.h"
#include "stream.h"

namespace streamoverlap::host {

class Executor {
 public:
  // `poll`: called by the threads of callers while they wait. What it throws aborts the group.
  explicit Executor(std::shared_ptr<Group> group, Poll poll = {});
  ~Executor();  // waits for calls in flight
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Collective, at the same place in the order of calls on all ranks. segments[r]: rank r's, of at least
  // `slot_bytes` * number of slots. Calls in flight keep the memory they started with.
  void use_slots(std::vector<std::shared_ptr<Segment>> segments, std::int64_t slot_bytes);
  std::int64_t slot_bytes() const;

  // Starts a call; wait() of what it returns hands out the result. The plan, and the memory of the call's views, must
  // stay as they are until then. A slot's next call starts after its last one has ended here, so with as many calls in
  // flight as there are slots this blocks. `timeout` 0: the group's.
  // Throws AbortError on a group that has failed, std::invalid_argument on a call that does not fit.
  std::shared_ptr<Pending> issue(const Call& call, std::shared_ptr<Compute> compute, const StreamSet& streams,
                                 std::chrono::milliseconds timeout = std::chrono::milliseconds{0});

  bool is_idle() const;  // no call is in flight

  // For tests: called before every op, with the number of the call, on the thread that will do it.
  void set_before_op(BeforeOp hook);

 private:
  struct Slot {
    std::shared_ptr<Event> ended;  // of the last call
    std::vector<std::byte> scratch;
  };

  void validate(const Call& call) const;

  void wait_for(const Slot& slot, std::uint32_t signature) const;

  std::shared_ptr<Group> group_;
  const Poll poll_;
  mutable std::mutex issue_;  // the order of calls
  std::uint64_t calls_ = 0;
  std::vector<Slot> slots_;
  std::shared_ptr<const SlotMemory> memory_;
  BeforeOp before_op_;
};

}  // namespace streamoverlap::host
