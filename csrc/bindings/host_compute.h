// GEMM and sum of the host executor, by ATen.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "../host/executor.h"
#include "problem.h"

namespace streamoverlap {

class HostCompute : public host::Compute {
 public:
  // Keeps the tensors: streams hold on to this until they have done with the call.
  explicit HostCompute(std::shared_ptr<const Problem> problem) : owner_(std::move(problem)), problem_(*owner_) {}

  void gemm(const plan::Op& op, Block a, const Block* c, Block d) override;
  void reduce(const plan::Op& op, const std::vector<Block>& terms, Block sum) override;

 private:
  at::Tensor matrix(const Block& block) const;

  const std::shared_ptr<const Problem> owner_;
  const Problem& problem_;
};

}  // namespace streamoverlap
