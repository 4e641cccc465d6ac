// What counting says of flags: set and cleared equally often in each call, every credit taken and returned once.
#pragma once

#include "graph.h"
#include "report.h"

namespace streamoverlap::plan {

void check_flags(const Graph&, Report&);

}  // namespace streamoverlap::plan
