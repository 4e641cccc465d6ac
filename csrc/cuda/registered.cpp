#include "registered.h"

namespace streamoverlap::cuda {

RegisteredControls::RegisteredControls(const Group& group) {
  segments_.reserve(group.world());
  for (int rank = 0; rank < group.world(); ++rank) {
    segments_.emplace_back(group.control(rank).base(), group.control_bytes());
  }
}

}  // namespace streamoverlap::cuda
