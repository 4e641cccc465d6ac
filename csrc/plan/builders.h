// Builders: a plan for every operation, algorithm and option. What each must hold to is in docs/plans.md.
#pragma once

#include <vector>

#include "plan.h"

namespace streamoverlap::plan {

// Throws std::invalid_argument naming the field, what it was and what was expected.
void validate(const Spec&);

Plan build(const Spec&, int rank);         // as written, unpruned
std::vector<Plan> build_all(const Spec&);  // build() for every rank

}  // namespace streamoverlap::plan
