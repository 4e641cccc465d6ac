#include "lane.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace streamoverlap::cuda {
Lane::Lane(Use use, int world, c10::DeviceIndex device) : use_(use), world_(world), streams_(StreamSet::make(device)) {}

std::vector<std::shared_ptr<void>> Lane::use_slots(const std::vector<std::byte*>& bases, std::int64_t slot_bytes,
                                                   std::shared_ptr<void> owner) {
  if (bases.size() != static_cast<std::size_t>(world_)) {
    throw std::invalid_argument("bases has " + std::to_string(bases.size()) + " pointers, expected one for each of " +
                                std::to_string(world_) + " ranks");
  }
  if (slot_bytes <= 0 || slot_bytes % kSlotAlignment != 0) {
    throw std::invalid_argument("slot_bytes is " + std::to_string(slot_bytes) + ", expected a positive multiple of " +
                                std::to_string(kSlotAlignment));
  }
  for (int rank = 0; rank < world_; ++rank) {
    if (reinterpret_cast<std::uintptr_t>(bases[rank]) % kSlotAlignment == 0) continue;
    throw std::invalid_argument("bases[" + std::to_string(rank) + "] is not aligned to " +
                                std::to_string(kSlotAlignment) + " bytes");
  }
  for (int slot = 0; slot < kSlotsPerLane; ++slot) {
    for (int rank = 0; rank < world_; ++rank) bases_[slot][kSlotOf + rank] = bases[rank] + slot * slot_bytes;
  }
  slot_bytes_ = slot_bytes;
  std::vector<std::shared_ptr<void>> replaced;
  if (use_ == Use::Eager) replaced.swap(owners_);  // graphs may refer to captured ones
  owners_.push_back(std::move(owner));
  return replaced;
}

bool Lane::has_room(const Call& call, const Steps& steps) const {
  return (world_ == 1 || call.slot_bytes() <= slot_bytes_) && call.scratch_bytes() <= scratch_bytes_ &&
         steps.events <= static_cast<int>(events_.size());
}

void Lane::reserve(const Call& call, const Steps& steps) {
  if (steps.events > static_cast<int>(events_.size())) events_.resize(steps.events);
  streams().reserve_workspaces(steps.workspaces);
  if (call.scratch_bytes() <= scratch_bytes_) return;
  const c10::cuda::CUDAStream& stream = streams().at(plan::kCompute);
  scratch_bytes_ = 0;
  for (int slot = 0; slot < kSlotsPerLane; ++slot) {
    if (use_ == Use::Captured && scratch_[slot].defined()) retired_.push_back(scratch_[slot]);
    scratch_[slot] = at::Tensor();
    scratch_[slot] = allocate_to_keep(call.scratch_bytes(), stream);
    bases_[slot][static_cast<int>(plan::Buffer::Scratch)] = static_cast<std::byte*>(scratch_[slot].data_ptr());
  }
  scratch_bytes_ = call.scratch_bytes();
}

const Bases& Lane::bases(int slot, const Call& call) {
  Bases& bases = bases_[slot];
  using plan::Buffer;
  for (const Buffer buffer : {Buffer::Input, Buffer::Output, Buffer::Gathered, Buffer::Copied, Buffer::Scales}) {
    bases[static_cast<int>(buffer)] = call.views[static_cast<int>(buffer)].base;
  }
  return bases;
}

}  // namespace streamoverlap::cuda
