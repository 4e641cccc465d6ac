#include "problem.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <string>

namespace streamoverlap {
namespace {

using plan::Buffer;

View& view(Call& call, Buffer buffer) { return call.views[static_cast<int>(buffer)]; }

std::byte* data(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.data_ptr()); }

std::string dtype_name(const at::Tensor& tensor) {
  return c10::str("torch.", c10::getDtypeNames(tensor.scalar_type()).first);
}

std::string label(const char* argument, std::size_t index, std::size_t count) {
  return count == 1 ? argument : std::string(argument) + "[" + std::to_string(index) + "]";
}

// Tensors whose memory, if they have any, is not what their sizes say: operators on them go elsewhere.
constexpr c10::DispatchKeySet kWrappers({
    c10::DispatchKey::Python,
    c10::DispatchKey::FuncTorchGradWrapper,
    c10::DispatchKey::FuncTorchBatched,
    c10::DispatchKey::Functionalize,
    c10::DispatchKey::NestedTensor,
    c10::DispatchKey::ZeroTensor,
});

void check_memory(const at::Tensor& tensor, const std::string& argument) {
  const std::size_t needed = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size(),
                                                              tensor.storage_offset());
  TORCH_CHECK_VALUE(tensor.numel() == 0 || tensor.storage().nbytes() >= needed, argument, " needs ", needed,
                    " bytes but its storage has ", tensor.storage().nbytes(), "; expected one that is large enough");
  TORCH_CHECK_TYPE(!tensor._fw_grad(0).defined(), argument,
                   " has a forward-mode gradient, which this function would drop; expected a tensor without");
}

void check_tensor(const at::Tensor& tensor, const std::string& argument) {
  TORCH_CHECK_TYPE(
      !tensor.key_set().has_any(kWrappers), argument,
      " is a tensor that wraps or stands for others (such as a DTensor, a FakeTensor, a nested tensor, or "
      "any under torch.func); expected a plain tensor with memory of its own (of a DTensor its to_local())");
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, argument, " has layout ", tensor.layout(),
                   "; expected a dense (strided) tensor");
  const at::ScalarType dtype = tensor.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf,
                   argument, " has dtype ", dtype_name(tensor), "; expected float32, float64, bfloat16 or float16");
  check_memory(tensor, argument);
  TORCH_CHECK(!(at::GradMode::is_enabled() && tensor.requires_grad()), argument,
              " requires grad, but this function records no gradient; expected a detached tensor or a call under "
              "torch.no_grad()");
}

void check_like(const at::Tensor& tensor, const std::string& argument, const at::Tensor& x) {
  check_tensor(tensor, argument);
  TORCH_CHECK_TYPE(tensor.scalar_type() == x.scalar_type(), argument, " has dtype ", dtype_name(tensor),
                   "; expected that of x, ", dtype_name(x));
  TORCH_CHECK_VALUE(tensor.device() == x.device(), argument, " is on ", tensor.device(), "; expected the device of x, ",
                    x.device());
}

// What records or replaces operators sees nothing of a call: a trace would have its result as a constant, and outputs
// without memory.
void check_no_trace() {
  using Mode = c10::impl::TorchDispatchModeKey;
  const c10::DispatchKeySet included = c10::impl::tls_local_dispatch_key_set().included_;
  bool traced = included.has(c10::DispatchKey::Tracer) || included.has(c10::DispatchKey::Functionalize) ||
                included.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
  for (const Mode mode : {Mode::FAKE, Mode::PROXY, Mode::FUNCTIONAL}) {
    traced = traced || c10::impl::TorchDispatchModeTLS::get_mode(mode).has_value();
  }
  TORCH_CHECK(!traced,
              "this function was called under torch.jit.trace, make_fx, FakeTensorMode or torch.func, which cannot "
              "record it; expected a call outside of them");
}

