// What can be said of an op by itself: everything that the later stages of the checker take for granted.
#pragma once

#include "graph.h"
#include "report.h"

namespace streamoverlap::plan {

void check_form(const Calls&, Report&);

}  // namespace streamoverlap::plan
