#include "fd_exchange.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <thread>

namespace streamoverlap {
namespace {

using Clock = std::chrono::steady_clock;

struct Message {
  std::uint64_t cookie;
  std::uint32_t generation;
  std::int32_t rank;
};

[[noreturn]] void fail(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

std::string random_name() {
  unsigned char bits[16];
  if (getrandom(bits, sizeof bits, 0) != sizeof bits) fail(errno, "getrandom");
  std::string name = "streamoverlap-";
  for (const unsigned char byte : bits) {
    name += "0123456789abcdef"[byte >> 4];
    name += "0123456789abcdef"[byte & 15];
  }
  return name;
}

// Abstract: the path starts with a zero byte, so there is no file.
socklen_t socket_address(const std::string& name, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  name.copy(address.sun_path + 1, sizeof address.sun_path - 1);
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

// Sequenced packets: a message arrives whole or not at all.
Fd make_socket() {
  Fd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) fail(errno, "socket(AF_UNIX)");
  return fd;
}

bool of_own_user(int connection) {
  ucred peer = {};
  socklen_t size = sizeof peer;
  return getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == geteuid();
}

union Ancillary {
  cmsghdr header;
  char space[CMSG_SPACE(sizeof(int))];
};

ssize_t send_message(int connection, Message message, int fd) {
  iovec data = {&message, sizeof message};
  Ancillary ancillary = {};
  msghdr header = {};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  header.msg_control = &ancillary;
  header.msg_controllen = sizeof ancillary;
  cmsghdr* control = CMSG_FIRSTHDR(&header);
  control->cmsg_level = SOL_SOCKET;
  control->cmsg_type = SCM_RIGHTS;
  control->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(control), &fd, sizeof fd);
  return sendmsg(connection, &header, MSG_NOSIGNAL);
}

// No descriptor where the message is not one of ours.
Fd receive_message(int connection, Message& message) {
  iovec data = {&message, sizeof message};
  Ancillary ancillary = {};
  msghdr header = {};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  header.msg_control = &ancillary;
  header.msg_controllen = CMSG_LEN(sizeof(int));  // room for one descriptor, not for two
  const ssize_t received = recvmsg(connection, &header, MSG_CMSG_CLOEXEC);
  if (received >= 0 && (header.msg_flags & MSG_CTRUNC)) {
    fail(EMFILE, "receiving shared memory of a peer (no file descriptor is left, or it sent too many)");
  }
  Fd fd;
  const cmsghdr* control = received >= 0 ? CMSG_FIRSTHDR(&header) : nullptr;
  if (control != nullptr && control->cmsg_level == SOL_SOCKET && control->cmsg_type == SCM_RIGHTS) {
    int number = -1;
    std::memcpy(&number, CMSG_DATA(control), sizeof number);
    fd = Fd(number);
  }
  return received == sizeof message ? std::move(fd) : Fd();
}

}  // namespace

FdExchange::FdExchange(int rank, int world)
    : rank_(rank), world_(world), address_(random_name()), listener_(make_socket()) {
  sockaddr_un address;
  const socklen_t size = socket_address(address_, address);
  if (bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) fail(errno, "bind to a Unix socket");
  if (listen(listener_.get(), 2 * world) != 0) fail(errno, "listen on a Unix socket");
}

void FdExchange::connect(std::vector<std::string> addresses) {
  if (addresses.size() != static_cast<std::size_t>(world_)) {
    throw std::invalid_argument("addresses has " + std::to_string(addresses.size()) +
                                " entries, expected one for each of " + std::to_string(world_) + " ranks");
  }
  addresses_ = std::move(addresses);
  cookie_ = 0xcbf29ce484222325;  // FNV-1a over all addresses: known to nobody but the ranks
  for (const std::string& address : addresses_) {
    for (const unsigned char byte : address) cookie_ = (cookie_ ^ byte) * 0x100000001b3;
  }
}

std::vector<std::shared_ptr<Segment>> FdExchange::share(std::shared_ptr<Segment> own, std::chrono::milliseconds timeout,
                                                        const Poll& poll) {
  if (addresses_.empty()) throw std::logic_error("FdExchange::share: connect() has not been called");
  const Deadline deadline = Clock::now() + timeout;
  ++generation_;
  for (int distance = 1; distance < world_; ++distance) send_to((rank_ + distance) % world_, own->fd(), deadline);

  std::vector<std::shared_ptr<Segment>> segments(world_);
  segments[rank_] = std::move(own);
  for (;;) {
    std::string missing;
    int first = -1;
    for (int peer = 0; peer < world_; ++peer) {
      if (peer != rank_ && received_.count({generation_, peer}) == 0) {
        missing += " " + std::to_string(peer);
        if (first < 0) first = peer;
      }
    }
    if (missing.empty()) break;
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) {
      throw PeerMissing(first,
                        "rank " + std::to_string(rank_) + " got no shared memory from rank(s)" + missing + " within " +
                            std::to_string(timeout.count()) + " ms" +
                            (refused_ ? "; refused " + std::to_string(refused_) + " connection(s) of strangers" : ""));
    }
    if (poll) poll();
    accept_and_receive(static_cast<int>(std::min<long long>(left, kPollInterval.count())));
  }
  for (int peer = 0; peer < world_; ++peer) {
    if (peer == rank_) continue;
    auto entry = received_.extract({generation_, peer});
    segments[peer] = Segment::map(std::move(entry.mapped()));
  }
  return segments;
}

void FdExchange::send_to(int peer, int fd, Deadline deadline) const {
  const std::string who = "rank " + std::to_string(rank_) + " handing shared memory to rank " + std::to_string(peer);
  sockaddr_un address;
  const socklen_t size = socket_address(addresses_[peer], address);
  const Fd connection = make_socket();
  while (::connect(connection.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) {
    if (errno == ECONNREFUSED) {
      throw PeerMissing(peer, who + ": nobody listens there (has that rank ended, or is it on another host?)");
    }
    if ((errno != EAGAIN && errno != EINTR) || Clock::now() > deadline) fail(errno, who + ": connect");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (!of_own_user(connection.get())) throw std::runtime_error(who + ": the listener runs as another user");
  if (send_message(connection.get(), {cookie_, generation_, rank_}, fd) < 0) fail(errno, who + ": sendmsg");
}

void FdExchange::accept_and_receive(int milliseconds) {
  std::vector<pollfd> sources = {{listener_.get(), POLLIN, 0}};
  for (const Fd& connection : connections_) sources.push_back({connection.get(), POLLIN, 0});
  if (poll(sources.data(), sources.size(), milliseconds) < 0 && errno != EINTR) fail(errno, "poll of a Unix socket");
  for (std::size_t i = connections_.size(); i-- > 0;) {
    if (sources[i + 1].revents == 0) continue;
    receive_from(connections_[i].get());
    connections_.erase(connections_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  if (sources[0].revents == 0) return;
  Fd connection(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!connection) {
    if (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED) return;
    fail(errno, "accept on a Unix socket");
  }
  if (of_own_user(connection.get())) {
    connections_.push_back(std::move(connection));
  } else {
    ++refused_;
  }
}

void FdExchange::receive_from(int connection) {
  Message message = {};
  Fd fd = receive_message(connection, message);
  if (!fd || message.cookie != cookie_ || message.rank < 0 || message.rank >= world_ ||
      message.generation < generation_) {
    ++refused_;
    return;
  }
  received_.emplace(std::pair(message.generation, message.rank), std::move(fd));
}

}  // namespace streamoverlap
