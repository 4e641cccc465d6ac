#include "layout.h"

#include <unistd.h>

#include <new>
#include <stdexcept>
#include <string>

namespace streamoverlap {

void Control::initialise(int rank) {
  ControlHead* head = new (base_) ControlHead{};
  head->magic = kMagic;
  head->version = kProtocolVersion;
  head->world = layout_.world();
  head->rank = rank;
  head->slots = layout_.slots();
  head->pid = static_cast<std::uint32_t>(getpid());
  head->state.store(static_cast<std::uint32_t>(State::Open), std::memory_order_relaxed);
  for (int slot = 0; slot < layout_.slots(); ++slot) {
    new (&progress(slot)) SlotProgress{};
    for (int peer = 0; peer < layout_.world(); ++peer) {
      new (&empty(slot, peer)) Word(kCreditValue);
      for (int index = 0; index < layout_.full_flags(); ++index) new (&full(slot, peer, index)) Word(0);
    }
  }
}

void Control::validate(int rank, std::size_t bytes) const {
  const auto expect = [rank](const char* field, std::uint64_t was, std::uint64_t expected) {
    if (was == expected) return;
    throw std::runtime_error("control segment of rank " + std::to_string(rank) + ": " + field + " is " +
                             std::to_string(was) + ", expected " + std::to_string(expected) +
                             " (do all ranks run the same build of streamoverlap with the same options?)");
  };
  if (bytes < layout_.bytes()) expect("size", bytes, layout_.bytes());
  expect("magic", head().magic, kMagic);
  expect("protocol version", head().version, kProtocolVersion);
  expect("world size", head().world, layout_.world());
  expect("rank", head().rank, rank);
  expect("number of slots", head().slots, layout_.slots());
}

}  // namespace streamoverlap
