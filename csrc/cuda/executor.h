// Carries out plans on CUDA streams: copy engines move data, memory operations of streams set and await flags in shared
// memory, cuBLASLt multiplies. No SM does communication.
//
// It knows op kinds, never operations or algorithms: what happens in which order is the plan's business.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "../group/call.h"
#include "../group/group.h"
#include "data_ops.h"
#include "gemm.h"
#include "key.h"
#include "lane.h"
#include "registered.h"
#include "steps.h"
#include "streams.h"
#include "timing.h"

namespace streamoverlap::cuda {

class Executor {
 public:
  // The group needs `kSlots` slots.
  static constexpr int kSlots = 2 * kSlotsPerLane;

  Executor(std::shared_ptr<Group> group, c10::DeviceIndex device);
  // Waits for calls in flight, bounded by the group's timeout; then aborts the group. Graphs that contain calls must
  // not be replayed any more.
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Collective, at the same place in the order of calls on all ranks. bases[r]: where rank r's slots for this use start
  // in this process, kSlotsPerLane of `slot_bytes`. Calls in flight are waited for. Captured calls keep the slots they
  // were captured with.
  void use_slots(Lane::Use use, const std::vector<std::byte*>& bases, std::int64_t slot_bytes,
                 std::shared_ptr<void> owner);
  std::int64_t slot_bytes(Lane::Use use) const;

  // All that a call's first use costs: waits for calls in flight, chooses GEMM algorithms and runs every kernel of the
  // plan once on scratch memory, and takes what a captured call of it needs. Sends nothing. Not in a capture.
  void prepare(const Call& call, const Operands& operands);

  // Enqueues a call; its outputs are valid on `current`. Prepares it if need be; in a capture that is an error instead.
  // What prepare() did is kept for good; other calls are forgotten where there are thousands of them, and prepared
  // anew. The plan must live as long as this. `streams`: null for the private set; in a capture always the private one,
  // since a graph has no streams. `timeout` 0: the group's. With `end` the call is asynchronous: `current` goes on at
  // once, nothing of it waits for the exchange, and `end` is recorded where the call ends, on the recv stream. What the
  // call uses must be kept until then, or until `current` waits for it. Throws AbortError on a group that has failed,
  // std::invalid_argument on a call that does not fit.
  void issue(const Call& call, const Operands& operands, const c10::cuda::CUDAStream& current,
             StreamSet* streams = nullptr, std::chrono::milliseconds timeout = std::chrono::milliseconds{0},
             at::cuda::CUDAEvent* end = nullptr);

  bool is_idle() const;  // no call is in flight

  // From the first on, calls that have a trace are timed. The second tells their traces what was measured, once no call
  // is in flight; of a call that was captured, its last replay. A graph keeps its timing for good.
  void start_traces();
  void finish_traces();

  // Of products that are prepared from here on; see GemmCache.
  void set_tuning(bool on);
  GemmCache::Choices measured_gemms() const;
  void prefer_gemms(const GemmCache::Choices& choices);

  const StreamSet& streams(Lane::Use use) const { return lane(use).streams(); }  // the private set

 private:
  // What steps are compiled from. A signature is less: layers that exchange alike have the same one, whatever they
  // multiply by. The rest is less, too: flags have the signature's value.
  using CallKey = Key<4 + 2 * plan::kBuffers>;
  static CallKey key(const Call& call);

  struct Prepared {
    Steps steps;
    bool kept = false;  // asked for, so captures count on it
  };
  struct ReadyGemm {
    const Gemm* gemm;
    GemmPointers at;
  };
  // All that streams may still use when this is destroyed.
  struct Resources {
    Resources(const Group& group, c10::DeviceIndex device);

    RegisteredControls controls;
    Lane eager, captured;
    GemmCache gemms;
  };
  struct Capture {
    unsigned long long id = 0;
    std::uint64_t calls = 0;
    at::cuda::CUDAEvent last;
  };

  struct Timed {
    std::shared_ptr<CallTrace> trace;
    const plan::Plan* plan;
    std::vector<int> step_of_op;
    std::shared_ptr<Timing> timing;
  };

  // A call on its way to the streams.
  struct Issue {
    Steps& steps;
    const Operands& operands;
    Lane& lane;
    const Bases& bases;
    int slot;  // of the group's layout
    StreamSet& streams;
    const c10::cuda::CUDAStream& current;
    const c10::cuda::CUDAStream& last;  // where the call ends: `current`, or a stream of the set
    std::uint32_t signature;
    std::chrono::milliseconds timeout;
    bool capturing;
    Timing* timing;  // null: nobody asks
  };

  void validate(const Call& call, const Operands& operands) const;
  void validate_slots(const Call& call, Lane::Use use) const;
  void validate_weights(const Call& call, const Operands& operands) const;
  void validate_streams(const Steps& steps, const StreamSet& set, const c10::cuda::CUDAStream& current) const;

  Prepared* find(const Call& call);
  Prepared& prepare_locked(const Call& call, const Operands& operands);
  Prepared& prepare_valid(const Call& call, const Operands& operands);
  void make_room();
  void rehearse(const Call& call, const Operands& operands, const Steps& steps);
  bool find_gemms(const Steps& steps, const Operands& operands, const Bases& bases);

  Timing* time(const Call& call, const Steps& steps, bool capturing);
  void follow(const Issue& issue, at::cuda::CUDAEvent& previous) const;
  void run(const Issue& issue);
  void write_progress(const Issue& issue, std::uint32_t running, std::chrono::milliseconds timeout) const;
  // Peers have this call, or will have it: they must not wait for a rank that cannot make it.
  template <class Work>
  decltype(auto) or_abort(std::uint32_t signature, const Work& work) {
    try {
      return work();
    } catch (const std::exception& error) {
      group_->fail(error.what(), signature);
      throw;
    }
  }
  void fail(const Issue& issue, const char* cause) noexcept;

  bool idle() const;
  bool wait_until(const std::function<bool()>& done, std::chrono::milliseconds timeout) const;
  void finish_wait(bool done, const std::string& purpose) const;
  void drain_locked(const std::string& purpose) const;

  Lane& lane(Lane::Use use) const { return use == Lane::Use::Eager ? resources_->eager : resources_->captured; }

  std::shared_ptr<Group> group_;
  c10::DeviceIndex device_;
  mutable std::mutex issue_;  // the order of calls
  std::uint64_t calls_ = 0;
  std::uint64_t eager_calls_ = 0;
  std::unique_ptr<Resources> resources_;
  std::unordered_map<CallKey, Prepared, KeyHash> prepared_;
  std::vector<ReadyGemm> ready_gemms_;  // of the call being issued, in the order of steps
  Capture capture_;
  std::optional<Anchor> trace_start_;
  std::vector<Timed> timed_;
  std::vector<std::shared_ptr<Timing>> timing_of_graphs_;  // graphs have their events
};

}  // namespace streamoverlap::cuda
