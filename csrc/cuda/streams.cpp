#include "streams.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

#include <future>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "check.h"
#include "gemm.h"

namespace streamoverlap::cuda {

using c10::cuda::CUDAStream;

std::optional<unsigned long long> capture_of(const CUDAStream& stream) {
  cudaStreamCaptureStatus status{};
  unsigned long long id = 0;
  STREAMOVERLAP_CHECK(cudaStreamGetCaptureInfo(stream.stream(), &status, &id));
  if (status == cudaStreamCaptureStatusNone) return std::nullopt;
  return id;
}

namespace {

// Private streams that no set has, by device.
struct FreeStreams {
  std::mutex mutex;
  std::map<c10::DeviceIndex, std::vector<cudaStream_t>> by_device;
};

FreeStreams& free_streams() {
  static auto* const streams = new FreeStreams;  // sets may end after static objects
  return *streams;
}

cudaStream_t take_stream(c10::DeviceIndex device) {
  {
    const std::lock_guard<std::mutex> lock(free_streams().mutex);
    std::vector<cudaStream_t>& streams = free_streams().by_device[device];
    if (!streams.empty()) {
      const cudaStream_t stream = streams.back();
      streams.pop_back();
      return stream;
    }
  }
  int lowest = 0, highest = 0;
  STREAMOVERLAP_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
  cudaStream_t stream{};
  STREAMOVERLAP_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest));
  return stream;
}

}  // namespace

std::shared_ptr<StreamSet> StreamSet::make(c10::DeviceIndex device) {
  const c10::cuda::CUDAGuard guard(device);
  std::vector<CUDAStream> streams;
  std::vector<cudaStream_t> owned;
  for (plan::Stream role = plan::kSend; role < plan::kMaxStreams; ++role) {
    owned.push_back(take_stream(device));
    streams.push_back(c10::cuda::getStreamFromExternal(owned.back(), device));
  }
  auto set =
      std::make_shared<StreamSet>(streams[0], streams[1], std::vector<CUDAStream>(streams.begin() + 2, streams.end()));
  set->owned_ = std::move(owned);
  return set;
}

StreamSet::StreamSet(CUDAStream send, CUDAStream recv, std::vector<CUDAStream> compute) : streams_{send, recv} {
  streams_.insert(streams_.end(), compute.begin(), compute.end());
  if (compute.empty() || compute.size() > static_cast<std::size_t>(plan::kMaxComputeStreams)) {
    throw std::invalid_argument("streams has " + std::to_string(compute.size()) + " compute streams, expected 1 to " +
                                std::to_string(plan::kMaxComputeStreams));
  }
  for (const CUDAStream& stream : streams_) {
    if (stream.device_index() == send.device_index()) continue;
    throw std::invalid_argument("streams are of devices " + std::to_string(send.device_index()) + " and " +
                                std::to_string(stream.device_index()) + ", expected all of one device");
  }
}

StreamSet::~StreamSet() {
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);  // as in the executor's end
  const std::lock_guard<std::mutex> lock(free_streams().mutex);
  for (const cudaStream_t stream : owned_) {
    // One that still waits for a peer that is gone would hold up whoever gets it.
    if (cudaStreamQuery(stream) == cudaSuccess) free_streams().by_device[device()].push_back(stream);
  }
}

void StreamSet::reserve_workspaces(int count) {
  for (int i = static_cast<int>(workspaces_.size()); i < count; ++i) {
    workspaces_.push_back(allocate_to_keep(static_cast<std::int64_t>(kWorkspaceBytes), at(plan::kCompute + i)));
  }
}

// On a thread of its own: this one's allocations may be directed to a pool that does not outlive what uses it, as where
// Inductor runs what it captures in a CUDA graph next.
at::Tensor allocate_to_keep(std::int64_t bytes, const CUDAStream& stream) {
  return std::async(std::launch::async,
                    [&] {
                      const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
                      const c10::cuda::CUDAStreamGuard guard(stream);
                      return at::empty({bytes}, at::TensorOptions(at::kByte).device(at::kCUDA, stream.device_index()));
                    })
      .get();
}

}  // namespace streamoverlap::cuda
