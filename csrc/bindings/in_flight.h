// A call that has been issued.
#pragma once

#include <chrono>
#include <memory>

namespace streamoverlap {

namespace cuda {
class StreamSet;
}

// How a call is made, besides its plan.
struct CallOptions {
  bool prepare = false;                  // do first what a capture of it needs to have been done
  bool issue = true;                     // else validate and prepare it only, and return outputs with nothing in them
  bool async = false;                    // the caller's stream goes on at once; see InFlight
  std::chrono::milliseconds timeout{0};  // 0: the group's
  std::shared_ptr<cuda::StreamSet> streams;  // null: private ones
};

// Letting go of it is safe at any time: the call goes on, and its tensors stay until no stream uses them.
class InFlight {
 public:
  using Clock = std::chrono::steady_clock;

  virtual ~InFlight() = default;

  // What the caller does next comes after the call: a thread of the CPU waits here, a stream (the current one) waits by
  // itself. Throws the call's failure, as far as it is known.
  virtual void join() = 0;
  virtual bool is_completed() = 0;  // with or without success
  // Completed, and joined in such a way that nobody needs to hold it any more.
  virtual bool is_settled() = 0;
  // Until is_completed(); false: not by `deadline`.
  virtual bool wait_until(Clock::time_point deadline) = 0;
  // Throws the call's failure, if it is known by now.
  virtual void check() = 0;
};

}  // namespace streamoverlap
