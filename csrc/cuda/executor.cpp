#include "executor.h"

#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <stdexcept>
#include <thread>
#include <utility>

#include "check.h"
#include "quarantine.h"

namespace streamoverlap::cuda {
namespace {

using c10::cuda::CUDAStream;
using std::chrono::milliseconds;

constexpr std::chrono::microseconds kPoll{50};
constexpr milliseconds kAbortedDrain{10'000};  // the watchdog releases what waits within some milliseconds

}  // namespace

Executor::Resources::Resources(const Group& group, c10::DeviceIndex device)
    : controls(group),
      eager(Lane::Use::Eager, group.world(), device),
      captured(Lane::Use::Captured, group.world(), device) {}

Executor::Executor(std::shared_ptr<Group> group, c10::DeviceIndex device) : group_(std::move(group)), device_(device) {
  if (group_->layout().slots() != kSlots) {
    throw std::invalid_argument("group '" + group_->name() + "' has " + std::to_string(group_->layout().slots()) +
                                " slots, expected " + std::to_string(kSlots));
  }
  const c10::cuda::CUDAGuard guard(device_);
  sweep_quarantine();
  resources_ = std::make_unique<Resources>(*group_, device_);
  // Called again and again: a call may start later, and graphs may be replayed still. The group outlives its watchdog.
  group_->on_abort([group = group_.get()] {
    group->release_awaited();
    return false;
  });
}

Executor::~Executor() {
  // Whoever lets go of it last may be a garbage collection in the middle of a capture, which must survive that.
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  bool is_idle = false;
  try {
    is_idle = wait_until([this] { return idle(); }, group_->aborted() ? kAbortedDrain : group_->timeout());
    if (!is_idle && !group_->aborted()) {
      // The watchdog releases what waits, as long as it knows how.
      group_->fail("closed its communicator while a call was in flight");
      is_idle = wait_until([this] { return idle(); }, kAbortedDrain);
    }
  } catch (...) {  // CUDA is no more, or has failed for good
  }
  if (is_idle) {
    group_->on_abort(nullptr);
    if (group_->aborted()) quarantine(*group_, {resources_->eager.take_owners(), resources_->captured.take_owners()});
    resources_.reset();  // here, where the guard still holds
    return;
  }
  // Memory that a stream may still use is better lost than given to somebody else; the watchdog goes on releasing.
  static_cast<void>(resources_.release());
  static_cast<void>(new std::shared_ptr<Group>(group_));
}

void Executor::use_slots(Lane::Use use, const std::vector<std::byte*>& bases, std::int64_t slot_bytes,
                         std::shared_ptr<void> owner) {
  std::vector<std::shared_ptr<void>> unused;  // let go after the lock: an owner may take locks of its own
  const std::lock_guard<std::mutex> lock(issue_);
  drain_locked("to replace its slots");
  unused = lane(use).use_slots(bases, slot_bytes, owner);  // not moved: where this throws, it is let go here
}

std::int64_t Executor::slot_bytes(Lane::Use use) const {
  const std::lock_guard<std::mutex> lock(issue_);
  return lane(use).slot_bytes();
}

void Executor::set_tuning(bool on) {
  const std::lock_guard<std::mutex> lock(issue_);
  resources_->gemms.set_tuning(on);
}

GemmCache::Choices Executor::measured_gemms() const {
  const std::lock_guard<std::mutex> lock(issue_);
  return resources_->gemms.measured();
}

void Executor::prefer_gemms(const GemmCache::Choices& choices) {
  const std::lock_guard<std::mutex> lock(issue_);
  resources_->gemms.prefer(choices);
}

bool Executor::is_idle() const {
  const std::unique_lock<std::mutex> lock(issue_, std::try_to_lock);
  if (!lock) return false;  // a call is about to be issued, and may wait for the streams
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  return idle();
}

void Executor::drain_locked(const std::string& purpose) const {
  finish_wait(wait_until([this] { return idle() || group_->aborted(); }, group_->timeout()), purpose);
}

void Executor::finish_wait(bool done, const std::string& purpose) const {
  group_->check();
  if (done) return;
  throw std::runtime_error("group '" + group_->name() + "' waited " +
                           std::to_string(std::chrono::duration<double>(group_->timeout()).count()) + " s " + purpose +
                           ", and the GPU was still busy");
}

// Polls: a blocking wait of CUDA has no bound.
bool Executor::wait_until(const std::function<bool()>& done, milliseconds timeout) const {
  // Another thread's capture must not make the queries an error.
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (!done()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(kPoll);
  }
  return true;
}

// Eager calls by their events, replays by what they tell in shared memory.
bool Executor::idle() const {
  for (int slot = 0; slot < kSlotsPerLane; ++slot) {
    if (!resources_->eager.last_use(slot).query()) return false;
  }
  for (int slot = 0; slot < kSlots; ++slot) {
    if (group_->own().progress(slot).running.load(std::memory_order_acquire) != 0) return false;
  }
  return true;
}

void Executor::validate(const Call& call, const Operands& operands) const {
  const plan::Plan& plan = *call.plan;
  if (plan.spec.world != group_->world() || plan.rank != group_->rank()) {
    throw std::invalid_argument("call.plan is of rank " + std::to_string(plan.rank) + " of " +
                                std::to_string(plan.spec.world) + ", the group's is rank " +
                                std::to_string(group_->rank()) + " of " + std::to_string(group_->world()));
  }
  for (std::size_t i = 1; i < operands.weights.size(); ++i) {
    if (operands.weights[i].output || operands.weights[i].n == 0 || call.shard_rows == 0) continue;
    throw std::invalid_argument("weights[" + std::to_string(i) + "] has no output, expected one for each weight");
  }
}

Executor::CallKey Executor::key(const Call& call) {
  CallKey key{reinterpret_cast<std::intptr_t>(call.plan), call.signature, call.shard_rows, call.missing_rows};
  auto at = key.begin() + 4;
  for (const View& view : call.views) {
    *at++ = view.row_bytes;
    *at++ = view.shard_bytes;
  }
  return key;
}

Executor::Prepared* Executor::find(const Call& call) {
  const auto found = prepared_.find(key(call));
  return found != prepared_.end() ? &found->second : nullptr;
}

// False: one of them was not added to the cache yet.
bool Executor::find_gemms(const Steps& steps, const Operands& operands, const Bases& bases) {
  ready_gemms_.clear();
  bool complete = true;
  for (const Step& step : steps.steps) {
    if (step.kind != Step::Kind::Gemm) continue;
    for_each_product(step, operands, bases, [&](const GemmShape& shape, const GemmPointers& at) {
      const Gemm* gemm = resources_->gemms.find(shape, at);
      complete &= gemm != nullptr;
      ready_gemms_.push_back({gemm, at});
    });
  }
  return complete;
}

void Executor::validate_streams(const Steps& steps, const StreamSet& set, const CUDAStream& current) const {
  if (set.device() != device_ || current.device_index() != device_) {
    throw std::invalid_argument("the current stream is of device " + std::to_string(current.device_index()) +
                                ", streams are of device " + std::to_string(set.device()) +
                                ", expected both of device " + std::to_string(device_));
  }
  if (set.compute_streams() < steps.compute_streams) {
    throw std::invalid_argument("streams has " + std::to_string(set.compute_streams()) +
                                " compute streams, the plan needs " + std::to_string(steps.compute_streams));
  }
}

void Executor::issue(const Call& call, const Operands& operands, const CUDAStream& current, StreamSet* streams,
                     milliseconds timeout, at::cuda::CUDAEvent* end) {
  const std::lock_guard<std::mutex> lock(issue_);
  group_->check();
  validate(call, operands);
  const c10::cuda::CUDAGuard guard(device_);
  const std::optional<unsigned long long> capture = capture_of(current);
  Lane& lane = capture ? resources_->captured : resources_->eager;
  StreamSet& set = capture || !streams ? lane.streams() : *streams;
  if (capture && capture_.id != *capture) {
    capture_.id = *capture;
    capture_.calls = 0;
  }
  std::uint64_t& calls = capture ? capture_.calls : eager_calls_;
  const int slot = static_cast<int>(calls % kSlotsPerLane);

  const auto is_ready = [&](const Prepared* prepared) {
    return prepared && lane.has_room(call, prepared->steps) && set.has_workspaces(prepared->steps.workspaces) &&
           find_gemms(prepared->steps, operands, lane.bases(slot, call));
  };
  Prepared* prepared = find(call);
  const bool ready = is_ready(prepared);
  if (!ready) {
    if (capture) {
      throw std::runtime_error(plan::to_string(call.plan->spec) + " with these shapes was not prepared; call " +
                               "streamoverlap.prepare(...) before capturing");
    }
    prepared = &prepare_locked(call, operands);
  }
  Steps& steps = prepared->steps;
  validate_streams(steps, set, current);
  if (!ready) {
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
    or_abort(call.signature, [&] {
      set.reserve_workspaces(steps.workspaces);
      if (!is_ready(prepared)) throw std::logic_error("a call is not ready after it was prepared");
    });
  }

  group_->own().head().issued.store(++calls_, std::memory_order_release);
  ++calls;
  const Issue issue{steps,
                    operands,
                    lane,
                    lane.bases(slot, call),
                    lane.first_slot() + slot,
                    set,
                    current,
                    end ? set.at(plan::kRecv) : current,
                    call.signature,
                    timeout,
                    capture.has_value(),
                    call.trace ? time(call, steps, capture.has_value()) : nullptr};
  // A graph runs its branches in any order; calls on parallel branches would be in another order on another rank. So
  // each call of a capture follows the one before, and the first none.
  at::cuda::CUDAEvent& previous = capture ? capture_.last : lane.last_use(slot);
  try {
    if (!capture || capture_.calls > 1) follow(issue, previous);
    if (end) {
      end->record(current);
      end->block(issue.last);
    }
    run(issue);
    previous.record(issue.last);
    if (end) end->record(issue.last);
  } catch (const std::exception& error) {
    if (!capture) fail(issue, error.what());
    throw;
  }
}

// An asynchronous call must not hold up `current`, so the streams that carry it wait themselves.
void Executor::follow(const Issue& issue, at::cuda::CUDAEvent& previous) const {
  if (&issue.last == &issue.current) return previous.block(issue.current);
  previous.block(issue.last);
  for (plan::Stream role = plan::kSend; role < plan::kMaxStreams; ++role) {
    if (issue.steps.streams >> role & 1u) previous.block(issue.streams.at(role));
  }
}

// `last` is joined with every stream that touches the caller's memory. Where it is `current`, what the allocator does
// with that memory afterwards on `current`, where it belongs, is ordered after the call: no record_stream, also for
// inputs freed now. Where it is not, the caller keeps the memory.
void Executor::run(const Issue& issue) {
  const auto on = [&issue](const Step& step) -> const CUDAStream& {
    if (step.stream != plan::kMain) return issue.streams.at(step.stream);
    return step.join ? issue.last : issue.current;
  };
  write_progress(issue, issue.signature, issue.timeout);
  MemoryOp* const memory = issue.steps.memory[issue.slot].data();
  const ReadyGemm* gemm = ready_gemms_.data();
  const auto products = std::count_if(issue.operands.weights.begin(), issue.operands.weights.end(),
                                      [](const Weight& weight) { return weight.n > 0; });
  std::size_t number = 0;
  for (const Step& step : issue.steps.steps) {
    const CUDAStream& stream = on(step);
    // The end of a call is joined to the last Record of each stream; in a capture nothing may be left behind that.
    const bool records = step.kind == Step::Kind::Record;
    if (issue.timing) issue.timing->start(number, stream);
    if (issue.timing && records) issue.timing->stop(number, stream);
    switch (step.kind) {
      case Step::Kind::Gemm:
        for (auto i = products; i > 0; --i, ++gemm) {
          gemm->gemm->run(resources_->gemms.handle(), gemm->at, issue.streams.workspace(step.stream), stream.stream());
        }
        break;
      case Step::Kind::Copy:
        copy(step.d.in(issue.bases), step.a.in(issue.bases), step.bytes, stream);
        break;
      case Step::Kind::Quantise:
        pack(issue.steps, step, step.d.in(issue.bases), issue.bases, issue.operands.out_dtype, stream);
        break;
      case Step::Kind::Reduce:
        sum(issue.steps, step, step.d.in(issue.bases), issue.bases, issue.operands.out_dtype, stream);
        break;
      case Step::Kind::Memory:
        enqueue(memory + step.first, step.count, stream.stream(), issue.capturing);
        break;
      case Step::Kind::Record:
        issue.lane.event(step.event).record(stream);
        break;
      case Step::Kind::Wait:
        issue.lane.event(step.event).block(stream);
        break;
    }
    if (issue.timing && !records) issue.timing->stop(number, stream);
    ++number;
  }
  write_progress(issue, 0, milliseconds{0});
}

// Before a call starts, its timeout and then its signature; after it has ended, 0 for both.
void Executor::write_progress(const Issue& issue, std::uint32_t running, milliseconds timeout) const {
  const Layout& layout = group_->layout();
  const auto word = [&](std::size_t offset) { return resources_->controls.word(group_->rank(), offset); };
  std::array<MemoryOp, 2> ops;
  int count = 0;
  if (issue.timeout.count() > 0) {
    ops[count++] = write_value(word(layout.timeout_offset(issue.slot)), static_cast<std::uint32_t>(timeout.count()));
  }
  ops[count++] = write_value(word(layout.running_offset(issue.slot)), running);
  enqueue(ops.data(), count, issue.last.stream(), issue.capturing);
}

// Part of a call is on the streams: peers cannot finish it, and the caller's memory may be in use. The watchdog
// releases what waits; `current` comes after it.
void Executor::fail(const Issue& issue, const char* cause) noexcept {
  try {
    group_->fail(cause, issue.signature);
    at::cuda::CUDAEvent reached;
    for (plan::Stream role = plan::kSend; role < plan::kCompute + issue.steps.compute_streams; ++role) {
      reached.record(issue.streams.at(role));
      reached.block(issue.current);
    }
    MemoryOp ended =
        write_value(resources_->controls.word(group_->rank(), group_->layout().running_offset(issue.slot)), 0);
    enqueue(&ended, 1, issue.current.stream(), issue.capturing);
    issue.lane.last_use(issue.slot - issue.lane.first_slot()).record(issue.current);
  } catch (const std::exception&) {  // the first error is the one to tell
  }
}

}  // namespace streamoverlap::cuda
