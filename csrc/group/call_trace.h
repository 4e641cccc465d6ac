// When each op of one call was done: an executor notes it, where a call has one of these.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../plan/plan.h"

namespace streamoverlap {

class CallTrace {
 public:
  using Clock = std::chrono::steady_clock;  // CLOCK_MONOTONIC: one clock for all processes of a host

  struct Span {
    std::int64_t start = 0, end = 0;  // nanoseconds of Clock; both 0: not done yet
  };

  CallTrace(const plan::Plan& plan, std::string title)
      : spec(plan.spec), title(std::move(title)), first_(plan.ops.data()), spans_(plan.ops.size()) {}

  const plan::Spec spec;
  const std::string title;  // for people

  // `op` is in the plan. Any thread; a join that is done more than once counts the first time.
  void note(const plan::Op& op, Clock::time_point start, Clock::time_point end) {
    Noted& noted = spans_[static_cast<std::size_t>(&op - first_)];
    std::int64_t none = 0;
    if (!noted.start.compare_exchange_strong(none, nanoseconds(start), std::memory_order_relaxed)) return;
    noted.end.store(nanoseconds(end), std::memory_order_relaxed);
  }

  std::vector<Span> spans() const {
    std::vector<Span> spans;
    for (const Noted& noted : spans_) {
      const Span span{noted.start.load(std::memory_order_relaxed), noted.end.load(std::memory_order_relaxed)};
      spans.push_back(span.end ? span : Span{});
    }
    return spans;
  }

 private:
  // Relaxed, so that a trace orders nothing between the streams that it watches.
  struct Noted {
    std::atomic<std::int64_t> start{0}, end{0};
  };

  static std::int64_t nanoseconds(Clock::time_point time) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
  }

  const plan::Op* first_;
  std::vector<Noted> spans_;
};

}  // namespace streamoverlap
