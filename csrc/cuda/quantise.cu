#include <cuda_fp8.h>

#include <cfloat>
#include <type_traits>

#include "../group/call.h"
#include "check.h"
#include "elements.cuh"
#include "quantise.h"

namespace streamoverlap::cuda {
namespace {

constexpr float kLargest = 448;  // of float8_e4m3fn
constexpr int kWide = 16;        // elements that a thread takes at once: as many bytes where they are packed
constexpr int kHeld = 4;         // of those, of a row, that it keeps in registers
constexpr int kWarp = 32;
constexpr unsigned kMaxRowBlocks = 65535;  // a grid's second dimension

static_assert(kThreads % kWarp == 0 && kWide == kPackedAlignment);

__device__ float largest_of_block(float mine) {
  __shared__ float of_warp[kThreads / kWarp];
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    mine = fmaxf(mine, __shfl_xor_sync(0xffffffffu, mine, distance));
  }
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = mine;
  __syncthreads();
  mine = of_warp[0];
#pragma unroll
  for (int warp = 1; warp < kThreads / kWarp; ++warp) mine = fmaxf(mine, of_warp[warp]);
  __syncthreads();  // the next row writes there
  return mine;
}

__device__ float magnitude(float x) { return isfinite(x) ? fabsf(x) : 0.f; }

__device__ float value_of(float x, float inverse) {
  return isfinite(x) ? x * inverse : __int_as_float(0x7fc00000);  // what is infinite would saturate
}

__device__ float dequantised(__nv_fp8_storage_t value) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(value, __NV_E4M3)));
}

template <class T>
__device__ float largest_of(const Pack<T, kWide>& pack) {
  float largest = 0;
#pragma unroll
  for (int j = 0; j < kWide; ++j) largest = fmaxf(largest, magnitude(widen(pack.value[j])));
  return largest;
}

template <class T>
__device__ Pack<__nv_fp8x2_storage_t, kWide / 2> quantised(const Pack<T, kWide>& pack, float inverse) {
  Pack<__nv_fp8x2_storage_t, kWide / 2> values;
#pragma unroll
  for (int j = 0; j < kWide; j += 2) {
    const float2 two = {value_of(widen(pack.value[j]), inverse), value_of(widen(pack.value[j + 1]), inverse)};
    values.value[j / 2] = __nv_cvt_float2_to_fp8x2(two, __NV_SATFINITE, __NV_E4M3);
  }
  return values;
}

// A block takes a row after the other, and holds what it can of it between finding the scale and using it.
template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    quantise_kernel(const T* from, std::int64_t elements, std::int64_t row, const __grid_constant__ QuantisedRows to) {
  using Wide = Pack<T, kWide>;
  const std::int64_t rows = (elements + row - 1) / row;
  for (std::int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
    const T* const x = from + r * row;
    const auto* const packs = reinterpret_cast<const Wide*>(x);
    const std::int64_t count = min(row, elements - r * row);
    const std::int64_t wide = kAligned ? count / kWide : 0;
    const std::int64_t tail = wide * kWide + threadIdx.x, beyond = std::int64_t{kHeld} * kThreads + threadIdx.x;
    Wide held[kHeld];
    float largest = 0;
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const std::int64_t i = std::int64_t{j} * kThreads + threadIdx.x;
      if (i >= wide) continue;
      held[j] = packs[i];
      largest = fmaxf(largest, largest_of(held[j]));
    }
    for (std::int64_t i = beyond; i < wide; i += kThreads) largest = fmaxf(largest, largest_of(packs[i]));
    for (std::int64_t i = tail; i < count; i += kThreads) largest = fmaxf(largest, magnitude(widen(x[i])));
    const float scale = fmaxf(__fdiv_rn(largest_of_block(largest), kLargest), FLT_MIN), inverse = __frcp_rn(scale);

    auto* const values = static_cast<__nv_fp8_storage_t*>(to.values) + r * to.row_bytes;
    auto* const packed = reinterpret_cast<Pack<__nv_fp8x2_storage_t, kWide / 2>*>(values);
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const std::int64_t i = std::int64_t{j} * kThreads + threadIdx.x;
      if (i < wide) packed[i] = quantised(held[j], inverse);
    }
    for (std::int64_t i = beyond; i < wide; i += kThreads) packed[i] = quantised(packs[i], inverse);
    for (std::int64_t i = tail; i < count; i += kThreads) {
      values[i] = __nv_cvt_float_to_fp8(value_of(widen(x[i]), inverse), __NV_SATFINITE, __NV_E4M3);
    }
    if (threadIdx.x == 0) {
      *reinterpret_cast<float*>(static_cast<char*>(to.scales) + r * to.scale_bytes) = scale;
    }
  }
}

// `count` elements from `at`, at `column` of packed row r. All are read before the sum is written.
template <class T, int kWidth>
__device__ void sum_row_pack(const Terms& terms, std::uint64_t packed, T* sum, std::int64_t at, std::int64_t packed_row,
                             std::int64_t scale_offset, std::int64_t column) {
  float total[kWidth];
  for (int i = 0; i < terms.count; ++i) {
    float term[kWidth];
    if (packed >> i & 1) {
      const char* const row = static_cast<const char*>(terms.data[i]) + packed_row;
      const float scale = *reinterpret_cast<const float*>(row + scale_offset);
      const auto pack = *reinterpret_cast<const Pack<__nv_fp8_storage_t, kWidth>*>(row + column);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) term[j] = __fmul_rn(dequantised(pack.value[j]), scale);
    } else {
      const auto pack = *reinterpret_cast<const Pack<T, kWidth>*>(static_cast<const T*>(terms.data[i]) + at);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) term[j] = widen(pack.value[j]);
    }
