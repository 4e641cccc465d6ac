#pragma once

#include "plan.h"

namespace streamoverlap::plan {

Plan all_reduce_direct(const Spec&, int rank);
Plan all_reduce_ring(const Spec&, int rank);

}  // namespace streamoverlap::plan
