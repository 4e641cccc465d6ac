// Hands descriptors of shared memory to all ranks of a group on this host, over Unix sockets.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "poll.h"
#include "segment.h"

namespace streamoverlap {

// A peer has handed over nothing.
struct PeerMissing : std::runtime_error {
  PeerMissing(int peer, const std::string& what) : std::runtime_error(what), peer(peer) {}

  int peer;
};

class FdExchange {
 public:
  // Listens on an abstract socket with a random name. Throws std::system_error.
  FdExchange(int rank, int world);

  // To be sent to all ranks by the caller (text, e.g. through a store).
  const std::string& address() const { return address_; }
  // addresses[r]: rank r's.
  void connect(std::vector<std::string> addresses);

  // Collective. Gives `own` to all peers and returns the segments of all ranks, in rank order. Throws
  // std::runtime_error naming the peers and the cause when it is not complete after `timeout`, and what `poll` throws.
  std::vector<std::shared_ptr<Segment>> share(std::shared_ptr<Segment> own, std::chrono::milliseconds timeout,
                                              const Poll& poll = {});

 private:
  using Deadline = std::chrono::steady_clock::time_point;

  void send_to(int peer, int fd, Deadline deadline) const;
  void accept_and_receive(int milliseconds);
  void receive_from(int connection);

  int rank_;
  int world_;
  std::string address_;
  Fd listener_;
  std::vector<std::string> addresses_;
  std::uint64_t cookie_ = 0;      // of this group: a message with another one is not for it
  std::uint32_t generation_ = 0;  // calls of share()
  int refused_ = 0;               // connections of strangers
  std::vector<Fd> connections_;   // accepted, nothing received yet
  // By (generation, rank). A fast peer may already send for the next generation.
  std::map<std::pair<std::uint32_t, int>, Fd> received_;
};

}  // namespace streamoverlap
