#include "gemm.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "check.h"
#include "graph_timer.h"
#include "reduce.h"

namespace streamoverlap::cuda {
namespace {

constexpr int kCandidates = 8;
constexpr std::uint32_t kMaxAlignment = 16;  // bytes; no kernel asks for more
constexpr int kProducts = 8;                 // in a measurement

cudaDataType_t type_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::ScalarType::BFloat16:
      return CUDA_R_16BF;
    case at::ScalarType::Half:
      return CUDA_R_16F;
    case at::ScalarType::Float:
      return CUDA_R_32F;
    case at::ScalarType::Double:
      return CUDA_R_64F;
    case at::ScalarType::Float8_e4m3fn:
      return CUDA_R_8F_E4M3;
    case at::ScalarType::Float8_e5m2:
      return CUDA_R_8F_E5M2;
    default:
      throw std::invalid_argument("dtype is " + std::string(c10::toString(dtype)) +
                                  ", expected float32, float64, float16, bfloat16, float8_e4m3fn or float8_e5m2");
  }
}

cublasComputeType_t compute_of(const GemmShape& shape) {
  if (shape.dtype == at::ScalarType::Double) return CUBLAS_COMPUTE_64F;
  return shape.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
}

// There are no kernels that add a float32 bias to a product of 8 bits.
bool epilogue_adds_bias(const GemmShape& shape) {
  return shape.scaling == Scaling::None || shape.d_dtype != at::ScalarType::Float;
}

// alpha and beta are read in the scale type.
const void* scalar(at::ScalarType dtype, bool one) {
  static constexpr float kFloats[] = {0, 1};
  static constexpr double kDoubles[] = {0, 1};
  return dtype == at::ScalarType::Double ? static_cast<const void*>(&kDoubles[one]) : &kFloats[one];
}

std::uint32_t alignment(const void* pointer) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer) | kMaxAlignment;
  return static_cast<std::uint32_t>(address & (~address + 1));  // the lowest bit that is set
}

template <class T>
void set(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  STREAMOVERLAP_CHECK(cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof value));
}

class Preference {
 public:
  Preference() { STREAMOVERLAP_CHECK(cublasLtMatmulPreferenceCreate(&preference_)); }
  ~Preference() { cublasLtMatmulPreferenceDestroy(preference_); }
  Preference(const Preference&) = delete;
  Preference& operator=(const Preference&) = delete;

  template <class T>
  void set(cublasLtMatmulPreferenceAttributes_t attribute, const T& value) {
    STREAMOVERLAP_CHECK(cublasLtMatmulPreferenceSetAttribute(preference_, attribute, &value, sizeof value));
  }
  cublasLtMatmulPreference_t get() const { return preference_; }

 private:
  cublasLtMatmulPreference_t preference_ = nullptr;
};

std::string to_string(const GemmShape& shape, const GemmPointers& at) {
  const auto scales = shape.scaling == Scaling::None  ? ""
                      : shape.scaling == Scaling::Row ? ", row-wise scales"
                                                      : ", tensor-wise scales";
  const auto result = shape.scaling == Scaling::None ? "" : std::string(" to ") + c10::toString(shape.d_dtype);
  return std::string(c10::toString(shape.dtype)) + result + " GEMM of m " + std::to_string(shape.m) + ", n " +
         std::to_string(shape.n) + ", k " + std::to_string(shape.k) + ", weight " +
         (shape.w_row_major ? "row" : "column") + "-major with leading dimension " + std::to_string(shape.ldw) +
         scales + (at.c ? ", with C" : "") + (at.bias ? ", with bias" : "");
}

}  // namespace

Gemm::Matrix Gemm::matrix(cudaDataType_t type, std::int64_t rows, std::int64_t columns, std::int64_t ld) {
  cublasLtMatrixLayout_t layout = nullptr;
  STREAMOVERLAP_CHECK(cublasLtMatrixLayoutCreate(&layout, type, rows, columns, ld));
  return Matrix(layout);
}

