// Asynchronous calls on CUDA, and what keeps their tensors where nobody else does.
#pragma once

#include <ATen/cuda/CUDAEvent.h>

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "../../cuda/streams.h"
#include "../../group/group.h"
#include "../in_flight.h"
#include "../problem.h"

namespace streamoverlap {

// All that streams use until `end` is reached.
struct Held {
  std::unique_ptr<at::cuda::CUDAEvent> end;
  std::shared_ptr<const Problem> problem;
  std::shared_ptr<cuda::StreamSet> streams;
};

// Events to be used again, and calls whose Work was dropped before they had ended.
//
// References and not record_stream: the caching allocator would record an event on every stream of the set whenever a
// tensor is freed, and knows nothing of memory that is not its own.
class Keeper {
 public:
  ~Keeper();

  std::unique_ptr<at::cuda::CUDAEvent> event();
  void give_back(std::unique_ptr<at::cuda::CUDAEvent> event);
  void keep(Held held);
  // Lets go of calls that have ended. Polled at each call, so it stops at the first that has not.
  void collect();

 private:
  std::mutex mutex_;  // never held while tensors are let go: that may take the GIL
  std::vector<std::unique_ptr<at::cuda::CUDAEvent>> events_;
  std::deque<Held> held_;
};

class CudaCall : public InFlight {
 public:
  // `current`: the stream that issued the call, and whose memory its tensors are.
  CudaCall(std::shared_ptr<Group> group, std::shared_ptr<Keeper> keeper, Held held, c10::cuda::CUDAStream current);
  ~CudaCall() override;

  void join() override;
  bool is_completed() override;
  bool is_settled() override { return succeeded_ && joined_; }
  bool wait_until(Clock::time_point deadline) override;
  void check() override;

 private:
  void require_eager(const char* method) const;

  std::shared_ptr<Group> group_;
  std::shared_ptr<Keeper> keeper_;
  Held held_;
  c10::cuda::CUDAStream issued_on_;
  std::optional<unsigned long long> capture_;
  std::atomic<bool> completed_{false}, succeeded_{false};
  std::atomic<bool> joined_{false};
  std::atomic<bool> ordered_{false};  // what happens to the tensors on `issued_on_` comes after the call
};

}  // namespace streamoverlap
