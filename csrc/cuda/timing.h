// When steps ran: timing events beside them, and the host's clock at two moments to place those on.
#pragma once

#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <type_traits>
#include <vector>

#include "../group/call_trace.h"

namespace streamoverlap::cuda {

struct DestroyEvent {
  void operator()(cudaEvent_t event) const { static_cast<void>(cudaEventDestroy(event)); }
};
using TimingEvent = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, DestroyEvent>;

TimingEvent make_timing_event();

// A moment that both the device and the host know, to some microseconds.
class Anchor {
 public:
  // Waits for `stream`, which should be idle.
  explicit Anchor(const c10::cuda::CUDAStream& stream);

  cudaEvent_t event() const { return event_.get(); }
  CallTrace::Clock::time_point time() const { return time_; }

 private:
  TimingEvent event_;
  CallTrace::Clock::time_point time_;
};

// Of one call. An event before and one after each step, on its stream: a step's time begins when the stream gets there
// and the CPU has issued it.
class Timing {
 public:
  struct Span {
    CallTrace::Clock::time_point start, end;
  };

  // `capturing`: the events become part of the graph, and hold the times of its last replay.
  Timing(std::size_t steps, bool capturing);

  void start(std::size_t step, const c10::cuda::CUDAStream& stream);
  void stop(std::size_t step, const c10::cuda::CUDAStream& stream) { record(2 * step + 1, stream); }

  // By step, once the call has ended, which was between the anchors. Nothing: it did not run, or not to its end.
  std::optional<std::vector<Span>> spans(const Anchor& before, const Anchor& after) const;

 private:
  void record(std::size_t event, const c10::cuda::CUDAStream& stream);

  unsigned flags_;
  std::vector<TimingEvent> events_;  // null: the step counts from its end
};

}  // namespace streamoverlap::cuda
