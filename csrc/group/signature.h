// What ranks must agree on in a call, as one 32-bit word: the value of its Full flags.
#pragma once

#include <cstdint>
#include <vector>

#include "../plan/plan.h"

namespace streamoverlap {

// `shape`: whatever else must be equal on all ranks, in a fixed order: dtype, rows of a shard, K, N of every rank, ...
// Never 0, and the two lowest bits are clear (layout.h uses them).
std::uint32_t signature(const plan::Spec& spec, const std::vector<std::int64_t>& shape);

}  // namespace streamoverlap
