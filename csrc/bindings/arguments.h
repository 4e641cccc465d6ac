// What tensors an op takes. Errors name the argument, what it was and what was expected.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "scaling.h"

namespace streamoverlap {

// Of sizes of a product of 8-bit floats, and of where its factors begin.
inline constexpr std::int64_t kFactorUnit = 16;

std::string dtype_name(at::ScalarType);
std::string dtype_name(const at::Tensor&);
// Of one of `count` tensors.
std::string label(const char* argument, std::size_t index, std::size_t count);

// x of [rows, K] or [s, b, K]. Any strides: what is not row-major is copied once, as documented.
at::Tensor matrix_input(const at::Tensor& x, const std::optional<Scaling>&);
at::Tensor plain_input(const at::Tensor& x);
void check_weight(const at::Tensor& weight, const std::string& argument, const at::Tensor& x, bool scaled);
// Returns it contiguous.
at::Tensor check_bias(const at::Tensor& bias, const std::string& argument, const at::Tensor& x,
                      const std::optional<Scaling>&, std::int64_t n);
// Of x and weights that have passed the checks.
void check_scaling(const Scaling&, const at::Tensor& x, const std::vector<at::Tensor>& weights);
void check_divisible(const at::Tensor& x, int world);

// How a BLAS reads a weight that has passed the checks.
struct LeadingDimension {
  std::int64_t stride;  // elements between rows, or columns
  bool row_major;
};
LeadingDimension leading_dimension(const at::Tensor& weight);

}  // namespace streamoverlap
