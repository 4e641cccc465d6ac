// How much memory this process may still take.
#pragma once

#include <cstdint>

namespace streamoverlap {

// Bytes, without swap: the least that the machine and the process' cgroups leave. The highest value where nothing is
// known.
std::uint64_t available_memory();

}  // namespace streamoverlap
