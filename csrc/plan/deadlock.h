// Can the ranks wait for each other for ever? Under three models of how the ops of a rank are run.
#pragma once

#include <vector>

#include "clocks.h"
#include "graph.h"
#include "report.h"

namespace streamoverlap::plan {

// Streams independent. Reports a cycle, or returns all nodes in an order in which they can run.
std::vector<int> order_of(const Graph&, Report&);

// All streams of a rank folded into one queue, in issue order.
void check_one_queue(const Graph&, Report&);

// An adversary runs the ops of each rank one by one, in any order that its own edges allow (a CUDA graph may), and is
// stuck in an Await that is not yet notified. Both take the clocks of local edges.
bool runs_in_any_order(const Graph&, const Clocks& local);
void check_any_order(const Graph&, const Clocks& local, Report&);

}  // namespace streamoverlap::plan
