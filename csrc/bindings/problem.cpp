#include "problem.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <string>

#include "arguments.h"

namespace streamoverlap {
namespace {

using plan::Buffer;

View& view(Call& call, Buffer buffer) { return call.views[static_cast<int>(buffer)]; }

std::byte* data(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.data_ptr()); }

std::int64_t size_of(at::ScalarType dtype) { return static_cast<std::int64_t>(c10::elementSize(dtype)); }

at::Tensor aligned(const at::Tensor& tensor) {
  const bool fits = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % kFactorUnit == 0;
  return fits ? tensor : tensor.clone();
}

std::vector<std::int64_t> with_sizes(const at::Tensor& x, std::int64_t first, std::int64_t last) {
  std::vector<std::int64_t> sizes = x.sizes().vec();
  sizes.front() = first;
  sizes.back() = last;
  return sizes;
}

std::int64_t rows_of(const at::Tensor& x) { return x.size(-1) == 0 ? 0 : x.numel() / x.size(-1); }

// Every rank sums a shard of ceil(rows / world) rows; the last ones may have fewer, or none.
void share_rows(Problem& problem, std::int64_t rows, int world) {
  problem.shard_rows = (rows + world - 1) / world;
  problem.call.missing_rows = world * problem.shard_rows - rows;
}

void set_view(Problem& problem, Buffer buffer, std::int64_t row_bytes, bool all_shards) {
  view(problem.call, buffer) = {nullptr, row_bytes, all_shards ? row_bytes * problem.shard_rows : 0};
}

// Of the rows of x; they lie apart from each other as those in a slot do.
void set_scale_views(Problem& problem, bool all_shards, bool exchanged) {
  if (!problem.scaling) return;
  view(problem.call, Buffer::Scales) = {nullptr, kScaleBytes, all_shards ? scales_stride(problem.shard_rows) : 0};
  if (exchanged) set_view(problem, Buffer::SlotScales, kScaleBytes, true);
}

// Partials travel in fewer bits, each row with a float32 scale.
void pack_partials(Problem& problem, bool quantised) {
  if (!quantised) return;
  TORCH_CHECK_TYPE(problem.out_dtype() != at::kDouble, "x has dtype ", dtype_name(problem.x),
                   " but wire is 'fp8'; expected float32, float16 or bfloat16, or no wire");
  problem.call.pack(size_of(problem.out_dtype()));
}

Problem summed_product(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       const std::optional<Scaling>& scaling) {
  Problem problem;
  problem.x = matrix_input(x, scaling);
  problem.scaling = scaling;
  check_weight(weight, "weight", x, scaling.has_value());
  if (scaling) check_scaling(*scaling, x, {weight});
  problem.biases.resize(1);
  if (bias) problem.biases[0] = check_bias(*bias, "bias", x, scaling, weight.size(0));
  problem.weights = {weight};
  return problem;
}

void set_product_views(Problem& problem, bool all_shards_out, bool quantised) {
  const at::Tensor& x = problem.x;
  const std::int64_t n_bytes = problem.weights[0].size(0) * size_of(problem.out_dtype());
  set_scale_views(problem, true, false);
  set_view(problem, Buffer::Input, x.size(-1) * static_cast<std::int64_t>(x.element_size()), true);
  set_view(problem, Buffer::Slot, n_bytes, true);
  set_view(problem, Buffer::Scratch, n_bytes, true);
  set_view(problem, Buffer::Output, n_bytes, all_shards_out);
  pack_partials(problem, quantised);
  problem.call.shard_rows = problem.shard_rows;
}

}  // namespace

