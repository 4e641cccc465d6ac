// What is needed of the driver itself: operations of a stream on a 32-bit word, and host memory that a GPU can reach.
// Its functions are looked up at run time, so the module loads where there is no driver.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace streamoverlap::cuda {

// An operation of a stream on a word. A write comes after all that the stream did before, for every observer.
using MemoryOp = CUstreamBatchMemOpParams;
MemoryOp write_value(CUdeviceptr word, std::uint32_t value);
MemoryOp wait_value(CUdeviceptr word, std::uint32_t value);  // until the word equals the value

inline constexpr int kMaxBatch = 128;  // the driver takes fewer than 256 at once

// In order. The driver may use the memory of `ops` while it is called.
void enqueue(MemoryOp* ops, int count, cudaStream_t stream, bool capturing);

// Host memory that the GPUs of this process can reach, as long as this lives.
class Registration {
 public:
  Registration() = default;
  Registration(void* host, std::size_t bytes);  // whole pages
  ~Registration();
  Registration(Registration&& other) noexcept;
  Registration& operator=(Registration&&) = delete;

  CUdeviceptr device() const { return device_; }

 private:
  void* host_ = nullptr;
  CUdeviceptr device_ = 0;
};

std::string error_name(CUresult);

// Why this device cannot run plans together with `peers` (ordinals in this process); empty: it can.
std::string unsupported(int device, const int* peers, int count);

}  // namespace streamoverlap::cuda
