// Scales of a product of 8-bit floats, as torch._scaled_mm takes them: y = (x * scale_x) (weight * scale_weight)^T.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <string>
#include <vector>

namespace streamoverlap {

struct Scaling {
  at::Tensor x;                     // float32: one element, or one a row of x
  std::vector<at::Tensor> weights;  // float32, of each weight likewise
  at::ScalarType out_dtype = at::ScalarType::BFloat16;
  bool fast_accumulation = false;

  // Of arguments that have passed the checks. A weight has 16 rows or more, or none, so that its scale tells.
  bool row_wise() const { return weights[0].numel() != 1; }
  std::string text() const;  // for messages
};

}  // namespace streamoverlap