// x of [rows, K] or [s, b, K]. Any strides: what is not row-major is copied once, as documented.
at::Tensor matrix_input(const at::Tensor& x) {
  check_tensor(x, "x");
  check_no_trace();
  TORCH_CHECK_VALUE(x.dim() == 2 || x.dim() == 3, "x has shape ", x.sizes(),
                    "; expected 2 dimensions [rows, K] or 3 dimensions [s, b, K]");
  TORCH_CHECK_VALUE(x.size(-1) > 0, "x has shape ", x.sizes(), "; expected at least one column");
  return x;
}

at::Tensor plain_input(const at::Tensor& x) {
  check_tensor(x, "x");
  check_no_trace();
  TORCH_CHECK_VALUE(x.dim() >= 1, "x is a scalar; expected at least 1 dimension, of which the first is exchanged");
  return x;
}

// Dense along one dimension, and rows that do not overlap. The stride of a dimension of size 1 says nothing.
bool dense_rows(std::int64_t rows, std::int64_t columns, std::int64_t row_stride, std::int64_t column_stride) {
  return (columns <= 1 || column_stride == 1) && (rows <= 1 || row_stride >= columns);
}

bool is_row_major(const at::Tensor& matrix) {
  return dense_rows(matrix.size(0), matrix.size(1), matrix.stride(0), matrix.stride(1));
}

void check_weight(const at::Tensor& weight, const std::string& argument, const at::Tensor& x) {
  check_like(weight, argument, x);
  TORCH_CHECK_VALUE(weight.dim() == 2, argument, " has shape ", weight.sizes(), "; expected 2 dimensions [N, K]");
  TORCH_CHECK_VALUE(!weight.is_neg(), argument, " is a lazily negated view; expected its values: call .resolve_neg()");
  const std::int64_t k = x.size(-1);
  TORCH_CHECK_VALUE(weight.size(1) == k, argument, ".shape[1] is ", weight.size(1), " but x.shape[-1] is ", k,
                    "; expected them equal");
  TORCH_CHECK_VALUE(is_row_major(weight) || is_row_major(weight.t()) || weight.numel() == 0, argument, " has shape ",
                    weight.sizes(), " and strides ", weight.strides(),
                    "; expected a row-major or column-major matrix (one stride 1, the other at least the size of that "
                    "dimension); call .contiguous() on it");
}

at::Tensor check_bias(const at::Tensor& bias, const std::string& argument, const at::Tensor& x, std::int64_t n) {
  check_like(bias, argument, x);
  TORCH_CHECK_VALUE(bias.dim() == 1 && bias.size(0) == n, argument, " has shape ", bias.sizes(), "; expected [", n,
                    "], one value a row of weight");
  return bias.resolve_neg().contiguous();
}

void check_divisible(const at::Tensor& x, int world) {
  TORCH_CHECK_VALUE(x.size(0) % world == 0, "x.shape[0] is ", x.size(0), "; expected a multiple of the group's ", world,
                    " ranks");
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

Problem summed_product(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  Problem problem;
  problem.x = matrix_input(x);
  check_weight(weight, "weight", x);
  problem.biases.resize(1);
  if (bias) problem.biases[0] = check_bias(*bias, "bias", x, weight.size(0));
  problem.weights = {weight};
  return problem;
}

void set_product_views(Problem& problem, bool all_shards_out) {
  const at::Tensor& x = problem.x;
  const std::int64_t n_bytes = problem.weights[0].size(0) * static_cast<std::int64_t>(x.element_size());
  set_view(problem, Buffer::Input, x.size(-1) * static_cast<std::int64_t>(x.element_size()), true);
  set_view(problem, Buffer::Slot, n_bytes, true);
  set_view(problem, Buffer::Scratch, n_bytes, true);
  set_view(problem, Buffer::Output, n_bytes, all_shards_out);
  problem.call.shard_rows = problem.shard_rows;
}

}  // namespace

LeadingDimension leading_dimension(const at::Tensor& weight) {
  if (is_row_major(weight)) return {weight.size(0) <= 1 ? weight.size(1) : weight.stride(0), true};
  return {weight.size(1) <= 1 ? weight.size(0) : weight.stride(1), false};
}

