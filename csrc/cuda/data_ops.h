// The ops of a plan that move or make data, on a stream.
#pragma once

#include <ATen/Context.h>
#include <c10/core/ScalarType.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <cstdint>

#include "gemm.h"
#include "steps.h"

namespace streamoverlap::cuda {

struct Weight {
  const void* data = nullptr;  // [n, k]
  std::int64_t n = 0;
  std::int64_t ld = 0;  // elements between rows (row-major) or columns
  bool row_major = true;
  const void* bias = nullptr;   // [n], or null
  const void* scale = nullptr;  // with Operands::scaling
  std::byte* output = nullptr;  // of all shards; the first weight's is the call's view
};

struct Operands {
  at::ScalarType dtype = at::ScalarType::Float;  // of x
  at::ScalarType weight_dtype = at::ScalarType::Float;
  at::ScalarType out_dtype = at::ScalarType::Float;  // of results and partials
  Scaling scaling = Scaling::None;
  bool fast_accumulation = false;
  c10::ArrayRef<Weight> weights;  // a Gemm of the plan multiplies each; none for plans without one
};

// By torch's settings, old and new; allowTF32CuBLAS() throws where they are mixed.
inline bool tf32_allowed() {
  return at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) ==
         at::Float32Precision::TF32;
}

// Calls visit(shape, pointers) for every product of a Gemm step, in the order in which they are enqueued.
template <class Visit>
void for_each_product(const Step& step, const Operands& operands, const Bases& bases, const Visit& visit) {
  const auto size = static_cast<std::int64_t>(c10::elementSize(operands.dtype));
  const auto out_size = static_cast<std::int64_t>(c10::elementSize(operands.out_dtype));
  GemmShape shape;
  shape.m = step.rows;
  shape.k = shape.lda = step.a_row_bytes / size;
  shape.dtype = operands.dtype;
  shape.w_dtype = operands.weight_dtype;
  shape.d_dtype = operands.out_dtype;
  shape.scaling = operands.scaling;
  shape.fast_accumulation = operands.fast_accumulation;
  shape.tf32 = operands.dtype == at::ScalarType::Float && tf32_allowed();
  GemmPointers at;
  at.a = step.a.in(bases);
  at.a_scale = step.scales.in(bases);
  at.c = step.c.in(bases);
  for (std::size_t i = 0; i < operands.weights.size(); ++i) {
    const Weight& weight = operands.weights[i];
    if (weight.n == 0) continue;
    shape.n = shape.ldc = shape.ldd = weight.n;
    shape.ldw = weight.ld;
    shape.w_row_major = weight.row_major;
    at.w = weight.data;
    at.w_scale = weight.scale;
    at.bias = step.bias ? weight.bias : nullptr;
    at.d = i == 0 ? step.d.in(bases) : weight.output + step.output_row * weight.n * out_size;
    visit(shape, at);
  }
}

void copy(void* to, const void* from, std::int64_t bytes, const c10::cuda::CUDAStream& stream);

// `to` = the sum of a Reduce step's terms.
void sum(const Steps& steps, const Step& step, void* to, const Bases& bases, at::ScalarType dtype,
         const c10::cuda::CUDAStream& stream);

// `to` = what a Quantise step packs.
void pack(const Steps& steps, const Step& step, void* to, const Bases& bases, at::ScalarType dtype,
          const c10::cuda::CUDAStream& stream);

}  // namespace streamoverlap::cuda
