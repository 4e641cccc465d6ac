// A group's slots, flags and streams, and the ops on them.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../group/fd_exchange.h"
#include "../group/group.h"
#include "../group/poll.h"
#include "backend.h"
#include "problem.h"
#include "work.h"

namespace streamoverlap {

class Communicator {
 public:
  // device: a CUDA ordinal, or -1 for the CPU. `poll`: called by callers' threads while they wait; it may throw
  // Interrupted.
  Communicator(std::string group_name, int rank, int world, double timeout_seconds, int device, int slots, Poll poll);
  ~Communicator();

  // Set-up, collective: every rank's address goes to every rank, then all connect; flags, aborts and serial calls work
  // from then on. Then they attach, which makes what plans run on. Of CUDA devices alone: `peer_devices` are ordinals
  // in this process, `allocate` gives symmetric memory (collective). `on_growth` is told the bytes of a slot whenever
  // slots have grown.
  std::string address() const;
  void connect(std::vector<std::string> addresses, double timeout_seconds);
  void attach(const std::vector<int>& peer_devices, AllocateSlots allocate,
              std::function<void(std::int64_t)> on_growth);

  // The Work is null unless options.async.
  using WorkPointer = std::shared_ptr<Work>;
  std::tuple<Tensors, std::optional<at::Tensor>, WorkPointer> all_gather_gemm(
      const at::Tensor& x, const Tensors& weights, const OptionalTensors& biases, bool return_gathered,
      const plan::Spec& spec, const CallOptions& options, const std::optional<Scaling>& scaling);
  std::pair<at::Tensor, WorkPointer> gemm_reduce_scatter(const at::Tensor& x, const at::Tensor& weight,
                                                         const std::optional<at::Tensor>& bias, const plan::Spec& spec,
                                                         const CallOptions& options,
                                                         const std::optional<Scaling>& scaling);
  std::pair<at::Tensor, WorkPointer> gemm_all_reduce(const at::Tensor& x, const at::Tensor& weight,
                                                     const std::optional<at::Tensor>& bias, const plan::Spec& spec,
                                                     const CallOptions& options, const std::optional<Scaling>& scaling);
  std::pair<at::Tensor, WorkPointer> all_gather(const at::Tensor& x, const plan::Spec& spec,
                                                const CallOptions& options);
  std::pair<at::Tensor, WorkPointer> reduce_scatter(const at::Tensor& x, const plan::Spec& spec,
                                                    const CallOptions& options);
  std::pair<at::Tensor, WorkPointer> all_reduce(const at::Tensor& x, const plan::Spec& spec,
                                                const CallOptions& options);

  // A call by the group's own collective begins: throws where a peer makes another one, or the group has failed.
  // With `timeout_seconds` the watchdog watches it until it is left, or has failed. Returns its number.
  std::uint32_t enter_serial(std::uint32_t signature, const std::string& text, std::optional<double> timeout_seconds);
  // Rank 0's choice, and whether it knows the same of the call; see Group::agree. `timeout` in seconds, 0: the group's.
  std::pair<std::uint32_t, bool> agree(std::uint32_t number, std::uint32_t shared, std::uint32_t own,
                                       std::uint32_t choice, const std::string& call, double timeout);
  void fail_serial(std::uint32_t number, const std::string& cause);
  void leave_serial(std::uint32_t number);

  // Collective: slots of at least this many bytes.
  void reserve(std::int64_t slot_bytes);
  std::int64_t slot_bytes();
  void set_timeout(double seconds);
  void abort(const std::string& cause);
  void set_report_path(const std::string& path);
  // Waits until no call is in flight, or the group has failed; false: not in time.
  bool drain(double seconds);
  void wind_down();  // the same of the streams alone, within the timeout
  void check();      // throws what a call would throw if the group has failed
  void set_before_op(std::function<void(const plan::Op&, std::uint64_t)> hook);
  // As of Group, for errors.
  std::string report(std::chrono::milliseconds wait) const { return group().report(wait); }
  bool first_to_ask() { return group().first_to_ask(); }
  const std::shared_ptr<Group>& shared_group() const { return group_; }  // null before connect()
  std::map<std::string, std::uintptr_t> raw_streams();

  // From the first on, calls on plans that begin are traced; the second hands out their traces, in the order of calls,
  // which all ranks share. A call still in flight goes on to fill its own; once none is, the third makes them complete.
  void start_trace();
  std::vector<std::shared_ptr<CallTrace>> stop_trace();
  void finish_traces();

  void set_tuning(bool on) { backend().set_tuning(on); }
  std::vector<TunedGemm> measured_gemms() { return backend().measured_gemms(); }
  void prefer_gemms(const std::vector<TunedGemm>& gemms) { backend().prefer_gemms(gemms); }

 private:
  Group& group() const;
  Backend& backend() const;
  WorkPointer run(const std::shared_ptr<Problem>& problem, const plan::Spec& spec, const CallOptions& options);
  std::pair<at::Tensor, WorkPointer> run_one(Problem problem, const plan::Spec& spec, const CallOptions& options);
  std::unique_lock<std::timed_mutex> in_order();
  // False: not in time. An aborted group has nothing more to wait for.
  bool wait_until(const std::function<bool()>& idle, std::chrono::milliseconds timeout);
  void grow(std::int64_t bytes, std::chrono::milliseconds timeout, std::uint32_t signature);

  GroupConfig config_;
  Poll poll_;
  int device_;
  std::shared_ptr<FdExchange> exchange_;  // none in a group of one
  std::shared_ptr<Segment> control_;
  std::shared_ptr<Group> group_;      // from connect() on
  std::unique_ptr<Backend> backend_;  // from attach() on
  std::function<void(std::int64_t)> on_growth_;
  std::timed_mutex order_;                                         // of calls, and of growth among them
  std::optional<std::vector<std::shared_ptr<CallTrace>>> traces_;  // while tracing
};

}  // namespace streamoverlap
