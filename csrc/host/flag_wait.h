// Flags between CPU threads of any process: acquire/release, and a futex to sleep on.
#pragma once

#include <chrono>
#include <cstdint>

#include "../group/layout.h"

namespace streamoverlap::host {

void set_flag(Word& flag, std::uint32_t value);

// Returns the value of `flag` once it is not 0, or 0 after a while, so that the caller can look at the abort word.
std::uint32_t wait_nonzero(const Word& flag);

}  // namespace streamoverlap::host
