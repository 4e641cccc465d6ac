// Anonymous shared memory: no name, nothing left behind, reachable only for a process that is handed the descriptor.
#pragma once

#include <cstddef>
#include <memory>

namespace streamoverlap {

// A file descriptor that closes itself.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  ~Fd();
  Fd(Fd&& other) noexcept : fd_(other.release()) {}
  Fd& operator=(Fd&& other) noexcept;

  int get() const { return fd_; }
  int release();
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

class Segment {
 public:
  // Zeroed, page aligned; `bytes` is rounded up to whole pages. Throws std::system_error, also where the memory cannot
  // be reserved now (it would be a SIGBUS at first touch otherwise).
  static std::shared_ptr<Segment> create(std::size_t bytes);
  // Maps a segment of another process, whole.
  static std::shared_ptr<Segment> map(Fd fd);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  int fd() const { return fd_.get(); }  // -1 in one that was mapped

 private:
  Segment(const Fd& fd, std::size_t bytes);

  Fd fd_;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace streamoverlap
