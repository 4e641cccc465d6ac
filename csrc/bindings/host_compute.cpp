#include "host_compute.h"

#include <ATen/core/grad_mode.h>

namespace streamoverlap {

HostCompute::HostCompute(std::shared_ptr<const Problem> problem) : owner_(std::move(problem)), problem_(*owner_) {
  if (!problem_.scaling) return;
  const at::NoGradGuard no_grad;
  for (const at::Tensor& weight : problem_.weights) wide_weights_.push_back(weight.to(at::kFloat));
}

at::Tensor HostCompute::matrix(const Block& block, at::ScalarType dtype) const {
  const std::int64_t columns = block.row_bytes / static_cast<std::int64_t>(c10::elementSize(dtype));
  return at::from_blob(block.data, {block.rows.count, columns}, problem_.x.options().dtype(dtype));
}

// In float32, rounded once. Scales come after the product, as on CUDA, so that infinite ones give what they give there.
void HostCompute::scaled_product(std::size_t i, const at::Tensor& x, const Block& scales, const Block* c, bool bias,
                                 at::Tensor out) const {
  at::Tensor sum = at::mm(x.to(at::kFloat), wide_weights_[i].t());
  sum.mul_(matrix(scales, at::kFloat)).mul_(problem_.scaling->weights[i]);
  if (c != nullptr) sum.add_(result(*c));
  if (bias && problem_.biases[i]) sum.add_(*problem_.biases[i]);
  out.copy_(sum);
}

void HostCompute::gemm(const plan::Op& op, Block a, const Block* scales, const Block* c, Block d) {
  if (a.rows.count == 0) return;
  const at::NoGradGuard no_grad;
  const at::Tensor input = matrix(a, problem_.x.scalar_type());
  for (std::size_t i = 0; i < problem_.weights.size(); ++i) {
    Block block = d;
    if (i > 0) {
      // Further weights share the plan's one output region: the same rows, of their own output.
      const at::Tensor& output = problem_.outputs[i];
      block.row_bytes = output.size(-1) * static_cast<std::int64_t>(output.element_size());
      block.data =
          static_cast<std::byte*>(output.data_ptr()) + (d.shard * problem_.shard_rows + d.rows.begin) * block.row_bytes;
    }
    if (block.row_bytes == 0) continue;
    at::Tensor out = result(block);
    if (scales != nullptr) {
      scaled_product(i, input, *scales, c, op.bias, out);
      continue;
    }
    const at::Tensor weight = problem_.weights[i].t();
    if (c != nullptr) {
      at::addmm_out(out, result(*c), input, weight);
    } else {
      at::mm_out(out, input, weight);
    }
    if (op.bias && problem_.biases[i]) out.add_(*problem_.biases[i]);
  }
}

void HostCompute::reduce(const plan::Op&, const std::vector<Block>& terms, Block sum) {
  if (sum.rows.count == 0) return;
  const at::NoGradGuard no_grad;
  const at::ScalarType wide = problem_.out_dtype() == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor total = result(terms[0]).to(wide, /*non_blocking=*/false, /*copy=*/true);
  for (std::size_t i = 1; i < terms.size(); ++i) total.add_(result(terms[i]));
  result(sum).copy_(total);
}

}  // namespace streamoverlap
