// Errors of CUDA's libraries as exceptions that carry the call, its place and the library's own name for the error.
#pragma once

#include <cublasLt.h>
#include <cuda.h>
#include <cuda_runtime_api.h>

namespace streamoverlap::cuda {

[[noreturn]] void throw_error(cudaError_t, const char* call, const char* file, int line);
[[noreturn]] void throw_error(CUresult, const char* call, const char* file, int line);
[[noreturn]] void throw_error(cublasStatus_t, const char* call, const char* file, int line);

// The runtime's, the driver's and cuBLAS's success are all 0.
template <class Status>
inline void check(Status status, const char* call, const char* file, int line) {
  if (status != Status{}) throw_error(status, call, file, line);
}

}  // namespace streamoverlap::cuda

#define STREAMOVERLAP_CHECK(call) ::streamoverlap::cuda::check(call, #call, __FILE__, __LINE__)
