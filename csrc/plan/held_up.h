// An async call must come to its end by itself: the caller may join at any time, or never.
#pragma once

#include "graph.h"
#include "report.h"

namespace streamoverlap::plan {

void check_held_up(const Graph&, Report&);

}  // namespace streamoverlap::plan
