#include "host_compute.h"

#include <ATen/core/grad_mode.h>

namespace streamoverlap {

at::Tensor HostCompute::matrix(const Block& block) const {
  const std::int64_t columns = block.row_bytes / static_cast<std::int64_t>(problem_.x.element_size());
  return at::from_blob(block.data, {block.rows.count, columns}, problem_.x.options());
}

void HostCompute::gemm(const plan::Op& op, Block a, const Block* c, Block d) {
  if (a.rows.count == 0) return;
  const at::NoGradGuard no_grad;
  const at::Tensor input = matrix(a);
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
    at::Tensor out = matrix(block);
    const at::Tensor weight = problem_.weights[i].t();
    if (c != nullptr) {
      at::addmm_out(out, matrix(*c), input, weight);
    } else {
      at::mm_out(out, input, weight);
    }
    if (op.bias && problem_.biases[i]) out.add_(*problem_.biases[i]);
  }
}

void HostCompute::reduce(const plan::Op&, const std::vector<Block>& terms, Block sum) {
  if (sum.rows.count == 0) return;
  const at::NoGradGuard no_grad;
  const at::ScalarType wide = problem_.x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor total = matrix(terms[0]).to(wide, /*non_blocking=*/false, /*copy=*/true);
  for (std::size_t i = 1; i < terms.size(); ++i) total.add_(matrix(terms[i]));
  matrix(sum).copy_(total);
}

}  // namespace streamoverlap
