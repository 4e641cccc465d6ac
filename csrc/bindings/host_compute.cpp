#include "host_compute.h"

#include <ATen/core/grad_mode.h>

#include "quantise.h"

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

// Values and scales of packed rows.
std::pair<at::Tensor, at::Tensor> HostCompute::packed(const Block& block) const {
  const std::int64_t elements =
      problem_.call.packed_unit / static_cast<std::int64_t>(c10::elementSize(problem_.out_dtype()));
  const auto part = [&](std::int64_t offset, std::int64_t columns, at::ScalarType dtype) {
    const std::int64_t stride = block.row_bytes / static_cast<std::int64_t>(c10::elementSize(dtype));
    return at::from_blob(block.data + offset, {block.rows.count, columns}, {stride, 1},
                         problem_.x.options().dtype(dtype));
  };
  return {part(0, elements, at::kFloat8_e4m3fn), part(packed_scale_offset(elements), 1, at::kFloat)};
}

void HostCompute::quantise(const plan::Op&, Block a, Block to) {
  const at::NoGradGuard no_grad;
  const auto [values, scales] = packed(to);
  at::Tensor rows = result(a).flatten();
  rows = at::constant_pad_nd(rows, {0, values.numel() - rows.numel()}).view_as(values);
  const auto [quantised, of_rows] = quantise_rows(rows);
  values.copy_(quantised);
  scales.copy_(of_rows);
}

void HostCompute::reduce(const plan::Op&, const std::vector<Block>& terms, Block sum) {
  if (sum.rows.count == 0) return;
  const at::NoGradGuard no_grad;
  const at::ScalarType wide = problem_.out_dtype() == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor to = result(sum), total;
  for (const Block& block : terms) {
    at::Tensor term;
    if (block.packed) {
      const auto [values, scales] = packed(block);
      term = values.to(at::kFloat).mul_(scales).flatten().narrow(0, 0, to.numel()).view_as(to);
    } else {
      term = result(block);
    }
    total = total.defined() ? total.add_(term) : term.to(wide, /*non_blocking=*/false, /*copy=*/true);
  }
  to.copy_(total);
}

}  // namespace streamoverlap
