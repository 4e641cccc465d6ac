#include "work.h"

#include <algorithm>
#include <utility>

namespace streamoverlap {
namespace {

constexpr double kLongestWait = 1e8;  // seconds, some years; more might not fit the clock
constexpr std::chrono::milliseconds kReportWait{200};

}  // namespace

Work::Work(std::shared_ptr<Group> group, std::unique_ptr<InFlight> call, std::uintptr_t stream) : stream_(stream) {
  if (call) live_ = std::make_shared<Live>(Live{std::move(group), std::move(call)});
}

std::shared_ptr<Work::Live> Work::live() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (error_) std::rethrow_exception(error_);
  return live_;
}

// Of a call that has failed, or has ended and is waited for.
void Work::settle(const std::shared_ptr<Live>& live) {
  std::exception_ptr error;
  std::string report;
  try {
    live->call->check();
    if (!live->call->is_settled()) return;
  } catch (...) {
    error = std::current_exception();
    report = live->group->report(kReportWait);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!live_) return;
  if (error) first_ = live->group->aborted() && live->group->first_to_ask();
  error_ = error;
  report_ = std::move(report);
  live_ = nullptr;
}

void Work::join() {
  const auto live = this->live();
  if (!live) return;
  try {
    live->call->join();
  } catch (...) {
    settle(live);
    throw;
  }
  settle(live);
}

bool Work::wait_for(double seconds) {
  const auto live = this->live();
  if (!live) return true;
  const std::chrono::duration<double> wait(std::min(seconds, kLongestWait));
  const auto deadline = InFlight::Clock::now() + std::chrono::duration_cast<InFlight::Clock::duration>(wait);
  if (!live->call->wait_until(deadline)) return false;
  join();
  return true;
}

bool Work::is_completed() {
  std::shared_ptr<Live> live;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    live = live_;
  }
  return !live || live->call->is_completed();
}

void Work::check() {
  if (const auto live = this->live()) {
    settle(live);
    this->live();
  }
}

std::string Work::report(std::chrono::milliseconds) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return report_;
}

bool Work::first_to_ask() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(first_, false);
}

}  // namespace streamoverlap
