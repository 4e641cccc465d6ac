#include <algorithm>

#include "check.h"
#include "elements.cuh"
#include "reduce.h"

namespace streamoverlap::cuda {
namespace {

// All terms are read before the sum is written, so the sum may be one of them.
template <class T, int kWidth>
__device__ void sum_pack(const Terms& terms, void* sum, std::int64_t index) {
  using P = Pack<T, kWidth>;
  using Wide = decltype(widen(T{}));
  P pack = static_cast<const P*>(terms.data[0])[index];
  Wide total[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) total[j] = widen(pack.value[j]);
#pragma unroll 4
  for (int i = 1; i < terms.count; ++i) {
    pack = static_cast<const P*>(terms.data[i])[index];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) total[j] += widen(pack.value[j]);
  }
#pragma unroll
  for (int j = 0; j < kWidth; ++j) pack.value[j] = narrow<T>(total[j]);
  static_cast<P*>(sum)[index] = pack;
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    reduce_kernel(const __grid_constant__ Terms terms, void* sum, std::int64_t elements) {
  const std::int64_t first = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads;
  const std::int64_t packs = elements / kWidth;
  for (std::int64_t i = first; i < packs; i += stride) sum_pack<T, kWidth>(terms, sum, i);
  for (std::int64_t i = packs * kWidth + first; i < elements; i += stride) sum_pack<T, 1>(terms, sum, i);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    bias_kernel(T* d, std::int64_t ldd, const T* c, std::int64_t ldc, const T* bias, std::int64_t m, std::int64_t n) {
  const std::int64_t first = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t column = first; column < n; column += stride) {
    const auto value = widen(bias[column]);
    for (std::int64_t row = blockIdx.y; row < m; row += gridDim.y) {
      d[row * ldd + column] = narrow<T>(c ? widen(c[row * ldc + column]) + value : value);
    }
  }
}

}  // namespace

void reduce(const Terms& terms, void* sum, std::int64_t elements, at::ScalarType dtype, cudaStream_t stream) {
  if (elements == 0) return;
  const bool aligned = is_aligned(sum) && std::all_of(terms.data, terms.data + terms.count, is_aligned);
  with_type(dtype, [&](auto element) {
    using T = decltype(element);
    constexpr int kWidth = kAccess / sizeof(T);
    if (aligned) {
      reduce_kernel<T, kWidth><<<blocks_for(elements / kWidth), kThreads, 0, stream>>>(terms, sum, elements);
    } else {
      reduce_kernel<T, 1><<<blocks_for(elements), kThreads, 0, stream>>>(terms, sum, elements);
    }
  });
  STREAMOVERLAP_CHECK(cudaGetLastError());
}

void load_reduce(at::ScalarType dtype) {
  with_type(dtype, [](auto element) {
    using T = decltype(element);
    load(reduce_kernel<T, kAccess / sizeof(T)>);
    load(reduce_kernel<T, 1>);
  });
}

void fill_bias_rows(void* d, std::int64_t ldd, const void* c, std::int64_t ldc, const void* bias, std::int64_t m,
                    std::int64_t n, at::ScalarType dtype, cudaStream_t stream) {
  if (m == 0 || n == 0) return;
  with_type(dtype, [&](auto element) {
    using T = decltype(element);
    const unsigned across = blocks_for(n);
    const dim3 grid(across, static_cast<unsigned>(std::clamp<std::int64_t>(kMaxBlocks / across, 1, m)));
    bias_kernel<T><<<grid, kThreads, 0, stream>>>(static_cast<T*>(d), ldd, static_cast<const T*>(c), ldc,
                                                  static_cast<const T*>(bias), m, n);
  });
  STREAMOVERLAP_CHECK(cudaGetLastError());
}

}  // namespace streamoverlap::cuda
