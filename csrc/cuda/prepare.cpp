// The first use of a call, which may be slow so that later ones need not be.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <utility>

#include "executor.h"
#include "quantise.h"

namespace streamoverlap::cuda {
namespace {

constexpr std::uintptr_t kAlignmentMask = 15;  // of data, as far as kernels are chosen by it
constexpr std::size_t kMaxPrepared = 4096;     // of some ten KiB each

}  // namespace

void Executor::prepare(const Call& call, const Operands& operands) {
  const std::lock_guard<std::mutex> lock(issue_);
  group_->check();
  validate(call, operands);
  const c10::cuda::CUDAGuard guard(device_);
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  validate_slots(call, Lane::Use::Captured);
  Prepared& prepared = prepare_locked(call, operands);
  or_abort(call.signature, [&] { resources_->captured.reserve(call, prepared.steps); });
  prepared.kept = true;
}

Executor::Prepared& Executor::prepare_locked(const Call& call, const Operands& operands) {
  validate_slots(call, Lane::Use::Eager);
  validate_weights(call, operands);
  return or_abort(call.signature, [&]() -> Prepared& { return prepare_valid(call, operands); });
}

// While a stream waits for a flag, the first launch of a kernel that is not loaded yet blocks the host until the wait
// ends. So nothing of this communicator is in flight here, and no kernel is new to the driver afterwards.
Executor::Prepared& Executor::prepare_valid(const Call& call, const Operands& operands) {
  // Another thread's capture must not make the queries and allocations below an error.
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  const std::string text = plan::to_string(call.plan->spec);
  if (!group_->described(call.signature)) group_->describe(call.signature, text);
  drain_locked("for the first use of " + text);

  Prepared* const known = find(call);
  Prepared fresh;
  if (!known) fresh.steps = compile(call, group_->layout(), resources_->controls);
  const Steps& steps = known ? known->steps : fresh.steps;
  resources_->eager.reserve(call, steps);
  if (resources_->captured.slot_bytes() > 0) resources_->captured.reserve(call, steps);
  if (!find_gemms(steps, operands, resources_->eager.bases(0, call)) || !known) rehearse(call, operands, steps);
  if (known) return *known;
  group_->add_awaited(call.signature, steps.awaited);
  make_room();
  return prepared_.emplace(key(call), std::move(fresh)).first->second;
}

// Shapes may go on changing for ever. Neither calls in flight nor graphs refer to steps.
void Executor::make_room() {
  if (prepared_.size() < kMaxPrepared) return;
  for (auto i = prepared_.begin(); i != prepared_.end();) i = i->second.kept ? std::next(i) : prepared_.erase(i);
}

void Executor::validate_slots(const Call& call, Lane::Use use) const {
  const std::int64_t available = lane(use).slot_bytes();
  if (group_->world() == 1 || call.slot_bytes() <= available) return;
  throw std::invalid_argument("call needs a slot of " + std::to_string(call.slot_bytes()) + " bytes, slots for " +
                              (use == Lane::Use::Eager ? "eager" : "captured") + " calls have " +
                              std::to_string(available));
}

void Executor::validate_weights(const Call& call, const Operands& operands) const {
  for (const plan::Op& op : call.plan->ops) {
    if (op.kind != plan::Kind::Gemm) continue;
    const std::size_t weights = operands.weights.size();
    if (weights == 0 || (weights > 1 && op.writes[0].buffer != plan::Buffer::Output)) {
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
  const auto size = static_cast<std::int64_t>(c10::elementSize(operands.out_dtype));

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

  const auto has = [&steps](Step::Kind kind) {
    return std::any_of(steps.steps.begin(), steps.steps.end(), [kind](const Step& step) { return step.kind == kind; });
  };
  if (has(Step::Kind::Reduce)) load_reduce(operands.out_dtype);
  if (steps.packed_unit > 0) load_quantise(operands.out_dtype);
  for (const Step& step : steps.steps) {
    if (step.kind == Step::Kind::Copy) {
      copy(instead_of(step.d.in(bases)), step.a.in(bases), step.bytes, stream);
    } else if (step.kind == Step::Kind::Quantise) {
      pack(steps, step, instead_of(step.d.in(bases)), bases, operands.out_dtype, stream);
    } else if (step.kind == Step::Kind::Reduce) {
      sum(steps, step, instead_of(step.d.in(bases)), bases, operands.out_dtype, stream);
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