void Problem::allocate() {
  x = x.resolve_neg().contiguous();
  view(call, Buffer::Input).base = data(x);
  for (const std::vector<std::int64_t>& sizes : output_sizes) outputs.push_back(at::empty(sizes, x.options()));
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

// Only what is exchanged: in an all-gather-GEMM each rank may have another N, in a GEMM-reduce-scatter another K.
std::vector<std::int64_t> Problem::shape_key() const {
  return {static_cast<std::int64_t>(x.scalar_type()), shard_rows, call.missing_rows, call.row_bytes(Buffer::Slot)};
}

std::string Problem::description() const { return c10::str("x of ", x.sizes(), ", ", dtype_name(x)); }

Problem all_gather_gemm_problem(const at::Tensor& x, const Tensors& weights, const OptionalTensors& biases,
                                bool return_gathered, int world) {
  Problem problem;
  problem.x = matrix_input(x);
  TORCH_CHECK_VALUE(!weights.empty(), "weight is an empty list; expected at least one tensor");
  TORCH_CHECK_VALUE(biases.empty() || biases.size() == weights.size(), "bias has ", biases.size(),
                    " tensors; expected one for each of the ", weights.size(), " weights");
  problem.biases.resize(weights.size());
  for (std::size_t i = 0; i < weights.size(); ++i) {
    check_weight(weights[i], label("weight", i, weights.size()), x);
    if (!biases.empty() && biases[i]) {
      problem.biases[i] = check_bias(*biases[i], label("bias", i, weights.size()), x, weights[i].size(0));
    }
  }
  problem.weights = weights;
  problem.shard_rows = rows_of(x);
  for (const at::Tensor& weight : weights) {
    problem.output_sizes.push_back(with_sizes(x, x.size(0) * world, weight.size(0)));
  }
  const std::int64_t k_bytes = x.size(-1) * x.element_size();
  set_view(problem, Buffer::Input, k_bytes, false);
  set_view(problem, Buffer::Slot, k_bytes, true);
  const std::int64_t n_bytes = weights[0].size(0) * x.element_size();
  set_view(problem, Buffer::Output, n_bytes, true);
  if (return_gathered) {
    problem.gathered_sizes = with_sizes(x, x.size(0) * world, x.size(-1));
    set_view(problem, Buffer::Gathered, k_bytes, true);
  }
  problem.call.shard_rows = problem.shard_rows;
  return problem;
}

Problem gemm_reduce_scatter_problem(const at::Tensor& x, const at::Tensor& weight,
                                    const std::optional<at::Tensor>& bias, int world) {
  Problem problem = summed_product(x, weight, bias);
  check_divisible(x, world);
  problem.shard_rows = rows_of(x) / world;
  problem.output_sizes.push_back(with_sizes(x, x.size(0) / world, weight.size(0)));
  set_product_views(problem, false);
  return problem;
}

Problem gemm_all_reduce_problem(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                                int world) {
  Problem problem = summed_product(x, weight, bias);
  share_rows(problem, rows_of(x), world);
  problem.output_sizes.push_back(with_sizes(x, x.size(0), weight.size(0)));
  set_product_views(problem, true);
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

Problem reduce_scatter_problem(const at::Tensor& x, int world, bool copy_input) {
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
  if (copy_input) {
    problem.copies_input = true;
    set_view(problem, Buffer::Copied, row_bytes, true);
  }
  problem.call.shard_rows = problem.shard_rows;
  return problem;
}

Problem all_reduce_problem(const at::Tensor& x, int world) {
  Problem problem;
  problem.x = plain_input(x);
  problem.output_sizes.push_back(x.sizes().vec());
  const std::int64_t rows = x.numel() == 0 ? 0 : x.size(0);
  share_rows(problem, rows, world);
  const std::int64_t row_bytes = rows == 0 ? 0 : x.numel() / rows * x.element_size();
  set_view(problem, Buffer::Input, row_bytes, true);
  set_view(problem, Buffer::Slot, row_bytes, true);
  set_view(problem, Buffer::Output, row_bytes, true);
  problem.call.shard_rows = problem.shard_rows;
  return problem;
}

}  // namespace streamoverlap
