#include "segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "memory.h"

namespace streamoverlap {
namespace {

// Memory is taken in steps, and only while there is more left than this: several ranks take theirs at once, and where
// it runs out the kernel kills processes.
constexpr std::size_t kStep = 64 << 20;
constexpr std::size_t kLeftForOthers = 256 << 20;

[[noreturn]] void fail(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

void expect_available(std::size_t bytes, const std::string& what) {
  const std::uint64_t available = available_memory();
  if (bytes + kLeftForOthers <= available) return;
  fail(ENOMEM, what + ": the machine, or this process' cgroup, has " + std::to_string(available) + " left, of which " +
                   std::to_string(kLeftForOthers) + " are not taken");
}

void reserve(int fd, std::size_t bytes, const std::string& what) {
  if (bytes >= kStep) expect_available(bytes, what);
  for (std::size_t begin = 0; begin < bytes; begin += kStep) {
    const std::size_t step = std::min(kStep, bytes - begin);
    if (begin > 0) expect_available(step, what);
    if (const int error = posix_fallocate(fd, static_cast<off_t>(begin), static_cast<off_t>(step))) fail(error, what);
  }
}

}  // namespace

Fd::~Fd() {
  if (fd_ >= 0) close(fd_);
}

Fd& Fd::operator=(Fd&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

int Fd::release() { return std::exchange(fd_, -1); }

std::shared_ptr<Segment> Segment::create(std::size_t bytes) {
  const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  bytes = (bytes + page - 1) / page * page;
  const std::string what = "reserving " + std::to_string(bytes) + " bytes of shared memory";
  Fd fd(memfd_create("streamoverlap", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) fail(errno, what + ": memfd_create");
  reserve(fd.get(), bytes, what);
  // A peer cannot cut the file short under our mapping.
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) fail(errno, what + ": F_ADD_SEALS");
  std::shared_ptr<Segment> segment(new Segment(fd, bytes));
  segment->fd_ = std::move(fd);
  return segment;
}

std::shared_ptr<Segment> Segment::map(Fd fd) {
  struct stat info = {};
  if (fstat(fd.get(), &info) != 0) fail(errno, "fstat of a peer's shared memory");
  if (info.st_size <= 0) throw std::runtime_error("a peer's shared memory has size 0");
  return std::shared_ptr<Segment>(new Segment(fd, static_cast<std::size_t>(info.st_size)));
}

Segment::Segment(const Fd& fd, std::size_t bytes) : bytes_(bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (data == MAP_FAILED) fail(errno, "mapping " + std::to_string(bytes) + " bytes of shared memory");
  data_ = static_cast<std::byte*>(data);
}

Segment::~Segment() { munmap(data_, bytes_); }

}  // namespace streamoverlap
