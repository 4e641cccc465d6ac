// Where a communicator's plans run: CPU threads or CUDA streams.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "../group/fd_exchange.h"
#include "../group/group.h"
#include "../group/poll.h"
#include "in_flight.h"
#include "problem.h"

namespace streamoverlap {

// Symmetric memory of all ranks, mapped here.
struct SlotMemory {
  std::vector<std::byte*> bases;  // by rank
  std::shared_ptr<void> owner;
};
using AllocateSlots = std::function<SlotMemory(std::int64_t bytes)>;

// An algorithm for one product; see cuda::GemmCache. Seconds where it was measured, else 0.
struct TunedGemm {
  std::array<std::int64_t, 8> key;
  int algorithm = 0;
  double seconds = 0, first_seconds = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual std::int64_t slot_bytes() const = 0;
  virtual bool fits(std::int64_t slot_bytes) const = 0;
  // Collective, at the same place in the order of calls on all ranks.
  virtual void grow(std::int64_t slot_bytes, std::chrono::milliseconds timeout) = 0;
  // Returns null where nothing is left to do: not asynchronous, and the outputs are ready in the order of the caller's
  // stream. `problem` and its plan are kept as long as they are used.
  virtual std::unique_ptr<InFlight> issue(std::shared_ptr<const Problem> problem, const CallOptions& options) = 0;
  // The stream that calls with these streams end on, as the driver's handle; 0 on the CPU.
  virtual std::uintptr_t op_stream(const CallOptions& options) const = 0;
  // Collective. All that a call's first use costs, and all that a captured call needs; sends nothing.
  virtual void prepare(const Problem& problem) = 0;

  virtual bool is_idle() const = 0;  // no call is in flight on this rank

  // Calls with a trace that are issued from the first on have told it all they know after the second, if they have
  // ended.
  virtual void start_traces() {}
  virtual void finish_traces() {}

  // While tuning, products of new calls are measured with every algorithm there is.
  virtual void set_tuning(bool) {}
  virtual std::vector<TunedGemm> measured_gemms() const { return {}; }
  virtual void prefer_gemms(const std::vector<TunedGemm>&) {}

  // For tests: called before every op, with the number of the call.
  virtual void set_before_op(std::function<void(const plan::Op&, std::uint64_t)> hook) = 0;
  // For tests: the private CUDA streams of eager calls by role, as handles.
  virtual std::map<std::string, std::uintptr_t> raw_streams() const { return {}; }
};

// `poll`: called by callers' threads while they wait; what it throws aborts the group.
std::unique_ptr<Backend> make_host_backend(std::shared_ptr<Group>, std::shared_ptr<FdExchange>, Poll poll);

#ifdef STREAMOVERLAP_WITH_CUDA
// Slots that the group's layout must have: calls that are captured have slots of their own.
int cuda_slots();
// Throws where this device and the peers' cannot run plans together.
std::unique_ptr<Backend> make_cuda_backend(std::shared_ptr<Group>, int device, const std::vector<int>& peer_devices,
                                           AllocateSlots);
#endif

}  // namespace streamoverlap
