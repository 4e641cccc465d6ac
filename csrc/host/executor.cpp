#include "executor.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace streamoverlap::host {

Executor::Executor(std::shared_ptr<Group> group, Poll poll)
    : group_(std::move(group)), poll_(std::move(poll)), slots_(group_->layout().slots()) {}

Executor::~Executor() {
  for (const Slot& slot : slots_) {
    if (slot.ended) slot.ended->wait();
  }
}

void Executor::use_slots(std::vector<std::shared_ptr<Segment>> segments, std::int64_t slot_bytes) {
  if (segments.size() != static_cast<std::size_t>(group_->world())) {
    throw std::invalid_argument("segments has " + std::to_string(segments.size()) +
                                " entries, expected one for each of " + std::to_string(group_->world()) + " ranks");
  }
  const std::size_t needed = static_cast<std::size_t>(slot_bytes) * slots_.size();
  for (std::size_t rank = 0; rank < segments.size(); ++rank) {
    if (segments[rank]->bytes() >= needed) continue;
    throw std::invalid_argument("slot memory of rank " + std::to_string(rank) + " has " +
                                std::to_string(segments[rank]->bytes()) + " bytes, expected at least " +
                                std::to_string(needed));
  }
  std::lock_guard<std::mutex> lock(issue_);
  memory_ = std::make_shared<const SlotMemory>(SlotMemory{std::move(segments), slot_bytes});
}

std::int64_t Executor::slot_bytes() const {
  std::lock_guard<std::mutex> lock(issue_);
  return memory_ ? memory_->slot_bytes : 0;
}

bool Executor::is_idle() const {
  const std::unique_lock<std::mutex> lock(issue_, std::try_to_lock);
  if (!lock) return false;  // a call is about to be issued, and may wait for its slot
  return std::all_of(slots_.begin(), slots_.end(),
                     [](const Slot& slot) { return !slot.ended || slot.ended->reached(); });
}

void Executor::set_before_op(BeforeOp hook) {
  std::lock_guard<std::mutex> lock(issue_);
  before_op_ = std::move(hook);
}

void Executor::validate(const Call& call) const {
  const plan::Plan& plan = *call.plan;
  if (plan.spec.world != group_->world() || plan.rank != group_->rank()) {
    throw std::invalid_argument("call.plan is of rank " + std::to_string(plan.rank) + " of " +
                                std::to_string(plan.spec.world) + ", the group's is rank " +
                                std::to_string(group_->rank()) + " of " + std::to_string(group_->world()));
  }
  require_recorded_events(plan);
  const std::int64_t available = memory_ ? memory_->slot_bytes : 0;
  if (group_->world() > 1 && call.slot_bytes() > available) {
    throw std::invalid_argument("call needs a slot of " + std::to_string(call.slot_bytes()) + " bytes, slots have " +
                                std::to_string(available));
  }
}

void Executor::wait_for(const Slot& slot, std::uint32_t signature) const {
  if (!slot.ended) return;
  if (!poll_) return slot.ended->wait();
  try {
    slot.ended->wait(poll_);
  } catch (const std::exception& error) {
    group_->fail(error.what(), signature);  // this call is not made here, while peers wait for it
    throw;
  }
}

std::shared_ptr<Pending> Executor::issue(const Call& call, std::shared_ptr<Compute> compute, const StreamSet& streams,
                                         std::chrono::milliseconds timeout) {
  std::lock_guard<std::mutex> lock(issue_);
  group_->check();
  validate(call);
  if (!group_->described(call.signature)) group_->describe(call.signature, plan::to_string(call.plan->spec));

  const std::uint64_t number = calls_++;
  const int index = static_cast<int>(number % slots_.size());
  Slot& slot = slots_[index];
  group_->own().head().issued.store(calls_, std::memory_order_release);
  wait_for(slot, call.signature);
  group_->check();

  const auto scratch_bytes = static_cast<std::size_t>(call.scratch_bytes());
  if (slot.scratch.size() < scratch_bytes) slot.scratch = std::vector<std::byte>(scratch_bytes);
  group_->own().progress(index).timeout_ms.store(static_cast<std::uint32_t>(timeout.count()),
                                                 std::memory_order_relaxed);
  PendingConfig config;
  config.group = group_;
  config.compute = std::move(compute);
  config.memory = memory_;
  config.scratch = slot.scratch.data();
  config.before_op = before_op_;
  config.poll = poll_;
  config.number = number;
  config.slot = index;
  auto pending = std::make_shared<Pending>(call, std::move(config));
  slot.ended = pending->ended();
  pending->start(streams);
  return pending;
}

}  // namespace streamoverlap::host
