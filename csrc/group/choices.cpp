// Choices that rank 0 makes for all.
#include <chrono>
#include <stdexcept>
#include <thread>

#include "group.h"

namespace streamoverlap {
namespace {

constexpr int kSpins = 1000;
constexpr std::chrono::microseconds kChoiceWait{50};
// Another thread of this rank may have a choice and not have issued its call yet, while rank 0 has.
constexpr std::chrono::seconds kOutOfStep{1};

}  // namespace

Group::Agreed Group::agree(const Choice& choice, const Poll& poll, std::chrono::milliseconds timeout) {
  check();
  ControlHead& head = control(0).head();
  ChoiceEntry& entry = head.choices[choice.number % kChoices];
  if (rank() == 0) {
    entry.of.store(std::uint64_t{choice.shared} << 32 | choice.own, std::memory_order_relaxed);
    entry.stamp.store(std::uint64_t{choice.number} << 32 | choice.choice, std::memory_order_release);
    return {choice.choice, true};
  }
  const std::uint32_t signature = choice.shared & kSignatureMask;
  const auto begin = std::chrono::steady_clock::now();
  auto in_step = begin;  // when rank 0 was last seen not to have issued more calls than this rank
  for (int spins = 0;; ++spins) {
    // Before the entry: a call that rank 0 has issued comes after what it chose for it.
    const bool behind = head.issued.load(std::memory_order_acquire) > own().head().issued.load();
    const std::uint64_t stamp = entry.stamp.load(std::memory_order_acquire);
    const std::uint64_t of = entry.of.load(std::memory_order_relaxed);
    const auto number = static_cast<std::uint32_t>(stamp >> 32);
    if (number == choice.number && of >> 32 == choice.shared) {
      return {static_cast<std::uint32_t>(stamp), static_cast<std::uint32_t>(of) == choice.own};
    }
    check();
    if (spins < kSpins && number != choice.number) continue;
    const auto now = std::chrono::steady_clock::now();
    if (!behind) in_step = now;
    if (!described(signature)) describe(signature, choice.call);
    if (number == choice.number || now - in_step > kOutOfStep) {
      abort_mismatch(0, signature, static_cast<std::uint32_t>(of >> 32) & kSignatureMask);
      throw error(signature);
    }
    if (now - begin >= (timeout.count() > 0 ? timeout : this->timeout())) {
      const std::chrono::duration<double> elapsed = now - begin;
      fail_peer(0, "chooses the plan and has not come to this call", signature, elapsed.count());
      throw error(signature);
    }
    if (poll) poll();
    std::this_thread::sleep_for(kChoiceWait);
  }
}

}  // namespace streamoverlap
