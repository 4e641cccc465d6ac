#include "quarantine.h"

#include <algorithm>
#include <iterator>
#include <mutex>
#include <utility>

namespace streamoverlap::cuda {
namespace {

struct Kept {
  std::vector<std::shared_ptr<Segment>> controls;
  Layout layout;
  int rank;
  std::vector<std::vector<std::shared_ptr<void>>> slots;

  bool peers_have_closed() const {
    for (int peer = 0; peer < layout.world(); ++peer) {
      const Word& state = Control(controls[peer]->data(), layout).head().state;
      if (peer != rank && state.load(std::memory_order_acquire) != static_cast<std::uint32_t>(State::Closed))
        return false;
    }
    return true;
  }
};

struct Quarantine {
  std::mutex mutex;
  std::vector<Kept> kept;
};

// Never destroyed: at the end of the process peers may still write.
Quarantine& instance() {
  static auto* const quarantine = new Quarantine;
  return *quarantine;
}

}  // namespace

void quarantine(const Group& group, std::vector<std::vector<std::shared_ptr<void>>> slots) {
  const std::lock_guard<std::mutex> lock(instance().mutex);
  instance().kept.push_back({group.controls(), group.layout(), group.rank(), std::move(slots)});
}

void sweep_quarantine() {
  std::vector<Kept> released;  // destroyed after the lock: it may run Python
  const std::lock_guard<std::mutex> lock(instance().mutex);
  auto& kept = instance().kept;
  const auto first = std::partition(kept.begin(), kept.end(), [](const Kept& one) { return !one.peers_have_closed(); });
  std::move(first, kept.end(), std::back_inserter(released));
  kept.erase(first, kept.end());
}

}  // namespace streamoverlap::cuda