// cuBLAS is column-major, so it is given the transposed problem: D^T = W A^T, where A^T, C^T and D^T are what row-major
// A, C and D look like to it, and the bias, one value a row of D^T, is the epilogue's.
Gemm::Gemm(cublasLtHandle_t handle, const GemmShape& shape, const GemmPointers& at, void* workspace,
           cudaStream_t stream, GemmChoice chosen, bool measure)
    : shape_(shape), choice_(chosen) {
  const bool is_double = shape.dtype == at::ScalarType::Double;
  const cudaDataType_t d_type = type_of(shape.d_dtype), w_type = type_of(shape.w_dtype);
  cublasLtMatmulDesc_t operation = nullptr;
  STREAMOVERLAP_CHECK(cublasLtMatmulDescCreate(&operation, compute_of(shape), is_double ? CUDA_R_64F : CUDA_R_32F));
  operation_.reset(operation);
  set(operation, CUBLASLT_MATMUL_DESC_TRANSA, shape.w_row_major ? CUBLAS_OP_T : CUBLAS_OP_N);
  w_ = shape.w_row_major ? matrix(w_type, shape.k, shape.n, shape.ldw) : matrix(w_type, shape.n, shape.k, shape.ldw);
  a_ = matrix(type_of(shape.dtype), shape.k, shape.m, shape.lda);
  d_ = matrix(d_type, shape.n, shape.m, shape.ldd);
  if (shape.scaling != Scaling::None) set_scaling();

  for (const bool in_epilogue : {true, false}) {
    if (at.bias && in_epilogue && !epilogue_adds_bias(shape)) continue;
    bias_in_epilogue_ = at.bias != nullptr && in_epilogue;
    const bool c_is_d = !at.c || (at.bias && !in_epilogue);
    c_ = matrix(d_type, shape.n, shape.m, c_is_d ? shape.ldd : shape.ldc);
    set(operation, CUBLASLT_MATMUL_DESC_EPILOGUE,
        bias_in_epilogue_ ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT);
    if (choose(handle, at, workspace, stream, measure)) return;
    if (!at.bias) break;
  }
  throw std::runtime_error("cuBLASLt has no algorithm for a " + to_string(shape, at));
}

// A and B are W and A to cuBLAS.
void Gemm::set_scaling() {
  const auto mode =
      static_cast<std::int32_t>(shape_.scaling == Scaling::Row ? CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F
                                                               : CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F);
  set(operation_.get(), CUBLASLT_MATMUL_DESC_A_SCALE_MODE, mode);
  set(operation_.get(), CUBLASLT_MATMUL_DESC_B_SCALE_MODE, mode);
  set(operation_.get(), CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<std::int8_t>(shape_.fast_accumulation));
  if (!epilogue_adds_bias(shape_)) return;
  set(operation_.get(), CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, static_cast<std::int32_t>(type_of(shape_.d_dtype)));
}

void Gemm::set_scales(const GemmPointers& at) const {
  if (shape_.scaling == Scaling::None) return;
  set(operation_.get(), CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, at.w_scale);
  set(operation_.get(), CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, at.a_scale);
}

bool Gemm::choose(cublasLtHandle_t handle, const GemmPointers& at, void* workspace, cudaStream_t stream, bool measure) {
  Preference preference;
  preference.set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceBytes);
  // Others round partial sums to the output's type, or add them in no fixed order.
  preference.set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                 static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(at.w));
  preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(at.a));
  preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, std::min(alignment(at.c), alignment(at.d)));
  preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(at.d));
  if (bias_in_epilogue_) set(operation_.get(), CUBLASLT_MATMUL_DESC_BIAS_POINTER, at.bias);
  set_scales(at);

  cublasLtMatmulHeuristicResult_t candidates[kCandidates];
  int found = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(handle, operation_.get(), w_.get(), a_.get(), c_.get(), d_.get(), preference.get(),
                                     kCandidates, candidates, &found);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE) return false;
  STREAMOVERLAP_CHECK(status);
  const auto runs = [&](int i) {
    if (i < 0 || i >= found || candidates[i].state != CUBLAS_STATUS_SUCCESS) return false;
    algorithm_ = candidates[i].algo;
    return multiply(handle, at, workspace, stream) == CUBLAS_STATUS_SUCCESS;
  };
  if (!measure && runs(choice_.algorithm)) return true;
  choice_ = {};
  for (int i = 0; i < found; ++i) {
    if (!runs(i)) continue;
    if (!measure) return true;
    const double took = microseconds(handle, at, workspace, stream);
    if (choice_.algorithm == GemmChoice::kFirst) choice_.first_microseconds = took;
    if (choice_.algorithm != GemmChoice::kFirst && took >= choice_.microseconds) continue;
    choice_.algorithm = i;
    choice_.microseconds = took;
  }
  return runs(choice_.algorithm);
}

