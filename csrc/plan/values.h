// Follows every shard and partial through the ops: each must arrive, and be summed, exactly once.
#pragma once

#include <vector>

#include "graph.h"
#include "report.h"

namespace streamoverlap::plan {

// `order`: all nodes, each after what it follows.
void check_values(const Graph&, const std::vector<int>& order, Report&);

}  // namespace streamoverlap::plan
