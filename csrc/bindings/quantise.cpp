#include "quantise.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <limits>
#include <vector>

#ifdef STREAMOVERLAP_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "../cuda/quantise.h"
#endif

namespace streamoverlap {
namespace {

constexpr float kLargest = 448;  // of float8_e4m3fn

std::pair<at::Tensor, at::Tensor> on_cpu(const at::Tensor& rows) {
  const at::Tensor wide = rows.to(at::kFloat).contiguous();
  const at::Tensor finite = wide.isfinite();
  const at::Tensor largest = wide.abs().masked_fill_(finite.logical_not(), 0).amax(-1, /*keepdim=*/true);
  const at::Tensor scales = largest.div(kLargest).clamp_min_(std::numeric_limits<float>::min());
  at::Tensor values = wide.mul(scales.reciprocal());
  values.masked_fill_(finite.logical_not(), std::numeric_limits<float>::quiet_NaN());
  return {values.to(at::kFloat8_e4m3fn), scales};
}

#ifdef STREAMOVERLAP_WITH_CUDA
std::pair<at::Tensor, at::Tensor> on_cuda(const at::Tensor& given) {
  const c10::cuda::CUDAGuard guard(given.device());
  const at::Tensor rows = given.resolve_neg().contiguous();
  std::vector<std::int64_t> sizes = rows.sizes().vec();
  const at::Tensor values = at::empty(sizes, rows.options().dtype(at::kFloat8_e4m3fn));
  const std::int64_t length = sizes.back();
  sizes.back() = 1;
  const at::Tensor scales = at::empty(sizes, rows.options().dtype(at::kFloat));
  cuda::quantise(rows.const_data_ptr(), rows.numel(), length, {values.data_ptr(), length, scales.data_ptr(), 4},
                 rows.scalar_type(), c10::cuda::getCurrentCUDAStream().stream());
  return {values, scales};
}
#endif

}  // namespace

std::pair<at::Tensor, at::Tensor> quantise_rows(const at::Tensor& rows) {
  const at::NoGradGuard no_grad;
  const at::ScalarType dtype = rows.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf, "x has dtype ", dtype,
                   "; expected float32, bfloat16 or float16");
  TORCH_CHECK_VALUE(rows.dim() > 0 && rows.size(-1) > 0, "x has shape ", rows.sizes(),
                    "; expected at least one column");
#ifdef STREAMOVERLAP_WITH_CUDA
  if (rows.is_cuda()) return on_cuda(rows);
#endif
  return on_cpu(rows);
}

}  // namespace streamoverlap
