// D[m, n] = A[m, k] W^T (+ C) (+ bias) by cuBLASLt: A, C, D row-major, W [n, k] row- or column-major, nothing copied.
// Factors of 8 bits have scales, W of them is row-major, and D, C and bias have more bits.
#pragma once

#include <c10/core/ScalarType.h>
#include <cublasLt.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "key.h"

namespace streamoverlap::cuda {

inline constexpr std::size_t kWorkspaceBytes = 32 << 20;  // what cuBLAS asks for on Hopper

// One scale each for all of A and W, or one for each row.
enum class Scaling : std::uint8_t { None, Tensor, Row };

struct GemmShape {
  std::int64_t m = 0, n = 0, k = 0;
  std::int64_t lda = 0, ldw = 0, ldc = 0, ldd = 0;  // in elements
  at::ScalarType dtype = at::ScalarType::Float;     // of A
  at::ScalarType w_dtype = at::ScalarType::Float;   // that of A, but for 8 bits
  at::ScalarType d_dtype = at::ScalarType::Float;   // of D, C and bias; likewise
  Scaling scaling = Scaling::None;
  bool fast_accumulation = false;  // of 8 bits: fewer bits in the accumulator
  bool w_row_major = true;
  bool tf32 = false;  // float32 products may be rounded to TF32
};

struct GemmPointers {
  const void* a = nullptr;
  const void* w = nullptr;
  const void* a_scale = nullptr;  // float32, on the device: one, or [m]
  const void* w_scale = nullptr;  // one, or [n]
  const void* c = nullptr;        // null: no C, and D is not read
  const void* bias = nullptr;     // [n], null: none
  void* d = nullptr;              // not C
};

// One of the algorithms that cuBLASLt proposes for a problem, in its order.
struct GemmChoice {
  static constexpr int kFirst = -1;  // that runs

  int algorithm = kFirst;
  double microseconds = 0;        // of it, where it was measured
  double first_microseconds = 0;  // of cuBLASLt's own choice, likewise
};

// A problem cuBLASLt has chosen an algorithm for; the same one every time. Accumulates in fp32 (float64: fp64) and
// rounds once; split-K sums are in the accumulator's type and order, so equal inputs give equal bits.
class Gemm {
 public:
  // Takes the algorithm that is chosen, or where it does not run, the first in cuBLASLt's order that does: overwrites
  // D. Throws where none does. With `measure` it tries them all, and takes the fastest.
  Gemm(cublasLtHandle_t, const GemmShape&, const GemmPointers&, void* workspace, cudaStream_t, GemmChoice chosen,
       bool measure);

  const GemmChoice& choice() const { return choice_; }
  void run(cublasLtHandle_t, const GemmPointers&, void* workspace, cudaStream_t) const;

 private:
  template <class T, cublasStatus_t (*destroy)(T*)>
  struct Destroy {
    void operator()(T* object) const { destroy(object); }
  };
  using Operation =
      std::unique_ptr<cublasLtMatmulDescOpaque_t, Destroy<cublasLtMatmulDescOpaque_t, &cublasLtMatmulDescDestroy>>;
  using Matrix = std::unique_ptr<cublasLtMatrixLayoutOpaque_t,
                                 Destroy<cublasLtMatrixLayoutOpaque_t, &cublasLtMatrixLayoutDestroy>>;

  static Matrix matrix(cudaDataType_t, std::int64_t rows, std::int64_t columns, std::int64_t ld);
  void set_scaling();
  void set_scales(const GemmPointers&) const;
  bool choose(cublasLtHandle_t, const GemmPointers&, void* workspace, cudaStream_t, bool measure);
  double microseconds(cublasLtHandle_t, const GemmPointers&, void* workspace, cudaStream_t) const;
  cublasStatus_t multiply(cublasLtHandle_t, const GemmPointers&, void* workspace, cudaStream_t) const;

  GemmShape shape_;
  bool bias_in_epilogue_ = false;
  Operation operation_;
  Matrix w_, a_, c_, d_;
  cublasLtMatmulAlgo_t algorithm_{};
  GemmChoice choice_;
};

// By shape, what is there (C, bias), and the alignment of the pointers.
class GemmCache {
 public:
  using Choices = std::vector<std::pair<Key<8>, GemmChoice>>;

  GemmCache();
  ~GemmCache();
  GemmCache(const GemmCache&) = delete;
  GemmCache& operator=(const GemmCache&) = delete;

  cublasLtHandle_t handle() const { return handle_; }
  const Gemm* find(const GemmShape&, const GemmPointers&) const;  // null: not added yet, or not measured while tuning
  // Runs it once, so that its kernels are loaded: overwrites D.
  void add(const GemmShape&, const GemmPointers&, void* workspace, cudaStream_t);

  // While tuning, what is added is measured with every algorithm.
  void set_tuning(bool on) { tuning_ = on; }
  Choices measured() const;
  // For what is added from here on; a key's last element tells of types, layouts and alignments. Problems that were
  // added before stay as they are: their results must not change from one call to the next.
  void prefer(const Choices&);

 private:
  static Key<8> key(const GemmShape&, const GemmPointers&);

  cublasLtHandle_t handle_ = nullptr;
  std::unordered_map<Key<8>, Gemm, KeyHash> gemms_;
  std::unordered_map<Key<8>, GemmChoice, KeyHash> preferred_;
  bool tuning_ = false;
};

}  // namespace streamoverlap::cuda
