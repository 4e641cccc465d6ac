// What tests inject before the ops of a communicator: random delays, and the death or halt of the process.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "../plan/plan.h"

namespace streamoverlap {

struct TestHook {
  std::uint64_t seed = 0;
  double max_delay_ms = 0;
  std::vector<std::string> streams;  // empty: all
  std::int64_t kill_at = -1;         // SIGKILL before the op of this number, counted over all streams
  std::int64_t stop_at = -1;         // SIGSTOP likewise
};

std::function<void(const plan::Op&, std::uint64_t)> make_hook(const TestHook& hook);

}  // namespace streamoverlap
