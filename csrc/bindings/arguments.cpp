#include "arguments.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/Exception.h>

namespace streamoverlap {
namespace {

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

bool has_8_bits(at::ScalarType dtype) { return dtype == at::kFloat8_e4m3fn || dtype == at::kFloat8_e5m2; }

// What all arguments must be, apart from their dtype.
void check_kind(const at::Tensor& tensor, const std::string& argument) {
  TORCH_CHECK_TYPE(
      !tensor.key_set().has_any(kWrappers), argument,
      " is a tensor that wraps or stands for others (such as a DTensor, a FakeTensor, a nested tensor, or "
      "any under torch.func); expected a plain tensor with memory of its own (of a DTensor its to_local())");
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, argument, " has layout ", tensor.layout(),
                   "; expected a dense (strided) tensor");
  check_memory(tensor, argument);
  TORCH_CHECK(!(at::GradMode::is_enabled() && tensor.requires_grad()), argument,
              " requires grad, but this function records no gradient; expected a detached tensor or a call under "
              "torch.no_grad()");
}

void check_tensor(const at::Tensor& tensor, const std::string& argument) {
  const at::ScalarType dtype = tensor.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf,
                   argument, " has dtype ", dtype_name(tensor), "; expected float32, float64, bfloat16 or float16");
  check_kind(tensor, argument);
}

void check_device(const at::Tensor& tensor, const std::string& argument, const at::Tensor& x) {
  TORCH_CHECK_VALUE(tensor.device() == x.device(), argument, " is on ", tensor.device(), "; expected the device of x, ",
                    x.device());
}

// `wanted`: the message before that dtype.
void check_dtype(const at::Tensor& tensor, const std::string& argument, at::ScalarType expected,
                 const char* wanted = "; expected ") {
  TORCH_CHECK_TYPE(tensor.scalar_type() == expected, argument, " has dtype ", dtype_name(tensor), wanted,
                   dtype_name(expected));
}

void check_like(const at::Tensor& tensor, const std::string& argument, const at::Tensor& x) {
  check_tensor(tensor, argument);
  check_dtype(tensor, argument, x.scalar_type(), "; expected that of x, ");
  check_device(tensor, argument, x);
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

// Dense along one dimension, and rows that do not overlap. The stride of a dimension of size 1 says nothing.
bool dense_rows(std::int64_t rows, std::int64_t columns, std::int64_t row_stride, std::int64_t column_stride) {
  return (columns <= 1 || column_stride == 1) && (rows <= 1 || row_stride >= columns);
}

bool is_row_major(const at::Tensor& matrix) {
  return dense_rows(matrix.size(0), matrix.size(1), matrix.stride(0), matrix.stride(1));
}

// What cuBLASLt's kernels for Hopper take.
void check_8_bit_weight(const at::Tensor& weight, const std::string& argument) {
  TORCH_CHECK_VALUE(weight.size(0) % kFactorUnit == 0, argument, ".shape[0] is ", weight.size(0),
                    "; expected a multiple of ", kFactorUnit, ", as products of float8 need");
  TORCH_CHECK_VALUE(is_row_major(weight) || weight.numel() == 0, argument, " has shape ", weight.sizes(),
                    " and strides ", weight.strides(),
                    "; expected a row-major matrix, as products of float8 need; call .contiguous() on it");
  const bool aligned = reinterpret_cast<std::uintptr_t>(weight.const_data_ptr()) % kFactorUnit == 0;
  TORCH_CHECK_VALUE(aligned && leading_dimension(weight).stride % kFactorUnit == 0, argument, " has strides ",
                    weight.strides(), " and begins at ", weight.const_data_ptr(), "; expected rows at multiples of ",
                    kFactorUnit, " bytes, as products of float8 need; call .clone() on it");
}

void check_scale(const at::Tensor& scale, const std::string& argument, const at::Tensor& x) {
  check_kind(scale, argument);
  check_dtype(scale, argument, at::kFloat);
  check_device(scale, argument, x);
}

}  // namespace

std::string dtype_name(at::ScalarType dtype) { return c10::str("torch.", c10::getDtypeNames(dtype).first); }

std::string dtype_name(const at::Tensor& tensor) { return dtype_name(tensor.scalar_type()); }

std::string label(const char* argument, std::size_t index, std::size_t count) {
  return count == 1 ? argument : std::string(argument) + "[" + std::to_string(index) + "]";
}

at::Tensor matrix_input(const at::Tensor& x, const std::optional<Scaling>& scaling) {
  if (scaling) {
    TORCH_CHECK_TYPE(has_8_bits(x.scalar_type()), "x has dtype ", dtype_name(x),
                     " but scale_x is given; expected float8_e4m3fn or float8_e5m2, or no scales");
    check_kind(x, "x");
  } else {
    TORCH_CHECK_TYPE(!has_8_bits(x.scalar_type()), "x has dtype ", dtype_name(x),
                     " but scale_x is None; expected scale_x and scale_weight, or another dtype");
    check_tensor(x, "x");
  }
  check_no_trace();
  TORCH_CHECK_VALUE(x.dim() == 2 || x.dim() == 3, "x has shape ", x.sizes(),
                    "; expected 2 dimensions [rows, K] or 3 dimensions [s, b, K]");
  TORCH_CHECK_VALUE(x.size(-1) > 0, "x has shape ", x.sizes(), "; expected at least one column");
  TORCH_CHECK_VALUE(!scaling || x.size(-1) % kFactorUnit == 0, "x.shape[-1] is ", x.size(-1),
                    "; expected a multiple of ", kFactorUnit, ", as products of float8 need");
  return x;
}

