// An asynchronous call as Python holds it; streamoverlap/work.py is what users see.
#pragma once

#include <cstdint>
#include <memory>

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
  Group& group() const { return *group_; }

 private:
  std::shared_ptr<Group> group_;
  std::unique_ptr<InFlight> call_;
  std::uintptr_t stream_;
};

}  // namespace streamoverlap
