#include "watchdog.h"

#include <algorithm>
#include <cstdio>

#include "group.h"

namespace streamoverlap {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPoll{10};
constexpr milliseconds kLongestStep{500};  // of the watchdog's clock in one poll
constexpr milliseconds kSilent{800};       // a heartbeat older than this is of a process that is stopped or gone
constexpr milliseconds kGrace{500};        // for a rank that knows whom it waits for to report first

}  // namespace

Watchdog::Watchdog(Group& group) : group_(group), peers_(group.world()), since_(group.layout().slots()) {
  thread_ = std::thread([this] { run(); });
}

Watchdog::~Watchdog() {
  stop_.store(true, std::memory_order_relaxed);
  thread_.join();
}

void Watchdog::on_abort(std::function<bool()> release) {
  std::lock_guard<std::mutex> lock(release_mutex_);
  release_ = std::move(release);
}

void Watchdog::run() {
  auto last = std::chrono::steady_clock::now();
  while (!stop_.load(std::memory_order_relaxed)) {
    poll();
    std::this_thread::sleep_for(kPoll);
    const auto now = std::chrono::steady_clock::now();
    clock_ += std::min<Seconds>(now - last, kLongestStep);
    last = now;
  }
}

void Watchdog::poll() {
  group_.own().head().heartbeat.fetch_add(1, std::memory_order_relaxed);
  if (group_.aborted()) {
    if (!told_) tell();
    return release();
  }
  watch_peers();
  look_at_stuck_calls();
  for (int slot = 0; slot < group_.layout().slots(); ++slot) watch_slot(slot);
  watch_serial();
}

void Watchdog::release() {
  std::lock_guard<std::mutex> lock(release_mutex_);
  if (release_ && release_()) release_ = nullptr;
}

void Watchdog::watch_peers() {
  for (int rank = 0; rank < group_.world(); ++rank) {
    const std::uint64_t heartbeat = group_.control(rank).head().heartbeat.load(std::memory_order_relaxed);
    if (heartbeat != peers_[rank].heartbeat) peers_[rank] = {heartbeat, clock_};
  }
}

void Watchdog::watch_slot(int slot) {
  SlotProgress& progress = group_.own().progress(slot);
  std::uint32_t running = progress.running.load(std::memory_order_acquire);
  if (running == 0) return;
  if (!(running & kSeen)) {
    // Fails where the call has moved on since; the next poll sees what it is then.
    if (progress.running.compare_exchange_strong(running, running | kSeen)) since_[slot] = clock_;
    return;
  }
  if (mismatch(slot, running)) return;
  const std::uint32_t own_timeout = progress.timeout_ms.load(std::memory_order_relaxed);
  const Seconds timeout = own_timeout ? milliseconds(own_timeout) : group_.timeout();
  const Seconds elapsed = clock_ - since_[slot];
  if (elapsed >= timeout) timed_out(slot, running, elapsed, elapsed >= timeout + kGrace);
}

bool Watchdog::mismatch(int slot, std::uint32_t running) {
  if (running & kReceived) return false;
  const Control own = group_.own();
  const std::uint32_t signature = running & kSignatureMask;
  for (int sender = 0; sender < group_.world(); ++sender) {
    for (int index = 0; index < group_.layout().full_flags(); ++index) {
      const std::uint32_t value = own.full(slot, sender, index).load(std::memory_order_acquire);
      if (value == 0 || value == signature) continue;
      // Still the same call, and it has not returned a credit: the flag cannot be of the slot's next call.
      if (own.progress(slot).running.load(std::memory_order_acquire) != running) return false;
      group_.abort_mismatch(sender, signature, value);
      return true;
    }
  }
  return false;
}

void Watchdog::timed_out(int slot, std::uint32_t running, Seconds elapsed, bool last_chance) {
  if (group_.world() == 1) return;  // nobody to wait for: this rank is just slow
  AbortRecord record;
  record.kind = AbortKind::PeerTimeout;
  record.signature = running & kSignatureMask;
  record.elapsed = elapsed.count();
  const Suspect suspect = this->suspect(slot, record.signature);
  if (suspect.rank < 0 && !last_chance) return;
  record.culprit = suspect.rank;
  set_text(record.cause, suspect.cause);
  if (group_.own().progress(slot).running.load(std::memory_order_acquire) == running) group_.abort(record);
}

