#include "timing.h"

#include <c10/cuda/CUDAGraphsC10Utils.h>

#include <chrono>
#include <utility>

#include "check.h"
#include "streams.h"

namespace streamoverlap::cuda {
namespace {

using Clock = CallTrace::Clock;

constexpr int kTries = 10;

// Milliseconds; nothing where one of them was not recorded or not reached.
std::optional<double> elapsed(cudaEvent_t start, cudaEvent_t end) {
  float milliseconds = 0;
  if (cudaEventElapsedTime(&milliseconds, start, end) == cudaSuccess) return milliseconds;
  static_cast<void>(cudaGetLastError());  // it was the answer, not an error
  return std::nullopt;
}

}  // namespace

TimingEvent make_timing_event() {
  cudaEvent_t event{};
  STREAMOVERLAP_CHECK(cudaEventCreate(&event));
  return TimingEvent(event);
}

Anchor::Anchor(const c10::cuda::CUDAStream& stream) {
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  auto least = Clock::duration::max();
  for (int i = 0; i < kTries; ++i) {
    TimingEvent event = make_timing_event();
    const auto begin = Clock::now();
    STREAMOVERLAP_CHECK(cudaEventRecord(event.get(), stream.stream()));
    STREAMOVERLAP_CHECK(cudaEventSynchronize(event.get()));
    const auto took = Clock::now() - begin;
    if (took >= least) continue;
    least = took;
    event_ = std::move(event);
    time_ = begin + took / 2;
  }
}

Timing::Timing(std::size_t steps, bool capturing)
    : flags_(capturing ? cudaEventRecordExternal : cudaEventRecordDefault) {
  events_.reserve(2 * steps);
  for (std::size_t i = 0; i < 2 * steps; ++i) events_.push_back(make_timing_event());
}

// A stream that has waited for nothing of a capture yet is no part of it, so has no place for an event.
void Timing::start(std::size_t step, const c10::cuda::CUDAStream& stream) {
  const bool outside = flags_ == cudaEventRecordExternal && !capture_of(stream);
  if (outside) return events_[2 * step].reset();
  record(2 * step, stream);
}

void Timing::record(std::size_t event, const c10::cuda::CUDAStream& stream) {
  STREAMOVERLAP_CHECK(cudaEventRecordWithFlags(events_[event].get(), stream.stream(), flags_));
}

// The clocks of a GPU and of the host drift apart, so what is in between is placed by both anchors.
std::optional<std::vector<Timing::Span>> Timing::spans(const Anchor& before, const Anchor& after) const {
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  const std::optional<double> whole = elapsed(before.event(), after.event());
  if (!whole || *whole <= 0) return std::nullopt;
  const double scale = std::chrono::duration<double>(after.time() - before.time()).count() / *whole;
  const auto place = [&](const TimingEvent& event) -> std::optional<Clock::time_point> {
    const std::optional<double> milliseconds = elapsed(before.event(), event.get());
    if (!milliseconds) return std::nullopt;
    const std::chrono::duration<double> seconds(*milliseconds * scale);
    return before.time() + std::chrono::duration_cast<Clock::duration>(seconds);
  };
  std::vector<Span> spans;
  for (std::size_t i = 0; i < events_.size(); i += 2) {
    const auto end = place(events_[i + 1]), start = events_[i] ? place(events_[i]) : end;
    if (!start || !end) return std::nullopt;
    spans.push_back({*start, *end});
  }
  return spans;
}

}  // namespace streamoverlap::cuda
