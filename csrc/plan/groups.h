// Calls of several groups that share processes: can they wait for each other for ever?
#pragma once

#include <vector>

#include "check.h"

namespace streamoverlap::plan {

struct GroupCall {
  std::vector<Plan> plans;   // by rank of the group; each without faults of its own
  std::vector<int> members;  // members[r]: the process that is rank r; equal members are one group, with one slot
};

// orders[p]: the calls of process p in the order in which it makes them, as indices of `calls`; empty: as listed. A
// process makes a call after the last one has ended on its main stream. Under the three models of check().
std::vector<Fault> check_groups(const std::vector<GroupCall>& calls, std::vector<std::vector<int>> orders = {});

}  // namespace streamoverlap::plan
