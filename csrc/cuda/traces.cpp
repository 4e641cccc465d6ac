// Traces of calls on a GPU: what timing events say, told to those who asked.
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <array>
#include <utility>

#include "executor.h"

namespace streamoverlap::cuda {
namespace {

using Time = CallTrace::Clock::time_point;
using Span = Timing::Span;

// One operation of the driver does several flags, and has one span: all of it counts as the last wait for a flag, if
// there is one.
Span part_of(const Span& span, const plan::Plan& plan, const std::vector<int>& step_of_op, std::size_t op) {
  const auto of_step = [&](std::size_t i) { return step_of_op[i] == step_of_op[op]; };
  std::size_t longest = op, last = op;
  while (longest > 0 && of_step(longest - 1)) --longest;
  while (last + 1 < plan.ops.size() && of_step(last + 1)) ++last;
  for (std::size_t i = longest; i <= last; ++i) {
    if (plan.ops[i].kind == plan::Kind::Await) longest = i;
  }
  if (op == longest) return span;
  return op < longest ? Span{span.start, span.start} : Span{span.end, span.end};
}

// An op without data took no time, when the op before it on its stream had ended.
void tell(CallTrace& trace, const plan::Plan& plan, const std::vector<int>& step_of_op,
          const std::vector<Span>& spans) {
  if (spans.empty()) return;
  Time first = spans[0].start;
  for (const Span& span : spans) first = std::min(first, span.start);
  std::array<Time, plan::kMaxStreams> reached;
  reached.fill(first);
  for (std::size_t i = 0; i < plan.ops.size(); ++i) {
    Time& at = reached[plan.ops[i].stream];
    const int step = step_of_op[i];
    const Span span = step < 0 ? Span{at, at} : part_of(spans[step], plan, step_of_op, i);
    trace.note(plan.ops[i], span.start, span.end);
    at = span.end;
  }
}

}  // namespace

void Executor::start_traces() {
  const std::lock_guard<std::mutex> lock(issue_);
  const c10::cuda::CUDAGuard guard(device_);
  timed_.clear();  // of a trace that nobody wanted in the end
  trace_start_.emplace(c10::cuda::getStreamFromPool(true, device_));
}

Timing* Executor::time(const Call& call, const Steps& steps, bool capturing) {
  if (!trace_start_) return nullptr;
  auto timing = std::make_shared<Timing>(steps.steps.size(), capturing);
  if (capturing) timing_of_graphs_.push_back(timing);
  timed_.push_back({call.trace, call.plan, steps.of_op, timing});
  return timing.get();
}

void Executor::finish_traces() {
  const std::lock_guard<std::mutex> lock(issue_);
  if (!trace_start_) return;
  const c10::cuda::CUDAGuard guard(device_);
  const Anchor end(c10::cuda::getStreamFromPool(true, device_));
  for (const Timed& timed : std::exchange(timed_, {})) {
    if (const auto spans = timed.timing->spans(*trace_start_, end)) {
      tell(*timed.trace, *timed.plan, timed.step_of_op, *spans);
    }
  }
  trace_start_.reset();
}

}  // namespace streamoverlap::cuda
