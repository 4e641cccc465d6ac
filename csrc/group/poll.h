// What a thread that waits calls now and then.
#pragma once

#include <chrono>
#include <functional>

namespace streamoverlap {

// May throw, which ends the wait: the user has pressed Ctrl-C, the group has failed.
using Poll = std::function<void()>;
inline constexpr std::chrono::milliseconds kPollInterval{50};

}  // namespace streamoverlap
