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
#include <utility>
#include <vector>

#include "../group/fd_exchange.h"
#include "../group/group.h"
#include "../group/poll.h"
#include "backend.h"
#include "problem.h"

namespace streamoverlap {

class Communicator {
 public:
  // device: a CUDA ordinal, or -1 for the CPU. `poll`: called by callers' threads while they wait; it may throw
  // Interrupted.
  Communicator(std::string group_name, int rank, int world, double timeout_seconds, int device, int slots, Poll poll);
  ~Communicator();

  // Set-up, collective: every rank's address goes to every rank, then all connect; flags, aborts and serial calls work
  // from then on. Then they attach, which makes what plans run on. Of CUDA devices alone: `peer_devices` are ordinals
  // in this process, `allocate` gives symmetric memory (collective).
  std::string address() const;
  void connect(std::vector<std::string> addresses, double timeout_seconds);
  void attach(const std::vector<int>& peer_devices, AllocateSlots allocate);

  // `prepare_only`: validate and prepare the call, and return outputs with nothing in them.
  std::pair<Tensors, std::optional<at::Tensor>> all_gather_gemm(const at::Tensor& x, const Tensors& weights,
                                                                const OptionalTensors& biases, bool return_gathered,
                                                                const plan::Spec& spec, bool prepare_only);
  at::Tensor gemm_reduce_scatter(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                                 const plan::Spec& spec, bool prepare_only);
  at::Tensor all_gather(const at::Tensor& x, const plan::Spec& spec, bool prepare_only);
  at::Tensor reduce_scatter(const at::Tensor& x, const plan::Spec& spec, bool prepare_only);

  // A call by the group's own collective begins: throws where a peer makes another one, or the group has failed.
  void enter_serial(std::uint32_t signature, const std::string& text);

  // Collective: slots of at least this many bytes.
  void reserve(std::int64_t slot_bytes);
  std::int64_t slot_bytes();
  void set_timeout(double seconds);
  void abort(const std::string& cause);
  void check();  // throws what a call would throw if the group has failed
  void set_before_op(std::function<void(const plan::Op&, std::uint64_t)> hook);
  std::map<std::string, std::uintptr_t> raw_streams();

 private:
  Group& group() const;
  Backend& backend() const;
  void run(Problem& problem, const plan::Spec& spec, bool prepare_only);
  void grow(std::int64_t bytes);

  GroupConfig config_;
  Poll poll_;
  int device_;
  std::shared_ptr<FdExchange> exchange_;  // none in a group of one
  std::shared_ptr<Segment> control_;
  std::shared_ptr<Group> group_;      // from connect() on
  std::unique_ptr<Backend> backend_;  // from attach() on
  std::mutex order_;                  // of calls, and of growth among them
};

}  // namespace streamoverlap
