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
  explicit HostCompute(std::shared_ptr<const Problem> problem);

  void gemm(const plan::Op& op, Block a, const Block* scales, const Block* c, Block d) override;
  void quantise(const plan::Op& op, Block a, Block packed) override;
  void reduce(const plan::Op& op, const std::vector<Block>& terms, Block sum) override;

 private:
  at::Tensor matrix(const Block& block, at::ScalarType dtype) const;
  at::Tensor result(const Block& block) const { return matrix(block, problem_.out_dtype()); }
  std::pair<at::Tensor, at::Tensor> packed(const Block& block) const;
  void scaled_product(std::size_t i, const at::Tensor& x, const Block& scales, const Block* c, bool bias,
                      at::Tensor out) const;

  const std::shared_ptr<const Problem> owner_;
  const Problem& problem_;
  std::vector<at::Tensor> wide_weights_;  // of 8-bit floats, in float32
};

}  // namespace streamoverlap
