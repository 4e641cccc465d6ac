// Rows of float8_e4m3fn, each with the scale that its elements share; see csrc/cuda/quantise.h.
#pragma once

#include <ATen/ATen.h>

#include <utility>

namespace streamoverlap {

// Of rows [..., n] of float32, float16 or bfloat16: values of that shape, scales [..., 1] of float32. The same bit for
// bit on CPU and CUDA.
std::pair<at::Tensor, at::Tensor> quantise_rows(const at::Tensor& rows);

}  // namespace streamoverlap
