// A call in flight: its plan at work on the streams.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "../group/call.h"
#include "../group/group.h"
#include "event.h"
#include "stream.h"

namespace streamoverlap::host {

// The arithmetic, given by the caller. Called from several stream threads at once, never with zero rows. What it
// throws aborts the group and reaches the caller on this rank.
class Compute {
 public:
  virtual ~Compute() = default;
  // d = a W^T (+ c) (+ bias where op.bias); scales: of the rows of a, if they have some
  virtual void gemm(const plan::Op& op, Block a, const Block* scales, const Block* c, Block d) = 0;
  // packed = a
  virtual void quantise(const plan::Op& op, Block a, Block packed) = 0;
  // sum = the sum of terms, packed or not, in fp32 or wider, in their order, rounded once
  virtual void reduce(const plan::Op& op, const std::vector<Block>& terms, Block sum) = 0;
};

using BeforeOp = std::function<void(const plan::Op& op, std::uint64_t call)>;

// The slots of all ranks: slot s of rank r starts at ranks[r]->data() + s * slot_bytes.
struct SlotMemory {
  std::vector<std::shared_ptr<Segment>> ranks;
  std::int64_t slot_bytes = 0;
};

struct PendingConfig {
  std::shared_ptr<Group> group;
  std::shared_ptr<Compute> compute;
  std::shared_ptr<const SlotMemory> memory;
  std::byte* scratch = nullptr;
  BeforeOp before_op;
  Poll poll;                 // of main, the calling thread, while it waits; may be empty
  std::uint64_t number = 0;  // of the call
  int slot = 0;
};

class Pending : public std::enable_shared_from_this<Pending> {
 public:
  Pending(const Call& call, PendingConfig config);

  void start(const StreamSet& streams);

  // Does what main still has to do, which is to wait for the other streams; then the result is ready. Throws what
  // Compute threw, AbortError, or what the poll threw, which ends the call on all ranks; in any case nothing touches
  // the caller's memory any more. Any thread may call it, any number of times, or nobody: the call comes to its end by
  // itself.
  void wait();
  // Throws what wait() would throw, if that is known by now.
  void check() const;
  // Reached when all streams have done with it. Outlives the call, whose memory goes when its last holder goes.
  const std::shared_ptr<Event>& ended() const { return ended_; }

 private:
  using Ops = std::vector<const plan::Op*>;

  std::exception_ptr run(const Ops& ops);
  std::exception_ptr attempt(const plan::Op& op);
  void run(const plan::Op& op);
  void run_data(const plan::Op& op);
  void notify(const plan::Flag& flag);
  bool await(const plan::Flag& flag);
  Block block(const plan::Region& region) const;
  void fail(std::exception_ptr error, bool keep);
  void begin();
  void finish();

  const Call call_;
  const PendingConfig config_;
  Group& group_;
  std::vector<Event> events_;
  Ops main_;                       // the join
  std::atomic<int> remaining_{0};  // streams at work
  const std::shared_ptr<Event> ended_ = std::make_shared<Event>();

  std::atomic<bool> failed_{false};  // an op was not done
  mutable std::mutex error_mutex_;
  std::exception_ptr error_;  // what Compute threw
};

}  // namespace streamoverlap::host
