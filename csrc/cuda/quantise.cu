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
constexpr int kWide = 16;        // packed elements that a thread sums at once: as many bytes
constexpr int kTaken = 8;        // elements of a row that a thread quantises at once
constexpr int kHeld = 8;         // times that many of a row it keeps in registers
constexpr int kRowThreads = 128;
constexpr int kWarp = 32;
constexpr unsigned kMaxRowBlocks = 65535;  // a grid's second dimension

static_assert(kRowThreads % kWarp == 0 && kThreads % kWarp == 0 && kWide == kPackedAlignment);

using Word = std::uint32_t;  // a float, or two narrower elements

// As unsigned integers, the bits of magnitudes order as the magnitudes do, and what is not finite comes last.
template <class T>
struct Bits;
template <>
struct Bits<float> {
  static constexpr Word kMagnitude = 0x7fffffff, kInfinity = 0x7f800000;
  static __device__ float value(Word bits) { return __uint_as_float(bits); }
};
template <>
struct Bits<__half> {
  static constexpr Word kMagnitude = 0x7fff7fff, kInfinity = 0x7c00;
  static __device__ float value(Word bits) { return __half2float(__ushort_as_half(static_cast<unsigned short>(bits))); }
};
template <>
struct Bits<__nv_bfloat16> {
  static constexpr Word kMagnitude = 0x7fff7fff, kInfinity = 0x7f80;
  static __device__ float value(Word bits) { return __uint_as_float(bits << 16); }
};

// Of the magnitudes that a word each have, those at the same place.
template <class T>
__device__ Word larger(Word a, Word b) {
  if constexpr (sizeof(T) == sizeof(Word)) {
    return max(a, b);
  } else {
    return __vmaxu2(a, b);
  }
}

template <class T>
__device__ Word magnitude(T x) {
  if constexpr (sizeof(T) == sizeof(Word)) {
    return __float_as_uint(x) & Bits<T>::kMagnitude;
  } else {
    return *reinterpret_cast<const unsigned short*>(&x) & Bits<T>::kMagnitude;
  }
}

template <class T>
__device__ Word largest_of_block(Word mine) {
  __shared__ Word of_warp[kRowThreads / kWarp];
  if constexpr (sizeof(T) != sizeof(Word)) mine = max(mine & 0xffff, mine >> 16);
  mine = __reduce_max_sync(0xffffffffu, mine);
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = mine;
  __syncthreads();
  mine = of_warp[0];
#pragma unroll
  for (int warp = 1; warp < kRowThreads / kWarp; ++warp) mine = max(mine, of_warp[warp]);
  __syncthreads();  // the next use writes there
  return mine;
}

__device__ float dequantised(__nv_fp8_storage_t value) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(value, __NV_E4M3)));
}

// The largest magnitudes of a pack, place by place in a word; kMixed: of what is finite among them.
template <bool kMixed, class T>
__device__ Word largest_of(const Pack<T, kTaken>& pack) {
  Word largest = 0;
  if constexpr (kMixed) {
#pragma unroll
    for (int j = 0; j < kTaken; ++j) {
      const Word bits = magnitude(pack.value[j]);
      if (bits < Bits<T>::kInfinity) largest = max(largest, bits);
    }
  } else {
    constexpr int kWords = kTaken * sizeof(T) / sizeof(Word);
    const auto* const words = reinterpret_cast<const Word*>(pack.value);
#pragma unroll
    for (int j = 0; j < kWords; ++j) largest = larger<T>(largest, words[j] & Bits<T>::kMagnitude);
  }
  return largest;
}

template <bool kMixed, class T>
__device__ float value_of(T x, float inverse) {
  const float value = widen(x);
  // What is infinite would saturate.
  return !kMixed || isfinite(value) ? value * inverse : __int_as_float(0x7fc00000);
}

