// The streams of a call besides main, which is the caller's current stream. Handed in at call time; two calls in flight
// may use the same set or two different ones.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>

#include <memory>
#include <optional>
#include <vector>

#include "../plan/plan.h"

namespace streamoverlap::cuda {

// The capture that the stream is in, if any.
std::optional<unsigned long long> capture_of(const c10::cuda::CUDAStream& stream);

// Memory that lives on, for use on `stream`: the allocator gives it to no other one when it is freed.
at::Tensor allocate_to_keep(std::int64_t bytes, const c10::cuda::CUDAStream& stream);

class StreamSet {
 public:
  // Streams of highest priority that nobody else uses (torch's pool hands one stream to several users). They are never
  // destroyed, as torch's: the allocator remembers a stream that has used a tensor until that is freed. Later sets get
  // them again.
  static std::shared_ptr<StreamSet> make(c10::DeviceIndex device);
  // The caller's own streams; they must outlive the set.
  StreamSet(c10::cuda::CUDAStream send, c10::cuda::CUDAStream recv, std::vector<c10::cuda::CUDAStream> compute);
  ~StreamSet();
  StreamSet(const StreamSet&) = delete;
  StreamSet& operator=(const StreamSet&) = delete;

  c10::DeviceIndex device() const { return streams_[0].device_index(); }
  int compute_streams() const { return static_cast<int>(streams_.size()) - (plan::kCompute - plan::kSend); }
  const c10::cuda::CUDAStream& at(plan::Stream role) const { return streams_[role - plan::kSend]; }

  // Every compute stream has a workspace of its own: GEMMs of different streams may run at once.
  bool has_workspaces(int count) const { return static_cast<int>(workspaces_.size()) >= count; }
  void reserve_workspaces(int count);
  void* workspace(plan::Stream role) const { return workspaces_[role - plan::kCompute].data_ptr(); }

 private:
  std::vector<c10::cuda::CUDAStream> streams_;  // by role, from kSend on
  std::vector<cudaStream_t> owned_;
  std::vector<at::Tensor> workspaces_;
};

}  // namespace streamoverlap::cuda
