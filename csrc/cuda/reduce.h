// Kernels that sum partials, and a bias where cuBLASLt cannot add it.
#pragma once

#include <c10/core/ScalarType.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "../plan/plan.h"

namespace streamoverlap::cuda {

struct Terms {
  const void* data[plan::kMaxWorld];
  int count = 0;  // at least 1
};

// sum[i] = terms[0][i] + terms[1][i] + ..., in this order, in fp32 (float64: fp64), rounded once. `sum` may be one of
// the terms.
void reduce(const Terms& terms, void* sum, std::int64_t elements, at::ScalarType dtype, cudaStream_t stream);
// Loads what reduce() may launch: which kernel that is depends on where data lies, call by call.
void load_reduce(at::ScalarType dtype);

// d[row, :] = bias (+ c[row, :]) for row-major d and c of m rows and n columns. c may be null, or d.
void fill_bias_rows(void* d, std::int64_t ldd, const void* c, std::int64_t ldc, const void* bias, std::int64_t m,
                    std::int64_t n, at::ScalarType dtype, cudaStream_t stream);

}  // namespace streamoverlap::cuda
