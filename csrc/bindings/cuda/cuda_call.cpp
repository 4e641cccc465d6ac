#include "cuda_call.h"

#include <c10/cuda/CUDAGraphsC10Utils.h>

#include <exception>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

namespace streamoverlap {
namespace {

constexpr std::chrono::microseconds kPoll{50};
constexpr std::chrono::seconds kAbortedDrain{10};  // the watchdog releases what waits within some milliseconds

bool reached(const at::cuda::CUDAEvent& event) {
  // A capture of another thread must not make the query an error.
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  return event.query();
}

}  // namespace

Keeper::~Keeper() {
  try {
    collect();
  } catch (const std::exception&) {  // CUDA is no more
  }
  // What a stream may still use is better lost than given to somebody else.
  if (!held_.empty()) static_cast<void>(new std::deque<Held>(std::move(held_)));
}

std::unique_ptr<at::cuda::CUDAEvent> Keeper::event() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (events_.empty()) return std::make_unique<at::cuda::CUDAEvent>();
  auto event = std::move(events_.back());
  events_.pop_back();
  return event;
}

void Keeper::give_back(std::unique_ptr<at::cuda::CUDAEvent> event) {
  const std::lock_guard<std::mutex> lock(mutex_);
  events_.push_back(std::move(event));
}

void Keeper::keep(Held held) {
  const std::lock_guard<std::mutex> lock(mutex_);
  held_.push_back(std::move(held));
}

void Keeper::collect() {
  std::vector<Held> ended;
  const std::lock_guard<std::mutex> lock(mutex_);
  while (!held_.empty() && reached(*held_.front().end)) {
    events_.push_back(std::move(held_.front().end));
    ended.push_back(std::move(held_.front()));
    held_.pop_front();
  }
}

CudaCall::CudaCall(std::shared_ptr<Group> group, std::shared_ptr<Keeper> keeper, Held held,
                   c10::cuda::CUDAStream current)
    : group_(std::move(group)),
      keeper_(std::move(keeper)),
      held_(std::move(held)),
      issued_on_(current),
      capture_(cuda::capture_of(current)) {}

CudaCall::~CudaCall() {
  // A graph's own pool keeps the memory of its replays, and what its calls were given is the caller's to keep.
  if (capture_ || completed_ || ordered_) {
    keeper_->give_back(std::move(held_.end));
  } else {
    keeper_->keep(std::move(held_));
  }
}

void CudaCall::join() {
  check();
  const auto current = c10::cuda::getCurrentCUDAStream(issued_on_.device_index());
  if (cuda::capture_of(current) != capture_) {
    throw std::runtime_error(capture_ ? "a call that was captured can be waited for in its own capture only"
                                      : "a call made before a capture was waited for in it; expected that before");
  }
  held_.end->block(current);
  joined_ = true;
  if (current.stream() == issued_on_.stream()) {
    ordered_ = true;
    return;
  }
  for (const at::Tensor& output : held_.problem->outputs) output.record_stream(current);
  if (held_.problem->gathered.defined()) held_.problem->gathered.record_stream(current);
}

bool CudaCall::is_completed() {
  require_eager("is_completed");
  if (completed_) return true;
  if (!reached(*held_.end)) return false;
  // The abort word is set before any flag is released: a call that ended by that is seen as such here.
  if (!group_->aborted()) succeeded_ = true;
  completed_ = true;
  return true;
}

bool CudaCall::wait_until(Clock::time_point deadline) {
  require_eager("a wait with a timeout");
  std::optional<Clock::time_point> aborted;
  while (!is_completed()) {
    const auto now = Clock::now();
    if (now > deadline) return false;
    if (group_->aborted()) {
      if (!aborted) aborted = now;
      if (now - *aborted > kAbortedDrain) return true;  // check() tells
    }
    std::this_thread::sleep_for(kPoll);
  }
  return true;
}

void CudaCall::check() {
  if (!succeeded_) group_->check();
}

void CudaCall::require_eager(const char* method) const {
  if (!capture_) return;
  throw std::runtime_error(std::string(method) + " was called on a call that was captured; its graph is what runs");
}

}  // namespace streamoverlap
