#include "flag_wait.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace streamoverlap::host {
namespace {

constexpr int kSpins = 200;                   // longer pays only where every stream has a core of its own
constexpr timespec kSleep = {0, 20'000'000};  // how late an abort may be seen

// Not FUTEX_PRIVATE: waiter and waker are different processes.
void futex(const Word& word, int operation, std::uint32_t value, const timespec* timeout) {
  syscall(SYS_futex, reinterpret_cast<const std::uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

}  // namespace

void set_flag(Word& flag, std::uint32_t value) {
  flag.store(value, std::memory_order_release);
  futex(flag, FUTEX_WAKE, INT_MAX, nullptr);
}

std::uint32_t wait_nonzero(const Word& flag) {
  for (int i = 0; i < kSpins; ++i) {
    if (const std::uint32_t value = flag.load(std::memory_order_acquire)) return value;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  futex(flag, FUTEX_WAIT, 0, &kSleep);
  return flag.load(std::memory_order_acquire);
}

}  // namespace streamoverlap::host
