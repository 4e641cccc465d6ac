#include "communicator.h"

#include <c10/util/Exception.h>

#include <cmath>
#include <stdexcept>

#include "../group/signature.h"
#include "interrupted.h"
#include "plan_cache.h"

namespace streamoverlap {
namespace {

// What symmetric memory is made of.
constexpr std::int64_t kGrowthStep = 2 << 20;

std::chrono::milliseconds milliseconds(double seconds) {
  if (!(seconds > 0) || !std::isfinite(seconds)) {
    throw std::invalid_argument("timeout is " + std::to_string(seconds) + " s; expected a positive number of seconds");
  }
  return std::chrono::milliseconds(static_cast<std::int64_t>(std::ceil(seconds * 1000)));
}

}  // namespace

Communicator::Communicator(std::string group_name, int rank, int world, double timeout_seconds, int device, int slots,
                           Poll poll)
    : poll_(std::move(poll)), device_(device) {
  config_.name = std::move(group_name);
  config_.rank = rank;
  config_.world = world;
  config_.timeout = milliseconds(timeout_seconds);
  config_.slots = slots;
#ifdef STREAMOVERLAP_WITH_CUDA
  if (device_ >= 0) config_.slots = cuda_slots();
#endif
  control_ = make_control(config_);
  if (world > 1) exchange_ = std::make_shared<FdExchange>(rank, world);
}

Communicator::~Communicator() = default;

std::string Communicator::address() const { return exchange_ == nullptr ? "" : exchange_->address(); }

void Communicator::connect(std::vector<std::string> addresses, double timeout_seconds) {
  std::vector<std::shared_ptr<Segment>> controls = {control_};
  if (exchange_ != nullptr) {
    exchange_->connect(std::move(addresses));
    controls = exchange_->share(control_, milliseconds(timeout_seconds), poll_);
  }
  group_ = std::make_shared<Group>(config_, std::move(controls));
}

void Communicator::attach([[maybe_unused]] const std::vector<int>& peer_devices,
                          [[maybe_unused]] AllocateSlots allocate) {
  group();
  if (device_ < 0) {
    backend_ = make_host_backend(group_, exchange_, poll_);
    return;
  }
#ifdef STREAMOVERLAP_WITH_CUDA
  backend_ = make_cuda_backend(group_, device_, peer_devices, std::move(allocate));
#else
  throw std::runtime_error("streamoverlap was built without its CUDA part");
#endif
}

std::pair<Tensors, std::optional<at::Tensor>> Communicator::all_gather_gemm(const at::Tensor& x, const Tensors& weights,
                                                                            const OptionalTensors& biases,
                                                                            bool return_gathered,
                                                                            const plan::Spec& spec, bool prepare_only) {
  Problem problem = all_gather_gemm_problem(x, weights, biases, return_gathered, config_.world);
  run(problem, spec, prepare_only);
  std::optional<at::Tensor> gathered;
  if (return_gathered) gathered = problem.gathered;
  return {problem.outputs, gathered};
}

at::Tensor Communicator::gemm_reduce_scatter(const at::Tensor& x, const at::Tensor& weight,
                                             const std::optional<at::Tensor>& bias, const plan::Spec& spec,
                                             bool prepare_only) {
  Problem problem = gemm_reduce_scatter_problem(x, weight, bias, config_.world);
  run(problem, spec, prepare_only);
  return problem.outputs[0];
}

at::Tensor Communicator::all_gather(const at::Tensor& x, const plan::Spec& spec, bool prepare_only) {
  Problem problem = all_gather_problem(x, config_.world);
  run(problem, spec, prepare_only);
  return problem.outputs[0];
}

at::Tensor Communicator::reduce_scatter(const at::Tensor& x, const plan::Spec& spec, bool prepare_only) {
  Problem problem = reduce_scatter_problem(x, config_.world);
  run(problem, spec, prepare_only);
  return problem.outputs[0];
}

Group& Communicator::group() const {
  if (group_ != nullptr) return *group_;
  throw std::runtime_error("the ranks of group '" + config_.name +
                           "' share no memory; expected a communicator that has "
                           "been connected");
}

Backend& Communicator::backend() const {
  if (backend_ != nullptr) return *backend_;
  throw std::runtime_error("group '" + config_.name + "' runs serial; expected a communicator that can overlap");
}

void Communicator::run(Problem& problem, const plan::Spec& spec, bool prepare_only) {
  backend();
  group_->check();
  TORCH_CHECK_VALUE(problem.x.device().index() == device_ || device_ < 0, "x is on ", problem.x.device(),
                    "; expected cuda:", device_, ", the device of this group's communicator");
  if (problem.empty()) return;
  const std::shared_ptr<const plan::Plan> plan = PlanCache::instance().get(spec, config_.rank);
  problem.call.plan = plan.get();
  problem.call.signature = signature(spec, problem.shape_key());
  if (!group_->described(problem.call.signature)) {
    group_->describe(problem.call.signature, plan::to_string(spec) + " on " + problem.description());
  }
  std::function<void()> wait;
  {
    const std::lock_guard<std::mutex> lock(order_);
    if (!backend_->fits(problem.call.slot_bytes())) grow(problem.call.slot_bytes());
    if (prepare_only) {
      backend_->prepare(problem);
    } else {
      wait = backend_->issue(problem);
    }
  }
  if (wait) wait();
}

void Communicator::grow(std::int64_t bytes) {
  bytes = (bytes + kGrowthStep - 1) / kGrowthStep * kGrowthStep;
  try {
    backend_->grow(bytes, group_->timeout());
  } catch (const std::exception& error) {
    // The others wait for this rank's memory, or have it already and go on without: they must not hang either. All
    // ranks throw the same, the first cause, unless it is this rank's user who wants no more.
    abort("could not set up slots of " + std::to_string(bytes) + " bytes: " + error.what());
    if (dynamic_cast<const Interrupted*>(&error) != nullptr) throw;
    throw group_->error();
  }
}

void Communicator::reserve(std::int64_t slot_bytes) {
  const std::lock_guard<std::mutex> lock(order_);
  if (!backend().fits(slot_bytes)) grow(slot_bytes);
}

void Communicator::enter_serial(std::uint32_t signature, const std::string& text) {
  if (!group().described(signature)) group_->describe(signature, text);
  group_->enter_serial(signature);
}

std::int64_t Communicator::slot_bytes() { return backend().slot_bytes(); }

void Communicator::set_timeout(double seconds) { group().set_timeout(milliseconds(seconds)); }

void Communicator::abort(const std::string& cause) { group().fail(cause); }

void Communicator::check() { group().check(); }

void Communicator::set_before_op(std::function<void(const plan::Op&, std::uint64_t)> hook) {
  backend().set_before_op(std::move(hook));
}

std::map<std::string, std::uintptr_t> Communicator::raw_streams() { return backend().raw_streams(); }

}  // namespace streamoverlap
