// The control segments of all ranks, where this process's GPU can set and await their flags.
#pragma once

#include <cstddef>
#include <vector>

#include "../group/group.h"
#include "driver.h"

namespace streamoverlap::cuda {

class RegisteredControls {
 public:
  explicit RegisteredControls(const Group& group);

  CUdeviceptr word(int rank, std::size_t offset) const { return segments_[rank].device() + offset; }

 private:
  std::vector<Registration> segments_;
};

}  // namespace streamoverlap::cuda
