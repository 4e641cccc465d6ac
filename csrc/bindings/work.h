// An asynchronous call as Python holds it; streamoverlap/work.py is what users see.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>

#include "../group/group.h"
#include "in_flight.h"

namespace streamoverlap {

class Work {
 public:
  // `call`: null where there was nothing to do. `stream`: the op's own; see Backend::op_stream.
  Work(std::shared_ptr<Group> group, std::unique_ptr<InFlight> call, std::uintptr_t stream);

  void join();
  bool wait_for(double seconds);  // false: it is still not completed
  bool is_completed();
  void check();
  std::uintptr_t stream() const { return stream_; }

  // As of Group, for errors.
  std::string report(std::chrono::milliseconds wait) const;
  bool first_to_ask();

 private:
  struct Live {
    std::shared_ptr<Group> group;
    std::unique_ptr<InFlight> call;
  };

  std::shared_ptr<Live> live() const;
  void settle(const std::shared_ptr<Live>& live);

  std::uintptr_t stream_;
  mutable std::mutex mutex_;
  // Null once the outcome is known, so that a Work which is kept keeps neither tensors nor a closed communicator.
  std::shared_ptr<Live> live_;
  std::exception_ptr error_;
  std::string report_;
  bool first_ = false;
};

}  // namespace streamoverlap