Watchdog::Suspect Watchdog::suspect(int slot, std::uint32_t signature) const {
  const Suspect gone = this->gone();
  if (gone.rank >= 0) return gone;
  int behind = -1, absent = -1;
  const std::uint64_t issued = group_.own().head().issued.load(std::memory_order_relaxed);
  const auto calls_of = [this](int rank) { return group_.control(rank).head().issued.load(std::memory_order_relaxed); };
  for (int rank = 0; rank < group_.world(); ++rank) {
    if (rank == group_.rank()) continue;
    const Control peer = group_.control(rank);
    if (calls_of(rank) < issued && (behind < 0 || calls_of(rank) < calls_of(behind))) behind = rank;
    if ((peer.progress(slot).running.load(std::memory_order_relaxed) & kSignatureMask) != signature) absent = rank;
  }
  if (behind >= 0) {
    return {behind, "has made " + std::to_string(calls_of(behind)) + " calls on this group, rank " +
                        std::to_string(group_.rank()) + " " + std::to_string(issued)};
  }
  if (absent >= 0) return {absent, "has not started this call, or has ended it"};
  const int last = end_of_wait_chain(slot);
  if (last >= 0 && last != group_.rank()) return {last, "is in this call and waits for no other rank"};
  return {-1, "are alive and in this call, or is itself busy"};
}

Watchdog::Suspect Watchdog::gone() const {
  int silent = -1;
  for (int rank = 0; rank < group_.world(); ++rank) {
    if (rank == group_.rank()) continue;
    const ControlHead& peer = group_.control(rank).head();
    if (peer.state.load(std::memory_order_acquire) == static_cast<std::uint32_t>(State::Closed)) {
      return {rank, "has closed its communicator"};
    }
    if (clock_ - peers_[rank].changed > kSilent && (silent < 0 || peers_[rank].changed < peers_[silent].changed)) {
      silent = rank;
    }
  }
  if (silent < 0) return {};
  char text[128];
  std::snprintf(text, sizeof text, "has shown no sign of life for %.1f s (process %u is stopped or gone)",
                (clock_ - peers_[silent].changed).count(), group_.control(silent).head().pid);
  return {silent, text};
}

void Watchdog::watch_serial() {
  std::lock_guard<std::mutex> lock(group_.serial_mutex_);
  for (auto& [number, call] : group_.serial_) {
    if (call.since < 0) call.since = clock_.count();
    if (call.failed < 0 && !call.cause.empty()) call.failed = clock_.count();
    const Seconds timeout = call.timeout.count() ? call.timeout : group_.timeout();
    const Seconds elapsed = clock_ - Seconds(call.since);
    // A peer whose end made the exchange fail is silent only after a while.
    const bool failed = call.failed >= 0 && (gone().rank >= 0 || clock_ - Seconds(call.failed) > kSilent + kGrace);
    if (!failed && elapsed < timeout) continue;
    const Suspect suspect = suspect_serial(number, call.cause);
    AbortRecord record;
    record.kind = AbortKind::PeerTimeout;
    record.signature = call.signature;
    record.elapsed = elapsed.count();
    record.culprit = suspect.rank;
    set_text(record.cause, suspect.cause);
    group_.abort(record);
    return;
  }
}

Watchdog::Suspect Watchdog::suspect_serial(std::uint32_t number, const std::string& cause) const {
  const Suspect gone = this->gone();
  if (gone.rank >= 0) return gone;
  for (int rank = 0; rank < group_.world(); ++rank) {
    const std::uint64_t word = group_.control(rank).head().serial[number % kSerialCalls].load();
    if (word >> 32 < number) return {rank, "has not made this call, serial call " + std::to_string(number)};
  }
  if (cause.empty()) return {-1, "have all made this call"};
  return {-1, "have all made this call; the exchange failed: " + cause};
}

// Rank 0 waits for rank 1, which waits for rank 2, which waits for nobody: rank 2 is to blame.
int Watchdog::end_of_wait_chain(int slot) const {
  int rank = group_.rank();
  for (int step = 0; step < group_.world(); ++step) {
    const SlotProgress& progress = group_.control(rank).progress(slot);
    const auto full = progress.awaiting[static_cast<int>(plan::FlagKind::Full)].load(std::memory_order_relaxed);
    const auto empty = progress.awaiting[static_cast<int>(plan::FlagKind::Empty)].load(std::memory_order_relaxed);
    const std::uint32_t next = full ? full : empty;
    if (next == 0 || awaited_setter(next) >= group_.world()) return rank;
    rank = awaited_setter(next);
  }
  return -1;
}

}  // namespace streamoverlap
