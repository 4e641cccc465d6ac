#include "segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

namespace streamoverlap {
namespace {

[[noreturn]] void fail(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
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
  if (const int error = posix_fallocate(fd.get(), 0, static_cast<off_t>(bytes))) fail(error, what);
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
