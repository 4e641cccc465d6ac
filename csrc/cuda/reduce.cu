#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "check.h"
#include "reduce.h"

namespace streamoverlap::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMaxBlocks = 2048;  // enough to fill any GPU; the rest is done in the kernels' loops
constexpr std::size_t kAccess = 16;        // bytes of the widest load

__device__ float widen(float x) { return x; }
__device__ double widen(double x) { return x; }
__device__ float widen(__half x) { return __half2float(x); }
__device__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ T narrow(float x) {
  return static_cast<T>(x);
}
template <>
__device__ __half narrow<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __nv_bfloat16 narrow<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <class T>
__device__ T narrow(double x) {
  return static_cast<T>(x);
}

template <class T, int kWidth>
struct alignas(kWidth * sizeof(T)) Pack {
  T value[kWidth];
};

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

bool is_aligned(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % kAccess == 0; }

unsigned blocks_for(std::int64_t items) {
  return static_cast<unsigned>(std::clamp<std::int64_t>((items + kThreads - 1) / kThreads, 1, kMaxBlocks));
}

template <class Function>
void with_type(at::ScalarType dtype, const Function& function) {
  switch (dtype) {
    case at::ScalarType::Float:
      return function(float{});
    case at::ScalarType::Double:
      return function(double{});
    case at::ScalarType::Half:
      return function(__half{});
    case at::ScalarType::BFloat16:
      return function(__nv_bfloat16{});
    default:
      throw std::invalid_argument("dtype is " + std::string(c10::toString(dtype)) +
                                  ", expected float32, float64, float16 or bfloat16");
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
