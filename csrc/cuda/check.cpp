#include "check.h"

#include <stdexcept>
#include <string>

#include "driver.h"

namespace streamoverlap::cuda {
namespace {

[[noreturn]] void fail(const char* call, const char* file, int line, const std::string& error) {
  throw std::runtime_error(std::string(call) + " failed: " + error + " (" + file + ":" + std::to_string(line) + ")");
}

std::string described(const char* name, const char* text) {
  return text && *text ? std::string(name) + ", " + text : std::string(name);
}

}  // namespace

void throw_error(cudaError_t error, const char* call, const char* file, int line) {
  cudaGetLastError();  // the runtime reports an error that is not sticky once more otherwise, at an innocent call
  fail(call, file, line, described(cudaGetErrorName(error), cudaGetErrorString(error)));
}

void throw_error(CUresult error, const char* call, const char* file, int line) {
  fail(call, file, line, error_name(error));
}

void throw_error(cublasStatus_t status, const char* call, const char* file, int line) {
  fail(call, file, line, described(cublasLtGetStatusName(status), cublasLtGetStatusString(status)));
}

}  // namespace streamoverlap::cuda
