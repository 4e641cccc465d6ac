#include <ATen/cuda/CUDAContext.h>

#include <ATen/cuda/CUDAGraphsUtils.cuh>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../../cuda/driver.h"
#include "../../cuda/executor.h"
#include "../arguments.h"
#include "../backend.h"
#include "cuda_call.h"

namespace streamoverlap {
namespace {

using cuda::Executor;
using cuda::Lane;

bool capturing() { return at::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None; }

class CudaBackend : public Backend {
 public:
  CudaBackend(std::shared_ptr<Group> group, int device, AllocateSlots allocate)
      : device_(static_cast<c10::DeviceIndex>(device)),
        group_(group),
        allocate_(std::move(allocate)),
        executor_(std::move(group), device_) {}

  std::int64_t slot_bytes() const override { return executor_.slot_bytes(Lane::Use::Eager); }
  // A capture grows nothing; the executor says what to do about it.
  bool fits(std::int64_t slot_bytes) const override { return slot_bytes <= this->slot_bytes() || capturing(); }

  void grow(std::int64_t slot_bytes, std::chrono::milliseconds) override { grow(Lane::Use::Eager, slot_bytes); }

  std::unique_ptr<InFlight> issue(std::shared_ptr<const Problem> problem, const CallOptions& options) override {
    keeper_->collect();
    const auto current = at::cuda::getCurrentCUDAStream(device_);
    auto end = options.async ? keeper_->event() : nullptr;
    executor_.issue(problem->call, operands(*problem), current, options.streams.get(), options.timeout, end.get());
    if (!end) return nullptr;
    return std::make_unique<CudaCall>(group_, keeper_, Held{std::move(end), std::move(problem), options.streams},
                                      current);
  }

  std::uintptr_t op_stream(const CallOptions& options) const override {
    const bool captured = capturing();
    const cuda::StreamSet& set = options.streams && !captured
                                     ? *options.streams
                                     : executor_.streams(captured ? Lane::Use::Captured : Lane::Use::Eager);
    return reinterpret_cast<std::uintptr_t>(set.at(plan::kRecv).stream());
  }

  void prepare(const Problem& problem) override {
    if (capturing()) throw std::runtime_error("streamoverlap.prepare was called in a capture; expected it before");
    if (executor_.slot_bytes(Lane::Use::Captured) < problem.call.slot_bytes()) {
      try {
        grow(Lane::Use::Captured, slot_bytes());
      } catch (const std::exception& error) {
        group_->fail(error.what());
        throw;
      }
    }
    executor_.prepare(problem.call, operands(problem));
  }

  bool is_idle() const override { return executor_.is_idle(); }

  void set_tuning(bool on) override { executor_.set_tuning(on); }

  std::vector<TunedGemm> measured_gemms() const override {
    std::vector<TunedGemm> gemms;
    for (const auto& [key, choice] : executor_.measured_gemms()) {
      gemms.push_back({key, choice.algorithm, 1e-6 * choice.microseconds, 1e-6 * choice.first_microseconds});
    }
    return gemms;
  }

  void prefer_gemms(const std::vector<TunedGemm>& gemms) override {
    cuda::GemmCache::Choices choices;
    for (const TunedGemm& gemm : gemms) choices.push_back({gemm.key, {gemm.algorithm, 0, 0}});
    executor_.prefer_gemms(choices);
  }

  void start_traces() override { executor_.start_traces(); }
  void finish_traces() override { executor_.finish_traces(); }

  void set_before_op(std::function<void(const plan::Op&, std::uint64_t)>) override {
    throw std::runtime_error("ops on a GPU have no hook; delay its streams instead");
  }

  std::map<std::string, std::uintptr_t> raw_streams() const override {
    const cuda::StreamSet& set = executor_.streams(Lane::Use::Eager);
    std::map<std::string, std::uintptr_t> streams;
    for (plan::Stream role = plan::kSend; role < plan::kCompute + set.compute_streams(); ++role) {
      streams[plan::name(role)] = reinterpret_cast<std::uintptr_t>(set.at(role).stream());
    }
    return streams;
  }

 private:
  void grow(Lane::Use use, std::int64_t slot_bytes) {
    if (group_->world() == 1) return;
    SlotMemory memory = allocate_(slot_bytes * cuda::kSlotsPerLane);
    executor_.use_slots(use, memory.bases, slot_bytes, std::move(memory.owner));
  }

  // Valid until the next call.
  cuda::Operands operands(const Problem& problem) {
    weights_.clear();
    for (std::size_t i = 0; i < problem.weights.size(); ++i) {
      const at::Tensor& weight = problem.weights[i];
      const LeadingDimension leading = leading_dimension(weight);
      weights_.push_back({weight.const_data_ptr(), weight.size(0), leading.stride, leading.row_major,
                          problem.biases[i] ? problem.biases[i]->const_data_ptr() : nullptr,
                          problem.scaling ? problem.scaling->weights[i].const_data_ptr() : nullptr,
                          static_cast<std::byte*>(problem.outputs[i].mutable_data_ptr())});
    }
    cuda::Operands operands;
    operands.dtype = operands.weight_dtype = problem.x.scalar_type();
    operands.out_dtype = problem.out_dtype();
    if (problem.scaling) {
      operands.weight_dtype = problem.weights[0].scalar_type();
      operands.scaling = problem.scaling->row_wise() ? cuda::Scaling::Row : cuda::Scaling::Tensor;
      operands.fast_accumulation = problem.scaling->fast_accumulation;
    }
    operands.weights = weights_;
    return operands;
  }

  c10::DeviceIndex device_;
  std::shared_ptr<Group> group_;
  AllocateSlots allocate_;
  std::vector<cuda::Weight> weights_;
  std::shared_ptr<Keeper> keeper_ = std::make_shared<Keeper>();
  Executor executor_;  // last: it waits for the calls whose tensors are kept
};

}  // namespace

int cuda_slots() { return Executor::kSlots; }

std::unique_ptr<Backend> make_cuda_backend(std::shared_ptr<Group> group, int device,
                                           const std::vector<int>& peer_devices, AllocateSlots allocate) {
  const std::string reason = cuda::unsupported(device, peer_devices.data(), static_cast<int>(peer_devices.size()));
  if (!reason.empty()) throw std::runtime_error(reason);
  return std::make_unique<CudaBackend>(std::move(group), device, std::move(allocate));
}

}  // namespace streamoverlap
