// A thread that notices what no call can notice itself: a peer that is gone, a GPU that waits for a flag that never
// comes. It looks at shared memory alone (plain loads, no CUDA, no lock that a call holds), since with a blocked GPU
// any driver call may hang.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "layout.h"

namespace streamoverlap {

class Group;

class Watchdog {
 public:
  explicit Watchdog(Group& group);
  ~Watchdog();

  void on_abort(std::function<bool()> release);

 private:
  using Seconds = std::chrono::duration<double>;

  struct Peer {
    std::uint64_t heartbeat = 0;
    Seconds changed{0};
  };
  struct Suspect {
    int rank = -1;
    std::string cause;
  };

  void run();
  void poll();
  void watch_peers();
  void watch_slot(int slot);
  void watch_serial();
  bool mismatch(int slot, std::uint32_t running);
  void timed_out(int slot, std::uint32_t running, Seconds elapsed, bool last_chance);
  Suspect suspect(int slot, std::uint32_t signature) const;
  Suspect suspect_serial(std::uint32_t number, const std::string& cause) const;
  Suspect gone() const;  // a peer that has closed, or shows no sign of life; rank -1: none
  int end_of_wait_chain(int slot) const;
  void release();
  void look_at_stuck_calls();
  void tell();
  std::string state() const;
  std::string state_of(int rank) const;

  Group& group_;
  Seconds clock_{0};  // time as this thread lived it: a stopped and continued process has not waited
  std::vector<Peer> peers_;
  std::vector<Seconds> since_;  // by slot: when the running call was first seen
  // While a call is stuck: what it is like. After an abort threads leave it at once, and there is little to see.
  std::string stuck_state_;
  Seconds stuck_seen_{0};
  bool told_ = false;
  std::mutex release_mutex_;
  std::function<bool()> release_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace streamoverlap
