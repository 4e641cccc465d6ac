// Removes waits (and then records) without which the checker still finds no fault.
#pragma once

#include <vector>

#include "plan.h"

namespace streamoverlap::plan {

// `plans` of all ranks of one call, free of faults. Removes the same ops on every rank, so plans stay symmetric.
// Throws std::invalid_argument where the checker finds a fault.
std::vector<Plan> prune(std::vector<Plan> plans);

// The same, but only of what each rank's own order implies: nearly all, in a small part of the time. Asks nobody, so
// `plans` must be free of faults.
std::vector<Plan> prune_implied(const std::vector<Plan>& plans);

}  // namespace streamoverlap::plan