void Problem::allocate() {
  x = x.resolve_neg().contiguous();
  if (scaling) lay_out_scales();
  view(call, Buffer::Input).base = data(x);
  const at::TensorOptions results = x.options().dtype(out_dtype());
  for (const std::vector<std::int64_t>& sizes : output_sizes) outputs.push_back(at::empty(sizes, results));
  view(call, Buffer::Output).base = data(outputs[0]);
  if (!gathered_sizes.empty()) {
    gathered = at::empty(gathered_sizes, x.options());
    view(call, Buffer::Gathered).base = data(gathered);
  }
  if (copies_input) {
    copied = at::empty_like(x);
    view(call, Buffer::Copied).base = data(copied);
  }
}

// As products of 8-bit floats read them: the scales of weights as vectors, those of x a vector for each shard. One
// scale of all of x becomes one a row, since they travel with the rows, and another rank may have another scale.
void Problem::lay_out_scales() {
  x = aligned(x);
  for (at::Tensor& scale : scaling->weights) scale = aligned(scale.reshape({-1}).contiguous());
  const std::int64_t rows = rows_of(x);
  at::Tensor scales = scaling->x.reshape({-1});
  if (!scaling->row_wise()) scales = scales.expand({rows});
  const std::int64_t apart = view(call, Buffer::Scales).shard_bytes / kScaleBytes;
  if (apart != shard_rows && apart != 0) {
    const std::int64_t shards = (rows + shard_rows - 1) / shard_rows;
    scales = at::constant_pad_nd(scales, {0, shards * shard_rows - rows}).view({shards, shard_rows});
    scales = at::constant_pad_nd(scales, {0, apart - shard_rows});
  }
  scaling->x = aligned(scales.contiguous());
  view(call, Buffer::Scales).base = data(scaling->x);
}

// Only what is exchanged: in an all-gather-GEMM each rank may have another N, in a GEMM-reduce-scatter another K.
std::vector<std::int64_t> Problem::shape_key() const {
  std::vector<std::int64_t> key = {static_cast<std::int64_t>(x.scalar_type()), shard_rows, call.missing_rows,
                                   call.row_bytes(Buffer::Slot)};
  if (scaling) key.insert(key.end(), {static_cast<std::int64_t>(scaling->out_dtype), scaling->row_wise()});
  return key;
}

std::string Problem::description() const {
  return c10::str("x of ", x.sizes(), ", ", dtype_name(x)) + (scaling ? ", " + scaling->text() : "");
}

std::string Scaling::text() const {
  return std::string(row_wise() ? "row" : "tensor") + "-wise scales, to " + dtype_name(out_dtype);
}

Problem all_gather_gemm_problem(const at::Tensor& x, const Tensors& weights, const OptionalTensors& biases,
                                bool return_gathered, int world, const std::optional<Scaling>& scaling) {
  Problem problem;
  problem.x = matrix_input(x, scaling);
  problem.scaling = scaling;
  TORCH_CHECK_VALUE(!weights.empty(), "weight is an empty list; expected at least one tensor");
  TORCH_CHECK_VALUE(biases.empty() || biases.size() == weights.size(), "bias has ", biases.size(),
                    " tensors; expected one for each of the ", weights.size(), " weights");
  problem.biases.resize(weights.size());
  for (std::size_t i = 0; i < weights.size(); ++i) {
    check_weight(weights[i], label("weight", i, weights.size()), x, scaling.has_value());
    if (!biases.empty() && biases[i]) {
      problem.biases[i] = check_bias(*biases[i], label("bias", i, weights.size()), x, scaling, weights[i].size(0));
    }
  }
  if (scaling) check_scaling(*scaling, x, weights);
  problem.weights = weights;
  problem.shard_rows = rows_of(x);
  for (const at::Tensor& weight : weights) {
    problem.output_sizes.push_back(with_sizes(x, x.size(0) * world, weight.size(0)));
  }
  const std::int64_t k_bytes = x.size(-1) * x.element_size();
  set_view(problem, Buffer::Input, k_bytes, false);
  set_view(problem, Buffer::Slot, k_bytes, true);
  set_scale_views(problem, false, true);
  const std::int64_t n_bytes = weights[0].size(0) * size_of(problem.out_dtype());
  set_view(problem, Buffer::Output, n_bytes, true);
  if (return_gathered) {
    problem.gathered_sizes = with_sizes(x, x.size(0) * world, x.size(-1));
    set_view(problem, Buffer::Gathered, k_bytes, true);
  }
  problem.call.shard_rows = problem.shard_rows;
  return problem;
}