template <bool kMixed, class T>
__device__ Pack<__nv_fp8x2_storage_t, kTaken / 2> quantised(const Pack<T, kTaken>& pack, float inverse) {
  Pack<__nv_fp8x2_storage_t, kTaken / 2> values;
#pragma unroll
  for (int j = 0; j < kTaken; j += 2) {
    const float2 two = {value_of<kMixed>(pack.value[j], inverse), value_of<kMixed>(pack.value[j + 1], inverse)};
    values.value[j / 2] = __nv_cvt_float2_to_fp8x2(two, __NV_SATFINITE, __NV_E4M3);
  }
  return values;
}

// A row, of which a thread holds what it can between finding the scale and using it.
template <class T>
struct Row {
  using Taken = Pack<T, kTaken>;
  static constexpr std::int64_t kBeyond = std::int64_t{kHeld} * kRowThreads;

  const T* x;
  std::int64_t count, wide;  // elements; packs at its beginning that may be read as such
  Taken held[kHeld];

  __device__ const Taken* packs() const { return reinterpret_cast<const Taken*>(x); }

  __device__ void load() {
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const std::int64_t i = std::int64_t{j} * kRowThreads + threadIdx.x;
      if (i < wide) held[j] = packs()[i];
    }
  }

  template <bool kMixed>
  __device__ Word largest() const {
    Word found = 0;
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const std::int64_t i = std::int64_t{j} * kRowThreads + threadIdx.x;
      if (i < wide) found = larger<T>(found, largest_of<kMixed>(held[j]));
    }
    for (std::int64_t i = kBeyond + threadIdx.x; i < wide; i += kRowThreads) {
      found = larger<T>(found, largest_of<kMixed>(packs()[i]));
    }
    for (std::int64_t i = wide * kTaken + threadIdx.x; i < count; i += kRowThreads) {
      const Word bits = magnitude(x[i]);
      if (!kMixed || bits < Bits<T>::kInfinity) found = larger<T>(found, bits);
    }
    return largest_of_block<T>(found);
  }

  template <bool kMixed>
  __device__ void write(__nv_fp8_storage_t* values, float inverse) const {
    auto* const packed = reinterpret_cast<Pack<__nv_fp8x2_storage_t, kTaken / 2>*>(values);
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const std::int64_t i = std::int64_t{j} * kRowThreads + threadIdx.x;
      if (i < wide) packed[i] = quantised<kMixed>(held[j], inverse);
    }
    for (std::int64_t i = kBeyond + threadIdx.x; i < wide; i += kRowThreads) {
      packed[i] = quantised<kMixed>(packs()[i], inverse);
    }
    for (std::int64_t i = wide * kTaken + threadIdx.x; i < count; i += kRowThreads) {
      values[i] = __nv_cvt_float_to_fp8(value_of<kMixed>(x[i], inverse), __NV_SATFINITE, __NV_E4M3);
    }
  }
};

// A block takes a row after the other. Only a row that has something infinite, or NaN, looks at elements one by one.
template <class T, bool kAligned>
__global__ void __launch_bounds__(kRowThreads)
    quantise_kernel(const T* from, std::int64_t elements, std::int64_t row, const __grid_constant__ QuantisedRows to) {
  const std::int64_t rows = (elements + row - 1) / row;
  for (std::int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
    Row<T> of;
    of.x = from + r * row;
    of.count = min(row, elements - r * row);
    of.wide = kAligned ? of.count / kTaken : 0;
    of.load();
    Word largest = of.template largest<false>();
    const bool finite = largest < Bits<T>::kInfinity;  // for the whole block
    if (!finite) largest = of.template largest<true>();
    const float scale = fmaxf(__fdiv_rn(Bits<T>::value(largest), kLargest), FLT_MIN), inverse = __frcp_rn(scale);

    auto* const values = static_cast<__nv_fp8_storage_t*>(to.values) + r * to.row_bytes;
    if (finite) {
      of.template write<false>(values, inverse);
    } else {
      of.template write<true>(values, inverse);
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
      quantise_kernel<T, true><<<rows, kRowThreads, 0, stream>>>(data, elements, row, to);
    } else {
      quantise_kernel<T, false><<<rows, kRowThreads, 0, stream>>>(data, elements, row, to);
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
