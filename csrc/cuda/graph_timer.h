// How long work takes that is captured in a graph: none of it is the CPU's.
#pragma once

#include <cuda_runtime_api.h>

namespace streamoverlap::cuda {

class GraphTimer {
 public:
  // Captures what is enqueued on `stream` from here on.
  explicit GraphTimer(cudaStream_t stream);
  ~GraphTimer();
  GraphTimer(const GraphTimer&) = delete;
  GraphTimer& operator=(const GraphTimer&) = delete;

  // Ends the capture, and replays it some times: the fastest. Waits for the stream.
  double microseconds();

 private:
  cudaStream_t stream_;
  bool capturing_ = true;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t replay_ = nullptr;
};

}  // namespace streamoverlap::cuda
