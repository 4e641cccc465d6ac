// What the watchdog saw when its group failed, as text.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <ctime>
#include <string>

#include "group.h"
#include "watchdog.h"

namespace streamoverlap {
namespace {

constexpr std::chrono::milliseconds kStuck{200};
constexpr int kMostFlags = 8;  // that are named

std::string seconds(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", value);
  return text;
}

std::string local_time() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  char text[32] = "";
  if (localtime_r(&now, &parts)) std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S", &parts);
  return text;
}

// The flag that a thread of `rank` waits for; of a GPU only which flags are not set, so missing or taken already.
std::string missing(const Group& group, int rank, int slot, std::uint32_t signature) {
  const Control control = group.control(rank);
  std::string text;
  for (const plan::FlagKind kind : {plan::FlagKind::Full, plan::FlagKind::Empty}) {
    const std::uint32_t value = control.progress(slot).awaiting[static_cast<int>(kind)].load(std::memory_order_relaxed);
    if (value) text += ", waits for " + to_string(awaited_flag(kind, rank, value));
  }
  if (rank != group.rank()) return text;
  int count = 0;
  for (const plan::Flag& flag : group.awaited(signature)) {
    if (control.flag(slot, flag).load(std::memory_order_relaxed) != 0) continue;
    if (++count <= kMostFlags) text += (count == 1 ? ", missing or taken: " : " ") + to_string(flag);
  }
  return count > kMostFlags ? text + " and " + std::to_string(count - kMostFlags) + " more" : text;
}

}  // namespace

void Watchdog::look_at_stuck_calls() {
  bool stuck = false;
  for (int slot = 0; slot < group_.layout().slots(); ++slot) {
    const std::uint32_t running = group_.own().progress(slot).running.load(std::memory_order_relaxed);
    stuck = stuck || ((running & kSeen) && clock_ - since_[slot] > kStuck);
  }
  if (!stuck) {
    stuck_state_.clear();
  } else if (stuck_state_.empty() || clock_ - stuck_seen_ > kStuck) {
    stuck_state_ = state();
    stuck_seen_ = clock_;
  }
}

void Watchdog::tell() {
  told_ = true;
  std::string text = "streamoverlap, " + local_time() + ", process " + std::to_string(getpid()) + ": ";
  text += group_.error().what();
  group_.publish_report(text + "\n" + (stuck_state_.empty() ? state() : stuck_state_));
}

std::string Watchdog::state() const {
  std::string text;
  for (int rank = 0; rank < group_.world(); ++rank) text += state_of(rank);
  return text;
}

std::string Watchdog::state_of(int rank) const {
  const ControlHead& head = group_.control(rank).head();
  const bool own = rank == group_.rank();
  std::string text = "rank " + std::to_string(rank) + (own ? " (this rank)" : "") + ": process " +
                     std::to_string(head.pid) + ", " + std::to_string(head.issued.load(std::memory_order_relaxed)) +
                     " calls issued";
  if (head.state.load(std::memory_order_relaxed) == static_cast<std::uint32_t>(State::Closed)) text += ", closed";
  if (!own) text += ", last sign of life " + seconds((clock_ - peers_[rank].changed).count()) + " ago";
  text += "\n";
  for (int slot = 0; slot < group_.layout().slots(); ++slot) {
    const std::uint32_t running = group_.control(rank).progress(slot).running.load(std::memory_order_relaxed);
    const std::uint32_t signature = running & kSignatureMask;
    if (running == 0) continue;
    const std::string op = group_.text(signature);
    text += "  slot " + std::to_string(slot) + ": " + (op.empty() ? "a call that this rank has never made" : op);
    if (own && (running & kSeen)) text += ", for " + seconds((clock_ - since_[slot]).count());
    if (running & kReceived) text += ", all received";
    text += missing(group_, rank, slot, signature) + "\n";
  }
  return text;
}

}  // namespace streamoverlap