#pragma unroll
    for (int j = 0; j < kWidth; ++j) total[j] = i == 0 ? term[j] : __fadd_rn(total[j], term[j]);
  }
  Pack<T, kWidth> pack;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) pack.value[j] = narrow<T>(total[j]);
  *reinterpret_cast<Pack<T, kWidth>*>(sum + at) = pack;
}

template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    reduce_packed_kernel(const __grid_constant__ Terms terms, std::uint64_t packed, T* sum, std::int64_t elements,
                         std::int64_t row) {
  const std::int64_t rows = (elements + row - 1) / row, scale_offset = packed_scale_offset(row);
  const std::int64_t first = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t r = std::int64_t{blockIdx.y} * blockDim.y + threadIdx.y; r < rows;
       r += std::int64_t{gridDim.y} * blockDim.y) {
    const std::int64_t begin = r * row, packed_row = r * packed_row_bytes(row);
    const std::int64_t count = min(row, elements - begin);
    const std::int64_t wide = kAligned ? count / kWide : 0;
    for (std::int64_t i = first; i < wide; i += stride) {
      sum_row_pack<T, kWide>(terms, packed, sum, begin + i * kWide, packed_row, scale_offset, i * kWide);
    }
    for (std::int64_t i = wide * kWide + first; i < count; i += stride) {
      sum_row_pack<T, 1>(terms, packed, sum, begin + i, packed_row, scale_offset, i);
    }
  }
}

// float64 has more range than a float32 scale.
template <class Function>
void with_narrow_type(at::ScalarType dtype, const Function& function) {
  with_type(dtype, [&](auto element) {
    if constexpr (std::is_same_v<decltype(element), double>) {
      throw std::invalid_argument("dtype is Double, expected float32, float16 or bfloat16");
    } else {
      function(element);
    }
  });
}

template <class T>
bool rows_are_aligned(std::int64_t row) {
  return row * static_cast<std::int64_t>(sizeof(T)) % static_cast<std::int64_t>(kAccess) == 0;
}

}  // namespace

void quantise(const void* from, std::int64_t elements, std::int64_t row, const QuantisedRows& to, at::ScalarType dtype,
              cudaStream_t stream) {
  if (elements == 0) return;
  with_narrow_type(dtype, [&](auto element) {
    using T = decltype(element);
    const auto rows = static_cast<unsigned>(std::min<std::int64_t>((elements + row - 1) / row, kMaxBlocks));
    const bool aligned = is_aligned(from) && rows_are_aligned<T>(row) && is_aligned(to.values) &&
                         to.row_bytes % static_cast<std::int64_t>(kAccess) == 0;
    const T* const data = static_cast<const T*>(from);
    if (aligned) {
      quantise_kernel<T, true><<<rows, kThreads, 0, stream>>>(data, elements, row, to);
    } else {
      quantise_kernel<T, false><<<rows, kThreads, 0, stream>>>(data, elements, row, to);
    }
  });
  STREAMOVERLAP_CHECK(cudaGetLastError());
}

void reduce_packed(const Terms& terms, std::uint64_t packed, void* sum, std::int64_t elements, std::int64_t row,
                   at::ScalarType dtype, cudaStream_t stream) {
  if (elements == 0) return;
  with_narrow_type(dtype, [&](auto element) {
    using T = decltype(element);
    const bool aligned =
        is_aligned(sum) && rows_are_aligned<T>(row) && std::all_of(terms.data, terms.data + terms.count, is_aligned);
    // As many threads along a row as it keeps busy, the others along the rows.
    const std::int64_t items = aligned ? (row + kWide - 1) / kWide : row;
    const auto across = static_cast<unsigned>(std::min<std::int64_t>((items + kWarp - 1) / kWarp * kWarp, kThreads));
    const dim3 block(across, std::max(1u, kThreads / across));
    const std::int64_t row_blocks = ((elements + row - 1) / row + block.y - 1) / block.y;
    const dim3 grid(static_cast<unsigned>(std::min<std::int64_t>((items + across - 1) / across, kMaxBlocks)),
                    static_cast<unsigned>(std::min<std::int64_t>(row_blocks, kMaxRowBlocks)));
    T* const to = static_cast<T*>(sum);
    if (aligned) {
      reduce_packed_kernel<T, true><<<grid, block, 0, stream>>>(terms, packed, to, elements, row);
    } else {
      reduce_packed_kernel<T, false><<<grid, block, 0, stream>>>(terms, packed, to, elements, row);
    }
  });
  STREAMOVERLAP_CHECK(cudaGetLastError());
}

void load_quantise(at::ScalarType dtype) {
  with_narrow_type(dtype, [](auto element) {
    using T = decltype(element);
    load(quantise_kernel<T, true>);
    load(quantise_kernel<T, false>);
    load(reduce_packed_kernel<T, true>);
    load(reduce_packed_kernel<T, false>);
  });
}

}  // namespace streamoverlap::cuda
