// The flags that a rank's calls may wait for, so that they can be released after an abort. Outlives the executor where
// streams still wait.
#pragma once

#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "../group/group.h"

namespace streamoverlap::cuda {

class AwaitedFlags {
 public:
  // Flags of one signature add up.
  void add(std::uint32_t signature, const std::vector<plan::Flag>& flags);

  // Sets what this rank's running calls wait for. Called by the watchdog: calls nothing of CUDA.
  void release(const Group& group);

 private:
  std::mutex mutex_;  // never held over a call of CUDA
  std::unordered_map<std::uint32_t, std::vector<plan::Flag>> flags_;
};

}  // namespace streamoverlap::cuda
