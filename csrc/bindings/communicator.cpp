#include "communicator.h"

#include <c10/util/Exception.h>

#include <cmath>
#include <stdexcept>
#include <thread>
#include <utility>

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
                          [[maybe_unused]] AllocateSlots allocate, std::function<void(std::int64_t)> on_growth) {
  group();
  on_growth_ = std::move(on_growth);
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

std::tuple<Tensors, std::optional<at::Tensor>, Communicator::WorkPointer> Communicator::all_gather_gemm(
    const at::Tensor& x, const Tensors& weights, const OptionalTensors& biases, bool return_gathered,
    const plan::Spec& spec, const CallOptions& options, const std::optional<Scaling>& scaling) {
  const auto problem =
      std::make_shared<Problem>(all_gather_gemm_problem(x, weights, biases, return_gathered, config_.world, scaling));
  WorkPointer work = run(problem, spec, options);
  std::optional<at::Tensor> gathered;
  if (return_gathered) gathered = problem->gathered;
  return {problem->outputs, gathered, std::move(work)};
}

std::pair<at::Tensor, Communicator::WorkPointer> Communicator::gemm_reduce_scatter(
    const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias, const plan::Spec& spec,
    const CallOptions& options, const std::optional<Scaling>& scaling) {
  return run_one(gemm_reduce_scatter_problem(x, weight, bias, config_.world, scaling, spec.quantised), spec, options);
}

std::pair<at::Tensor, Communicator::WorkPointer> Communicator::gemm_all_reduce(
    const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias, const plan::Spec& spec,
    const CallOptions& options, const std::optional<Scaling>& scaling) {
  return run_one(gemm_all_reduce_problem(x, weight, bias, config_.world, scaling, spec.quantised), spec, options);
}

std::pair<at::Tensor, Communicator::WorkPointer> Communicator::all_gather(const at::Tensor& x, const plan::Spec& spec,
                                                                          const CallOptions& options) {
  return run_one(all_gather_problem(x, config_.world), spec, options);
}

std::pair<at::Tensor, Communicator::WorkPointer> Communicator::reduce_scatter(const at::Tensor& x,
                                                                              const plan::Spec& spec,
                                                                              const CallOptions& options) {
  return run_one(reduce_scatter_problem(x, config_.world, spec.quantised, spec.copy_input), spec, options);
}

std::pair<at::Tensor, Communicator::WorkPointer> Communicator::all_reduce(const at::Tensor& x, const plan::Spec& spec,
                                                                          const CallOptions& options) {
  return run_one(all_reduce_problem(x, config_.world, spec.quantised), spec, options);
}

std::pair<at::Tensor, Communicator::WorkPointer> Communicator::run_one(Problem problem, const plan::Spec& spec,
                                                                       const CallOptions& options) {
  const auto shared = std::make_shared<Problem>(std::move(problem));
  WorkPointer work = run(shared, spec, options);
  return {shared->outputs[0], std::move(work)};
}

Group& Communicator::group() const {
  if (group_ != nullptr) return *group_;
  throw std::runtime_error("the ranks of group '" + config_.name +
                           "' share no memory; expected a communicator that has been connected");
}

Backend& Communicator::backend() const {
  if (backend_ != nullptr) return *backend_;
  throw std::runtime_error("group '" + config_.name + "' runs serial; expected a communicator that can overlap");
}

Communicator::WorkPointer Communicator::run(const std::shared_ptr<Problem>& problem, const plan::Spec& spec,
                                            const CallOptions& options) {
  backend();
  group_->check();
  TORCH_CHECK_VALUE(problem->x.device().index() == device_ || device_ < 0, "x is on ", problem->x.device(),
                    "; expected cuda:", device_, ", the device of this group's communicator");
  const auto work = [&](std::unique_ptr<InFlight> call) {
    return std::make_shared<Work>(group_, std::move(call), backend_->op_stream(options));
  };
  try {
    problem->allocate();
  } catch (const std::exception& error) {
    // The peers have this call, or will have it. c10 puts its backtrace below the first line.
    const std::string cause = error.what();
    group_->fail("could not allocate its tensors: " + cause.substr(0, cause.find('\n')));
    throw;
  }
  // With peers also a call without data is made, so that a rank which has data finds out.
  if (problem->empty() && config_.world == 1) return options.async && options.issue ? work(nullptr) : nullptr;
  problem->plan = PlanCache::instance().get(spec, config_.rank);
  Call& call = problem->call;
  call.plan = problem->plan.get();
  call.signature = signature(spec, problem->shape_key());
  if (!group_->described(call.signature)) {
    group_->describe(call.signature, plan::to_string(spec) + " on " + problem->description());
  }
  std::unique_ptr<InFlight> in_flight;
  {
    const std::unique_lock<std::timed_mutex> lock = in_order();
    if (!backend_->fits(call.slot_bytes())) {
      grow(call.slot_bytes(), options.timeout.count() ? options.timeout : group_->timeout(), call.signature);
    }
    if (options.prepare) backend_->prepare(*problem);
    if (!options.issue) return nullptr;
    if (traces_) {
      std::string title = plan::to_string(spec) + " on " + problem->description();
      for (const at::Tensor& weight : problem->weights) title += c10::str(", weight of ", weight.sizes());
      call.trace = std::make_shared<CallTrace>(*problem->plan, std::move(title));
      traces_->push_back(call.trace);
    }
    in_flight = backend_->issue(problem, options);
  }
  if (options.async) return work(std::move(in_flight));
  if (in_flight) in_flight->join();
  return nullptr;
}

// Another thread may wait for peers while it has its turn.
std::unique_lock<std::timed_mutex> Communicator::in_order() {
  std::unique_lock<std::timed_mutex> lock(order_, std::defer_lock);
  while (!lock.try_lock_for(kPollInterval)) poll_();
  return lock;
}

void Communicator::grow(std::int64_t bytes, std::chrono::milliseconds timeout, std::uint32_t signature) {
  bytes = (bytes + kGrowthStep - 1) / kGrowthStep * kGrowthStep;
  const auto begin = std::chrono::steady_clock::now();
  try {
    // Slots of different sizes come of different calls, which is what the user must be told.
    group_->enter_growth(signature);
    backend_->grow(bytes, timeout);
  } catch (const PeerMissing& missing) {
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
    group_->fail_peer(missing.peer,
                      "gave no memory for slots of " + std::to_string(bytes) + " bytes: " + missing.what(), signature,
                      elapsed.count());
    throw group_->error(signature);
  } catch (const std::exception& error) {
    // The others wait for this rank's memory, or have it already and go on without: they must not hang either. All
    // ranks throw the same, the first cause, unless it is this rank's user who wants no more.
    abort("could not set up slots of " + std::to_string(bytes) + " bytes: " + error.what());
    if (dynamic_cast<const Interrupted*>(&error) != nullptr) throw;
    throw group_->error(signature);
  }
  if (on_growth_) on_growth_(bytes);
}

void Communicator::reserve(std::int64_t slot_bytes) {
  const std::unique_lock<std::timed_mutex> lock = in_order();
  if (!backend().fits(slot_bytes)) grow(slot_bytes, group().timeout(), 0);
}

std::uint32_t Communicator::enter_serial(std::uint32_t signature, const std::string& text,
                                         std::optional<double> timeout_seconds) {
  if (!group().described(signature)) group_->describe(signature, text);
  std::chrono::milliseconds timeout{0};  // the group's
  if (timeout_seconds && *timeout_seconds > 0) timeout = milliseconds(*timeout_seconds);
  const std::uint32_t number = group_->enter_serial(signature, poll_, timeout);
  if (timeout_seconds) group_->watch_serial(number, signature, timeout);
  return number;
}

std::pair<std::uint32_t, bool> Communicator::agree(std::uint32_t number, std::uint32_t shared, std::uint32_t own,
                                                   std::uint32_t choice, const std::string& call, double timeout) {
  const std::chrono::milliseconds wait = timeout > 0 ? milliseconds(timeout) : std::chrono::milliseconds{0};
  const Group::Agreed agreed = group().agree({number, shared, own, choice, call}, poll_, wait);
  return {agreed.choice, agreed.alike};
}

void Communicator::fail_serial(std::uint32_t number, const std::string& cause) { group().fail_serial(number, cause); }

void Communicator::leave_serial(std::uint32_t number) { group().leave_serial(number); }

std::int64_t Communicator::slot_bytes() { return backend().slot_bytes(); }

void Communicator::set_timeout(double seconds) { group().set_timeout(milliseconds(seconds)); }

void Communicator::abort(const std::string& cause) { group().fail(cause); }

void Communicator::set_report_path(const std::string& path) { group().set_report_path(path); }

void Communicator::wind_down() {
  if (backend_ != nullptr) wait_until([this] { return backend_->is_idle(); }, group_->timeout());
}

bool Communicator::drain(double seconds) {
  backend();
  return wait_until([this] { return backend_->is_idle() && !group_->in_serial(); }, milliseconds(seconds));
}

bool Communicator::wait_until(const std::function<bool()>& idle, std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (!group_->aborted() && !idle()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    poll_();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

void Communicator::check() { group().check(); }

void Communicator::set_before_op(std::function<void(const plan::Op&, std::uint64_t)> hook) {
  backend().set_before_op(std::move(hook));
}

void Communicator::start_trace() {
  const std::unique_lock<std::timed_mutex> lock = in_order();
  if (traces_) throw std::runtime_error("group '" + config_.name + "' is being traced; expected one trace at a time");
  backend().start_traces();
  traces_.emplace();
}

std::vector<std::shared_ptr<CallTrace>> Communicator::stop_trace() {
  const std::unique_lock<std::timed_mutex> lock = in_order();
  return std::exchange(traces_, std::nullopt).value_or(std::vector<std::shared_ptr<CallTrace>>{});
}

void Communicator::finish_traces() { backend().finish_traces(); }

std::map<std::string, std::uintptr_t> Communicator::raw_streams() { return backend().raw_streams(); }

}  // namespace streamoverlap
