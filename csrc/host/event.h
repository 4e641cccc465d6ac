// A point in a stream that others can wait for. A plan records each of its events once.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "../group/poll.h"

namespace streamoverlap::host {

class Event {
 public:
  void record() {
    std::lock_guard<std::mutex> lock(mutex_);
    reached_ = true;
    changed_.notify_all();
  }
  void wait() const {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return reached_; });
  }
  void wait(const Poll& poll) const {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!changed_.wait_for(lock, kPollInterval, [this] { return reached_; })) {
      lock.unlock();
      poll();
      lock.lock();
    }
  }
  // False: not reached by then.
  bool wait_until(std::chrono::steady_clock::time_point deadline, const Poll& poll) const {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto reached = [this] { return reached_; };
    for (;;) {
      const auto now = std::chrono::steady_clock::now();
      if (changed_.wait_until(lock, std::min(deadline, now + kPollInterval), reached)) return true;
      if (now >= deadline) return false;
      lock.unlock();
      poll();
      lock.lock();
    }
  }
  bool reached() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return reached_;
  }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool reached_ = false;
};

}  // namespace streamoverlap::host
