// What the ranks of a communicator share: control segments, the abort word, a timeout, the watchdog.
//
// Set-up, on every rank:
//   FdExchange exchange(rank, world);                          // exchange.address() travels through the store
//   exchange.connect(addresses_of_all_ranks);
//   auto controls = exchange.share(make_control(config), timeout);
//   auto group = std::make_shared<Group>(config, controls);
// In one process (tests) the ranks' groups are made from one and the same vector of segments.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "errors.h"
#include "layout.h"
#include "poll.h"
#include "segment.h"

namespace streamoverlap {

class Watchdog;

struct GroupConfig {
  std::string name;
  int rank = 0;
  int world = 1;
  int slots = 2;
  std::chrono::milliseconds timeout{600'000};
};

// This rank's control segment in its first state, to be shared with the peers. Throws std::invalid_argument.
std::shared_ptr<Segment> make_control(const GroupConfig& config);

class Group {
 public:
  // controls[r]: rank r's control segment.
  Group(GroupConfig config, std::vector<std::shared_ptr<Segment>> controls);
  ~Group();  // no call may be in flight
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  const std::string& name() const { return config_.name; }
  int rank() const { return config_.rank; }
  int world() const { return config_.world; }
  const Layout& layout() const { return layout_; }
  Control control(int rank) const { return Control(controls_[rank]->data(), layout_); }
  Control own() const { return control(rank()); }
  const std::vector<std::shared_ptr<Segment>>& controls() const { return controls_; }
  std::size_t control_bytes() const { return controls_[rank()]->bytes(); }  // whole pages, for cuMemHostRegister

  std::chrono::milliseconds timeout() const { return timeout_.load(std::memory_order_relaxed); }
  void set_timeout(std::chrono::milliseconds timeout);

  // For messages: what a signature stands for.
  void describe(std::uint32_t signature, const std::string& text);
  bool described(std::uint32_t signature) const;
  std::string text(std::uint32_t signature) const;
  // The flags that calls of this signature await on this rank, told by executors whose waits no thread makes. Flags of
  // one signature add up.
  void add_awaited(std::uint32_t signature, const std::vector<plan::Flag>& flags);
  std::vector<plan::Flag> awaited(std::uint32_t signature) const;  // empty where nobody has told
  // Sets what running calls await, by plain stores, which work while the driver is blocked. For on_abort.
  void release_awaited();

  // The abort word. It is set before any flag is released, and once set nothing of this group is used again.
  bool aborted() const { return abort_word().load(std::memory_order_acquire) != 0; }
  bool abort(AbortRecord record);  // false: another rank or thread was first
  // This rank cannot do its part; its peers have the call or will have it, and must not wait. 0: of no known call.
  bool fail(const std::string& cause, std::uint32_t own_signature = 0);
  // A peer does not do its part; `cause` completes "waited ... for rank N, which".
  bool fail_peer(int peer, const std::string& cause, std::uint32_t own_signature, double elapsed);
  bool abort_mismatch(int culprit, std::uint32_t own_signature, std::uint32_t found);
  AbortError error(std::uint32_t own_signature = 0) const;  // only after an abort
  void check() const;                                       // throws error() if aborted

  // A call by the group's own collective begins. Of two ranks whose calls of one number differ, the later one throws
  // here, before it sends anything; the other, which may wait for it already, sees the abort word. A rank that is
  // kSerialCalls ahead of a peer waits for it, since both would not compare. Returns the number.
  std::uint32_t enter_serial(std::uint32_t signature, const Poll& poll = {}, std::chrono::milliseconds timeout = {});
  // Slots grow for a call of this signature. Ranks whose calls differ learn of it as above, before any memory is
  // shared.
  void enter_growth(std::uint32_t signature);
  // Where all ranks must choose alike, but each knows only a part of what the choice should follow, such as the size of
  // its own weight: rank 0's choice. Ranks ask at the same calls, numbered from 1. A rank that is ahead of rank 0 waits
  // for it, for `timeout` at most (0: the group's); if rank 0 makes another call instead, that is a mismatch.
  struct Choice {
    std::uint32_t number = 0;
    std::uint32_t shared = 0;  // of what all ranks know of the call
    std::uint32_t own = 0;     // of all that this rank knows
    std::uint32_t choice = 0;  // this rank's
    std::string call;          // for messages
  };
  struct Agreed {
    std::uint32_t choice = 0;
    bool alike = false;  // rank 0 knows the same of the call
  };
  Agreed agree(const Choice& choice, const Poll& poll = {}, std::chrono::milliseconds timeout = {});

  // The watchdog watches the call until it is left; `timeout` 0: the group's. A call that has failed makes it look for
  // the peer that is gone and abort.
  void watch_serial(std::uint32_t number, std::uint32_t signature, std::chrono::milliseconds timeout);
  void fail_serial(std::uint32_t number, const std::string& cause);
  void leave_serial(std::uint32_t number);
  bool in_serial();  // a watched call has not been left

  // The watchdog calls `release` every few milliseconds after an abort until it returns true: all calls have ended.
  // It must call nothing of CUDA and take no lock that a blocked call holds. An empty function takes it away.
  void on_abort(std::function<bool()> release);

  // What the watchdog saw when the group failed, for a person to read. It is also written to `path`, if given before.
  void set_report_path(std::string path);
  void publish_report(std::string report);
  // Waits up to `wait` for it; empty where there is none then.
  std::string report(std::chrono::milliseconds wait = std::chrono::milliseconds{0}) const;
  bool first_to_ask() { return !asked_.exchange(true); }  // so that it is logged once

 private:
  void await_serial_room(std::uint64_t number, std::uint32_t signature, const Poll& poll,
                         std::chrono::milliseconds timeout);
  void announce(LongWord& (*word_of)(ControlHead&, std::uint64_t), std::uint64_t number, std::uint32_t signature);
  Word& abort_word() const { return control(0).head().abort; }

  GroupConfig config_;
  Layout layout_;
  std::vector<std::shared_ptr<Segment>> controls_;
  std::atomic<std::chrono::milliseconds> timeout_;
  // Never held over a call that may block: the watchdog takes it.
  mutable std::mutex texts_mutex_;
  std::map<std::uint32_t, std::string> texts_;
  std::map<std::uint32_t, std::vector<plan::Flag>> awaited_;
  mutable std::condition_variable reported_;
  std::string report_path_, report_;
  std::atomic<bool> asked_{false};
  std::atomic<std::uint32_t> serial_calls_{0}, growths_{0};
  friend class Watchdog;
  struct SerialCall {
    std::uint32_t signature = 0;
    std::chrono::milliseconds timeout{0};
    double since = -1;   // by the watchdog's clock, from its first look
    double failed = -1;  // likewise
    std::string cause;   // of a failure
  };
  std::mutex serial_mutex_;
  std::map<std::uint32_t, SerialCall> serial_;  // in flight, by number
  std::unique_ptr<Watchdog> watchdog_;          // last: its thread uses all of the above
};

}  // namespace streamoverlap
