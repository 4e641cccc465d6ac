// What calls of one kind, eager or captured, have to themselves: slots, scratch, streams and events. Replays of a graph
// may run beside eager calls, so nothing of one kind is ever used by the other.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAEvent.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "../group/call.h"
#include "steps.h"
#include "streams.h"

namespace streamoverlap::cuda {

inline constexpr int kSlotsPerLane = 2;

class Lane {
 public:
  enum class Use { Eager, Captured };

  Lane(Use use, int world, c10::DeviceIndex device);

  // Slots of the group's layout that belong to this lane start here.
  int first_slot() const { return use_ == Use::Eager ? 0 : kSlotsPerLane; }
  StreamSet& streams() const { return *streams_; }
  at::cuda::CUDAEvent& event(int id) { return events_[id]; }
  at::cuda::CUDAEvent& last_use(int slot) { return last_use_[slot]; }

  // bases[r]: where rank r's slots of this lane start, one after the other, in this process. `owner` keeps them.
  // Returns the owners of those that are used no more.
  std::vector<std::shared_ptr<void>> use_slots(const std::vector<std::byte*>& bases, std::int64_t slot_bytes,
                                               std::shared_ptr<void> owner);
  std::int64_t slot_bytes() const { return slot_bytes_; }
  std::vector<std::shared_ptr<void>> take_owners() { return std::exchange(owners_, {}); }

  bool has_room(const Call& call, const Steps& steps) const;
  void reserve(const Call& call, const Steps& steps);  // all but slots; no eager call may be in flight

  // Where the buffers of a call on one of the lane's slots are.
  const Bases& bases(int slot, const Call& call);

 private:
  Use use_;
  int world_;
  std::shared_ptr<StreamSet> streams_;
  std::vector<at::cuda::CUDAEvent> events_;
  std::array<at::cuda::CUDAEvent, kSlotsPerLane> last_use_;
  std::array<Bases, kSlotsPerLane> bases_{};
  std::int64_t slot_bytes_ = 0;
  std::array<at::Tensor, kSlotsPerLane> scratch_;
  std::int64_t scratch_bytes_ = 0;
  std::vector<std::shared_ptr<void>> owners_;  // of slots
  std::vector<at::Tensor> retired_;            // scratch that graphs may refer to
};

}  // namespace streamoverlap::cuda
