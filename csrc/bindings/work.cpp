#include "work.h"

#include <algorithm>
#include <utility>

namespace streamoverlap {
namespace {

constexpr double kLongestWait = 1e8;  // seconds, some years; more might not fit the clock

}  // namespace

Work::Work(std::shared_ptr<Group> group, std::unique_ptr<InFlight> call, std::uintptr_t stream)
    : group_(std::move(group)), call_(std::move(call)), stream_(stream) {}

void Work::join() {
  if (call_) call_->join();
}

bool Work::wait_for(double seconds) {
  if (!call_) return true;
  const std::chrono::duration<double> wait(std::min(seconds, kLongestWait));
  if (!call_->wait_until(InFlight::Clock::now() + std::chrono::duration_cast<InFlight::Clock::duration>(wait))) {
    return false;
  }
  call_->join();
  return true;
}

bool Work::is_completed() { return !call_ || call_->is_completed(); }

void Work::check() {
  if (call_) call_->check();
}

}  // namespace streamoverlap
