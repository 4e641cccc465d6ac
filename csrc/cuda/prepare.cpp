// The first use of a call, which may be slow so that later ones need not be.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "executor.h"

namespace streamoverlap::cuda {
namespace {

constexpr std::uintptr_t kAlignmentMask = 15;  // of data, as far as kernels are chosen by it

}  // namespace

void Executor::prepare(const Call& call, const Operands& operands) {
  const std::lock_guard<std::mutex> lock(issue_);
  group_->check();
  validate(call, operands);
  const c10::cuda::CUDAGuard guard(device_);
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  validate_slots(call, Lane::Use::Captured);
  prepare_locked(call, operands);
  resources_->captured.reserve(call, *find(call));
}

// While a stream waits for a flag, the first launch of a kernel that is not loaded yet blocks the host until the wait
// ends. So nothing of this communicator is in flight here, and no kernel is new to the driver afterwards.
void Executor::prepare_locked(const Call& call, const Operands& operands) try {
  // Another thread's capture must not make the queries and allocations below an error.
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  validate_slots(call, Lane::Use::Eager);
  const std::string text = plan::to_string(call.plan->spec);
  if (!group_->described(call.signature)) group_->describe(call.signature, text);
  drain_locked("for the first use of " + text);

  const Steps* known = find(call);
  Steps fresh;
  if (!known) fresh = compile(call, group_->layout(), resources_->controls);
  const Steps& steps = known ? *known : fresh;
  validate_steps(steps, operands);
  resources_->eager.reserve(call, steps);
  if (resources_->captured.slot_bytes() > 0) resources_->captured.reserve(call, steps);
  if (!find_gemms(steps, operands, resources_->eager.bases(0, call)) || !known) rehearse(call, operands, steps);
  if (known) return;
  group_->set_awaited(call.signature, steps.awaited);
  prepared_.emplace(CallKey(call), std::move(fresh));
} catch (const std::exception& error) {
  abort(call.signature, error.what());
  throw;
}

void Executor::validate_slots(const Call& call, Lane::Use use) const {
  const std::int64_t available = lane(use).slot_bytes();
  if (group_->world() == 1 || call.slot_bytes() <= available) return;
  throw std::invalid_argument("call needs a slot of " + std::to_string(call.slot_bytes()) + " bytes, slots for " +
                              (use == Lane::Use::Eager ? "eager" : "captured") + " calls have " +
                              std::to_string(available));
}

void Executor::validate_steps(const Steps& steps, const Operands& operands) const {
  for (const Step& step : steps.steps) {
    if (step.kind != Step::Kind::Gemm) continue;
    const std::size_t weights = operands.weights.size();
    if (weights == 0 || (weights > 1 && step.d.base != static_cast<int>(plan::Buffer::Output))) {
      throw std::invalid_argument("weights has " + std::to_string(weights) + " entries, expected " +
                                  (weights == 0 ? "at least 1" : "1: partial products are summed for one weight"));
    }
  }
}

// Every op that moves or makes data, but into memory nobody else uses.
void Executor::rehearse(const Call& call, const Operands& operands, const Steps& steps) {
  Lane& eager = resources_->eager;
  const c10::cuda::CUDAStream& stream = eager.streams().at(plan::kCompute);
  void* const workspace = steps.workspaces > 0 ? eager.streams().workspace(plan::kCompute) : nullptr;
  const Bases& bases = eager.bases(0, call);
  const auto size = static_cast<std::int64_t>(c10::elementSize(operands.dtype));

  std::int64_t bytes = 0;
  for (const Step& step : steps.steps) {
    bytes = std::max(bytes, step.bytes);
    if (step.kind != Step::Kind::Gemm) continue;
    for (const Weight& weight : operands.weights) bytes = std::max(bytes, step.rows * weight.n * size);
  }
  const c10::cuda::CUDAStreamGuard guard(stream);
  const at::Tensor memory = at::empty({bytes + static_cast<std::int64_t>(kAlignmentMask)},
                                      at::TensorOptions(at::kByte).device(at::kCUDA, device_));
  const auto instead_of = [&memory](const void* data) -> void* {
    return static_cast<std::byte*>(memory.data_ptr()) + (reinterpret_cast<std::uintptr_t>(data) & kAlignmentMask);
  };

  for (const Step& step : steps.steps) {
    if (step.kind == Step::Kind::Copy) {
      copy(instead_of(step.d.in(bases)), step.a.in(bases), step.bytes, stream);
    } else if (step.kind == Step::Kind::Reduce) {
      sum(steps, step, instead_of(step.d.in(bases)), bases, operands.dtype, stream);
    } else if (step.kind == Step::Kind::Gemm) {
      for_each_product(step, operands, bases, [&](const GemmShape& shape, GemmPointers at) {
        if (resources_->gemms.find(shape, at)) return;
        at.d = instead_of(at.d);
        resources_->gemms.add(shape, at, workspace, stream.stream());
      });
    }
  }
  at::cuda::CUDAEvent done;
  done.record(stream);
  finish_wait(wait_until([&done] { return done.query(); }, group_->timeout()), "to load kernels");
}

}  // namespace streamoverlap::cuda
