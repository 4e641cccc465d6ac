#pragma once

#include "plan.h"

namespace streamoverlap::plan {

Plan gather_direct(const Spec&, int rank);
Plan gather_ring(const Spec&, int rank);

}  // namespace streamoverlap::plan
