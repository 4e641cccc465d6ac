// Choices that rank 0 makes for all.
#include <chrono>
#include <stdexcept>
#include <thread>

#include "group.h"

namespace streamoverlap {
namespace {

constexpr std::chrono::microseconds kChoiceWait{200};

// Where `key` is, or the next one would be, in a table that is filled but never emptied; null: it is full.
LongWord* find(ControlHead& head, std::uint32_t key) {
  for (std::uint32_t i = 0; i < kChoices; ++i) {
    LongWord& entry = head.choices[(key + i) % kChoices];
    const std::uint64_t value = entry.load(std::memory_order_acquire);
    if (value == 0 || value >> 32 == key) return &entry;
  }
  return nullptr;
}

}  // namespace

std::uint32_t Group::agree(std::uint32_t key, std::uint32_t choice, const std::string& call, const Poll& poll) {
  check();
  if (key == 0 || choice == 0) throw std::invalid_argument("key or choice is 0, expected neither");
  ControlHead& head = control(0).head();
  const std::uint64_t issued = own().head().issued.load(std::memory_order_relaxed);
  const auto begin = std::chrono::steady_clock::now();
  for (;;) {
    // Before the table: a call that rank 0 has issued comes after what it chose for it.
    const bool passed = head.issued.load(std::memory_order_acquire) > issued;
    LongWord* const entry = find(head, key);
    if (!entry) return 0;
    if (const std::uint64_t value = entry->load(std::memory_order_acquire)) return static_cast<std::uint32_t>(value);
    if (rank() == 0) {
      entry->store(std::uint64_t{key} << 32 | choice, std::memory_order_release);
      return choice;
    }
    const std::uint32_t signature = key & kSignatureMask;
    if (!described(signature)) describe(signature, call);
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
    if (passed) {
      abort_mismatch(0, signature, 0);
    } else if (elapsed >= timeout()) {
      fail_peer(0, "chooses the plan and has not come to this call", signature, elapsed.count());
    }
    if (aborted()) throw error(signature);
    if (poll) poll();
    std::this_thread::sleep_for(kChoiceWait);
  }
}

}  // namespace streamoverlap
