// GEMM and sum of the host executor, by ATen.
#pragma once

#include <vector>

#include "../host/executor.h"
#include "problem.h"

namespace streamoverlap {

class HostCompute : public host::Compute {
 public:
  explicit HostCompute(const Problem& problem) : problem_(problem) {}

  void gemm(const plan::Op& op, Block a, const Block* c, Block d) override;
  void reduce(const plan::Op& op, const std::vector<Block>& terms, Block sum) override;

 private:
  at::Tensor matrix(const Block& block) const;

  const Problem& problem_;  // outlives the call
};

}  // namespace streamoverlap
