// A stream on the CPU: a thread with a queue, which does one thing after another in the order of their issue.
#pragma once

#include <array>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "../plan/plan.h"

namespace streamoverlap::host {

class Stream {
 public:
  Stream();
  ~Stream();  // does what is queued, then ends
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  void enqueue(std::function<void()> task);  // must not throw

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool stop_ = false;
  std::thread thread_;
};

// The streams of a call besides main, which is the calling thread. Handed in at call time; two calls in flight may use
// the same set or two different ones.
struct StreamSet {
  std::shared_ptr<Stream> send, recv;
  std::array<std::shared_ptr<Stream>, plan::kMaxComputeStreams> compute;

  static StreamSet make();
  Stream& at(plan::Stream role) const;
};

}  // namespace streamoverlap::host
