#include "pending.h"

#include <array>
#include <cstring>
#include <string>
#include <utility>

#include "flag_wait.h"

namespace streamoverlap::host {

using plan::FlagKind;
using plan::Kind;
using plan::Op;

Pending::Pending(const Call& call, PendingConfig config)
    : call_(call), config_(std::move(config)), group_(*config_.group), events_(call.plan->events) {}

void Pending::start(const StreamSet& streams) {
  std::array<Ops, plan::kMaxStreams> ops;
  const std::vector<Op>& all = call_.plan->ops;
  const std::size_t join = plan::join_begin(*call_.plan);
  for (std::size_t i = 0; i < all.size(); ++i) {
    (all[i].stream == plan::kMain && i >= join ? main_ : ops[all[i].stream]).push_back(&all[i]);
  }

  const auto used = [&ops](plan::Stream stream) { return !ops[stream].empty(); };
  for (plan::Stream stream = plan::kSend; stream < plan::kMaxStreams; ++stream) remaining_ += used(stream);
  const bool alone = remaining_ == 0;
  for (plan::Stream stream = plan::kSend; stream < plan::kMaxStreams; ++stream) {
    if (!used(stream)) continue;
    streams.at(stream).enqueue([self = shared_from_this(), ops = std::move(ops[stream])] {
      self->begin();
      self->run(ops);
      // Release alone: a stream that ends must not seem to wait for the others (the plan says who waits for whom).
      if (self->remaining_.fetch_sub(1, std::memory_order_release) != 1) return;
      self->remaining_.load(std::memory_order_acquire);
      self->finish();
    });
  }

  run(ops[plan::kMain]);  // the issue, which waits for nothing
  if (alone) finish();
}

// The timeout runs from here: a call may have waited behind others on its streams. The first stream to come sets the
// word; a later one finds it set, maybe with more marks.
void Pending::begin() {
  std::uint32_t idle = 0;
  group_.own()
      .progress(config_.slot)
      .running.compare_exchange_strong(idle, call_.signature, std::memory_order_release, std::memory_order_relaxed);
}

void Pending::finish() {
  group_.own().progress(config_.slot).running.store(0, std::memory_order_release);
  ended_->record();
}

void Pending::wait() {
  if (const std::exception_ptr stopped = run(main_)) {
    ended_->wait();
    std::rethrow_exception(stopped);
  }
  check();
}

void Pending::check() const {
  if (!failed_.load(std::memory_order_acquire)) return;
  ended_->wait();
  {
    std::lock_guard<std::mutex> lock(error_mutex_);
    if (error_) std::rethrow_exception(error_);
  }
  throw group_.error(call_.signature);
}

// After an abort only events still happen, so that all streams come to their end. What the poll of a wait throws is
// returned, for the one who waits: to others the call has failed as to the peers.
std::exception_ptr Pending::run(const Ops& ops) {
  std::exception_ptr stopped;
  for (const Op* op : ops) {
    CallTrace::Clock::time_point start;
    if (call_.trace) start = CallTrace::Clock::now();
    if (const std::exception_ptr error = attempt(*op)) stopped = error;
    if (call_.trace) call_.trace->note(*op, start, CallTrace::Clock::now());
  }
  return stopped;
}

std::exception_ptr Pending::attempt(const Op& op) {
  try {
    if (config_.before_op && !group_.aborted()) config_.before_op(op, config_.number);
    run(op);
    return nullptr;
  } catch (...) {
    const bool polled = op.stream == plan::kMain && op.kind == Kind::Wait;
    fail(std::current_exception(), !polled);
    if (op.kind == Kind::Record) events_[op.event].record();
    return polled ? std::current_exception() : nullptr;
  }
}

void Pending::run(const Op& op) {
  if (op.kind == Kind::Record) return events_[op.event].record();
  if (op.kind == Kind::Wait) {
    const bool polls = op.stream == plan::kMain && config_.poll;
    return polls ? events_[op.event].wait(config_.poll) : events_[op.event].wait();
  }
  if (group_.aborted()) return fail(nullptr, false);
  if (op.kind == Kind::Notify) return notify(op.flag);
  if (op.kind != Kind::Await) return run_data(op);
  if (!await(op.flag)) fail(nullptr, false);
}

void Pending::run_data(const Op& op) {
  const Block to = block(op.writes[0]);
  if (to.rows.count == 0) return;
  std::vector<Block> from;
  for (const plan::Region& region : op.reads) from.push_back(block(region));
  if (op.kind == Kind::Gemm) {
    const Block* scales = op.scales() ? &from[1] : nullptr;
    config_.compute->gemm(op, from[0], scales, op.c() ? &from.back() : nullptr, to);
  } else if (op.kind == Kind::Reduce) {
    config_.compute->reduce(op, from, to);
  } else if (op.kind == Kind::Quantise) {
    config_.compute->quantise(op, from[0], to);
  } else {
    std::memcpy(to.data, from[0].data, static_cast<std::size_t>(to.bytes()));
  }
}

void Pending::notify(const plan::Flag& flag) {
  if (flag.kind == FlagKind::Empty) {
    group_.own().progress(config_.slot).running.store(call_.signature | kReceived, std::memory_order_release);
  }
  set_flag(group_.control(flag.owner()).flag(config_.slot, flag), set_value(flag, call_.signature));
}

bool Pending::await(const plan::Flag& flag) {
  Word& word = group_.own().flag(config_.slot, flag);
  Word& awaiting = group_.own().progress(config_.slot).awaiting[static_cast<int>(flag.kind)];
  const std::uint32_t expected = set_value(flag, call_.signature);
  awaiting.store(awaiting_value(flag), std::memory_order_relaxed);
  std::uint32_t value = 0;
  while (value == 0 && !group_.aborted()) value = wait_nonzero(word);
  awaiting.store(0, std::memory_order_relaxed);
  if (value == 0) return false;
  if (value != expected) {
    group_.abort_mismatch(flag.setter(), call_.signature, value);
    return false;
  }
  word.store(0, std::memory_order_release);
  return true;
}

Block Pending::block(const plan::Region& region) const {
  switch (region.buffer) {
    case plan::Buffer::Slot:
    case plan::Buffer::SlotScales:
      return block_of(call_, region,
                      config_.memory->ranks[region.rank]->data() + config_.slot * config_.memory->slot_bytes);
    case plan::Buffer::Scratch:
    case plan::Buffer::Packed:
      return block_of(call_, region, config_.scratch);
    default:
      return block_of(call_, region, call_.views[static_cast<int>(region.buffer)].base);
  }
}

void Pending::fail(std::exception_ptr error, bool keep) {
  if (error) {
    std::string cause = "an exception of an unknown type";
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& e) {
      cause = e.what();
    } catch (...) {
    }
    if (keep) {
      std::lock_guard<std::mutex> lock(error_mutex_);
      if (!error_) error_ = error;
    }
    group_.fail(cause, call_.signature);
  }
  failed_.store(true, std::memory_order_release);
}

}  // namespace streamoverlap::host
