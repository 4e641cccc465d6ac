#include "test_hook.h"

#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <thread>

namespace streamoverlap {

std::function<void(const plan::Op&, std::uint64_t)> make_hook(const TestHook& hook) {
  const auto ops = std::make_shared<std::atomic<std::int64_t>>(0);
  return [hook, ops](const plan::Op& op, std::uint64_t) {
    const std::int64_t number = ops->fetch_add(1);
    if (number == hook.kill_at) raise(SIGKILL);
    if (number == hook.stop_at) raise(SIGSTOP);
    const std::string stream = plan::name(op.stream);
    const bool chosen =
        hook.streams.empty() || std::find(hook.streams.begin(), hook.streams.end(), stream) != hook.streams.end();
    if (!chosen || hook.max_delay_ms <= 0) return;
    std::minstd_rand random(static_cast<unsigned>(hook.seed * 1000003 + number));
    random.discard(3);
    const double delay = hook.max_delay_ms * std::generate_canonical<double, 32>(random);
    std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(delay));
  };
}

}  // namespace streamoverlap
