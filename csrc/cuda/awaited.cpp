#include "awaited.h"

#include <algorithm>

namespace streamoverlap::cuda {

void AwaitedFlags::add(std::uint32_t signature, const std::vector<plan::Flag>& flags) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<plan::Flag>& known = flags_[signature];
  for (const plan::Flag& flag : flags) {
    if (std::none_of(known.begin(), known.end(),
                     [&flag](const plan::Flag& other) { return other.tie() == flag.tie(); }))
      known.push_back(flag);
  }
}

// By plain stores, which work while the driver is blocked.
void AwaitedFlags::release(const Group& group) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Control own = group.own();
  for (int slot = 0; slot < group.layout().slots(); ++slot) {
    const std::uint32_t signature = own.progress(slot).running.load(std::memory_order_acquire) & kSignatureMask;
    const auto found = flags_.find(signature);
    if (found == flags_.end()) continue;
    for (const plan::Flag& flag : found->second) {
      own.flag(slot, flag).store(set_value(flag, signature), std::memory_order_release);
    }
  }
}

}  // namespace streamoverlap::cuda