Problem gemm_reduce_scatter_problem(const at::Tensor& x, const at::Tensor& weight,
                                    const std::optional<at::Tensor>& bias, int world,
                                    const std::optional<Scaling>& scaling, bool quantised) {
  Problem problem = summed_product(x, weight, bias, scaling);
  check_divisible(x, world);
  problem.shard_rows = rows_of(x) / world;
  problem.output_sizes.push_back(with_sizes(x, x.size(0) / world, weight.size(0)));
  set_product_views(problem, false, quantised);
  return problem;
}

Problem gemm_all_reduce_problem(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                                int world, const std::optional<Scaling>& scaling, bool quantised) {
  Problem problem = summed_product(x, weight, bias, scaling);
  share_rows(problem, rows_of(x), world);
  problem.output_sizes.push_back(with_sizes(x, x.size(0), weight.size(0)));
  set_product_views(problem, true, quantised);
  return problem;
}

Problem all_gather_problem(const at::Tensor& x, int world) {
  Problem problem;
  problem.x = plain_input(x);
  std::vector<std::int64_t> sizes = x.sizes().vec();
  sizes[0] *= world;
  problem.output_sizes.push_back(sizes);
  problem.shard_rows = x.numel() == 0 ? 0 : x.size(0);
  const std::int64_t row_bytes = problem.shard_rows == 0 ? 0 : x.numel() / x.size(0) * x.element_size();
  set_view(problem, Buffer::Input, row_bytes, false);
  set_view(problem, Buffer::Slot, row_bytes, true);
  set_view(problem, Buffer::Output, row_bytes, true);
  problem.call.shard_rows = problem.shard_rows;
  return problem;
}

Problem reduce_scatter_problem(const at::Tensor& x, int world, bool quantised, bool copy_input) {
  Problem problem;
  problem.x = plain_input(x);
  check_divisible(x, world);
  std::vector<std::int64_t> sizes = x.sizes().vec();
  sizes[0] /= world;
  problem.output_sizes.push_back(sizes);
  problem.shard_rows = x.numel() == 0 ? 0 : sizes[0];
  const std::int64_t row_bytes = problem.shard_rows == 0 ? 0 : x.numel() / x.size(0) * x.element_size();
  set_view(problem, Buffer::Input, row_bytes, true);
  set_view(problem, Buffer::Slot, row_bytes, true);
  set_view(problem, Buffer::Scratch, row_bytes, true);
  set_view(problem, Buffer::Output, row_bytes, false);
  pack_partials(problem, quantised);
  if (copy_input) {
    problem.copies_input = true;
    set_view(problem, Buffer::Copied, row_bytes, true);
  }
  problem.call.shard_rows = problem.shard_rows;
  return problem;
}

Problem all_reduce_problem(const at::Tensor& x, int world, bool quantised) {
  Problem problem;
  problem.x = plain_input(x);
  problem.output_sizes.push_back(x.sizes().vec());
  const std::int64_t rows = x.numel() == 0 ? 0 : x.size(0);
  share_rows(problem, rows, world);
  const std::int64_t row_bytes = rows == 0 ? 0 : x.numel() / rows * x.element_size();
  set_view(problem, Buffer::Input, row_bytes, true);
  set_view(problem, Buffer::Slot, row_bytes, true);
  set_view(problem, Buffer::Output, row_bytes, true);
  pack_partials(problem, quantised);
  problem.call.shard_rows = problem.shard_rows;
  return problem;
}

}  // namespace streamoverlap