// From a graph, as many products are shorter than it takes to issue them. Waits for the stream.
double Gemm::microseconds(cublasLtHandle_t handle, const GemmPointers& at, void* workspace, cudaStream_t stream) const {
  GraphTimer timer(stream);
  for (int i = 0; i < kProducts; ++i) run(handle, at, workspace, stream);
  return timer.microseconds() / kProducts;
}

cublasStatus_t Gemm::multiply(cublasLtHandle_t handle, const GemmPointers& at, void* workspace,
                              cudaStream_t stream) const {
  const void* c = at.c;
  set_scales(at);
  if (bias_in_epilogue_) {
    set(operation_.get(), CUBLASLT_MATMUL_DESC_BIAS_POINTER, at.bias);
  } else if (at.bias) {
    fill_bias_rows(at.d, shape_.ldd, at.c, shape_.ldc, at.bias, shape_.m, shape_.n, shape_.d_dtype, stream);
    c = at.d;
  }
  return cublasLtMatmul(handle, operation_.get(), scalar(shape_.d_dtype, true), at.w, w_.get(), at.a, a_.get(),
                        scalar(shape_.d_dtype, c != nullptr), c ? c : at.d, c_.get(), at.d, d_.get(), &algorithm_,
                        workspace, kWorkspaceBytes, stream);
}

void Gemm::run(cublasLtHandle_t handle, const GemmPointers& at, void* workspace, cudaStream_t stream) const {
  const cublasStatus_t status = multiply(handle, at, workspace, stream);
  if (status != CUBLAS_STATUS_SUCCESS) {
    throw_error(status, ("cublasLtMatmul for a " + to_string(shape_, at)).c_str(), __FILE__, __LINE__);
  }
}

GemmCache::GemmCache() { STREAMOVERLAP_CHECK(cublasLtCreate(&handle_)); }

GemmCache::~GemmCache() { cublasLtDestroy(handle_); }

Key<8> GemmCache::key(const GemmShape& shape, const GemmPointers& at) {
  std::int64_t traits = static_cast<std::int64_t>(shape.dtype);
  const auto append = [&traits](std::int64_t value, int bits) { traits = traits << bits | value; };
  append(shape.w_row_major, 1);
  append(shape.tf32, 1);
  append(at.c != nullptr, 1);
  append(at.bias != nullptr, 1);
  for (const void* pointer : {at.a, at.w, at.c, at.bias, static_cast<const void*>(at.d)}) append(alignment(pointer), 5);
  // Above what others have, whose keys in files stay as they were.
  if (shape.scaling != Scaling::None) {
    std::int64_t more = static_cast<std::int64_t>(shape.w_dtype);
    for (const std::int64_t value : {static_cast<std::int64_t>(shape.d_dtype), static_cast<std::int64_t>(shape.scaling),
                                     static_cast<std::int64_t>(shape.fast_accumulation)}) {
      more = more << 6 | value;
    }
    traits |= more << 37;
  }
  return {shape.m, shape.n, shape.k, shape.lda, shape.ldw, shape.ldc, shape.ldd, traits};
}

const Gemm* GemmCache::find(const GemmShape& shape, const GemmPointers& at) const {
  const auto found = gemms_.find(key(shape, at));
  if (found == gemms_.end()) return nullptr;
  return tuning_ && found->second.choice().microseconds == 0 ? nullptr : &found->second;
}

void GemmCache::add(const GemmShape& shape, const GemmPointers& at, void* workspace, cudaStream_t stream) {
  const Key<8> id = key(shape, at);
  const auto found = preferred_.find(id);
  const GemmChoice chosen = found != preferred_.end() ? found->second : GemmChoice{};
  gemms_.insert_or_assign(id, Gemm(handle_, shape, at, workspace, stream, chosen, tuning_));
}

GemmCache::Choices GemmCache::measured() const {
  Choices choices;
  for (const auto& [id, gemm] : gemms_) {
    if (gemm.choice().microseconds > 0) choices.emplace_back(id, gemm.choice());
  }
  return choices;
}

void GemmCache::prefer(const Choices& choices) {
  for (const auto& [id, choice] : choices) preferred_[id] = choice;
}

}  // namespace streamoverlap::cuda
