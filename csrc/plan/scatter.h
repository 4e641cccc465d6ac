#pragma once

#include "plan.h"

namespace streamoverlap::plan {

Plan scatter_direct(const Spec&, int rank);
Plan scatter_ring(const Spec&, int rank);

}  // namespace streamoverlap::plan