at::Tensor plain_input(const at::Tensor& x) {
  check_tensor(x, "x");
  check_no_trace();
  TORCH_CHECK_VALUE(x.dim() >= 1, "x is a scalar; expected at least 1 dimension, of which the first is exchanged");
  return x;
}

void check_weight(const at::Tensor& weight, const std::string& argument, const at::Tensor& x, bool scaled) {
  if (scaled) {
    check_kind(weight, argument);
    check_dtype(weight, argument, at::kFloat8_e4m3fn);
    check_device(weight, argument, x);
  } else {
    check_like(weight, argument, x);
  }
  TORCH_CHECK_VALUE(weight.dim() == 2, argument, " has shape ", weight.sizes(), "; expected 2 dimensions [N, K]");
  TORCH_CHECK_VALUE(!weight.is_neg(), argument, " is a lazily negated view; expected its values: call .resolve_neg()");
  const std::int64_t k = x.size(-1);
  TORCH_CHECK_VALUE(weight.size(1) == k, argument, ".shape[1] is ", weight.size(1), " but x.shape[-1] is ", k,
                    "; expected them equal");
  TORCH_CHECK_VALUE(is_row_major(weight) || is_row_major(weight.t()) || weight.numel() == 0, argument, " has shape ",
                    weight.sizes(), " and strides ", weight.strides(),
                    "; expected a row-major or column-major matrix (one stride 1, the other at least the size of that "
                    "dimension); call .contiguous() on it");
  if (scaled) check_8_bit_weight(weight, argument);
}

at::Tensor check_bias(const at::Tensor& bias, const std::string& argument, const at::Tensor& x,
                      const std::optional<Scaling>& scaling, std::int64_t n) {
  check_tensor(bias, argument);
  check_dtype(bias, argument, scaling ? scaling->out_dtype : x.scalar_type(),
              scaling ? "; expected out_dtype, " : "; expected that of x, ");
  check_device(bias, argument, x);
  TORCH_CHECK_VALUE(bias.dim() == 1 && bias.size(0) == n, argument, " has shape ", bias.sizes(), "; expected [", n,
                    "], one value a row of weight");
  return bias.resolve_neg().contiguous();
}

void check_scaling(const Scaling& scaling, const at::Tensor& x, const std::vector<at::Tensor>& weights) {
  const at::ScalarType out = scaling.out_dtype;
  TORCH_CHECK_TYPE(out == at::kBFloat16 || out == at::kHalf || out == at::kFloat, "out_dtype is ", dtype_name(out),
                   "; expected bfloat16, float16 or float32");
  TORCH_CHECK_VALUE(scaling.weights.size() == weights.size(), "scale_weight has ", scaling.weights.size(),
                    " tensors; expected one for each of the ", weights.size(), " weights");
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const std::string argument = label("scale_weight", i, weights.size());
    const at::Tensor& scale = scaling.weights[i];
    check_scale(scale, argument, x);
    const std::int64_t n = weights[i].size(0);
    const bool rows = scale.sizes() == at::IntArrayRef({1, n}) || scale.sizes() == at::IntArrayRef({n, 1});
    TORCH_CHECK_VALUE(rows || scale.numel() == 1, argument, " has shape ", scale.sizes(),
                      "; expected one element, or [1, ", n, "] or [", n, ", 1], one value a row of weight");
    TORCH_CHECK_VALUE((scale.numel() != 1) == scaling.row_wise(), argument, " has shape ", scale.sizes(),
                      "; expected all of scale_weight to be tensor-wise, or all row-wise");
  }
  check_scale(scaling.x, "scale_x", x);
  std::vector<std::int64_t> rows = x.sizes().vec();
  rows.back() = 1;
  if (scaling.row_wise()) {
    TORCH_CHECK_VALUE(scaling.x.sizes() == at::IntArrayRef(rows), "scale_x has shape ", scaling.x.sizes(),
                      "; expected ", at::IntArrayRef(rows), ", one value a row of x, as scale_weight is row-wise");
  } else {
    TORCH_CHECK_VALUE(scaling.x.numel() == 1, "scale_x has shape ", scaling.x.sizes(),
                      "; expected one element, as scale_weight has one");
  }
}

void check_divisible(const at::Tensor& x, int world) {
  TORCH_CHECK_VALUE(x.size(0) % world == 0, "x.shape[0] is ", x.size(0), "; expected a multiple of the group's ", world,
                    " ranks");
}

LeadingDimension leading_dimension(const at::Tensor& weight) {
  if (is_row_major(weight)) return {weight.size(0) <= 1 ? weight.size(1) : weight.stride(0), true};
  return {weight.size(1) <= 1 ? weight.size(0) : weight.stride(1), false};
}

}  // namespace streamoverlap
