// What kernels have in common: types of elements, wide loads, and grids.
#pragma once

#include <c10/core/ScalarType.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "check.h"

namespace streamoverlap::cuda {

constexpr int kThreads = 256;
constexpr std::int64_t kMaxBlocks = 2048;  // enough to fill any GPU; the rest is done in the kernels' loops
constexpr std::size_t kAccess = 16;        // bytes of the widest load

__device__ inline float widen(float x) { return x; }
__device__ inline double widen(double x) { return x; }
__device__ inline float widen(__half x) { return __half2float(x); }
__device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ T narrow(float x) {
  return static_cast<T>(x);
}
template <>
__device__ inline __half narrow<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 narrow<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <class T>
__device__ T narrow(double x) {
  return static_cast<T>(x);
}

template <class T, int kWidth>
struct alignas(std::min(kWidth * sizeof(T), kAccess)) Pack {
  T value[kWidth];
};

inline bool is_aligned(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % kAccess == 0; }

inline unsigned blocks_for(std::int64_t items) {
  return static_cast<unsigned>(std::clamp<std::int64_t>((items + kThreads - 1) / kThreads, 1, kMaxBlocks));
}

template <class Kernel>
void load(Kernel* kernel) {
  cudaFuncAttributes attributes;  // asking for them loads it
  STREAMOVERLAP_CHECK(cudaFuncGetAttributes(&attributes, kernel));
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

}  // namespace streamoverlap::cuda
