// What a call throws when its group has failed.
#pragma once

#include <stdexcept>
#include <string>

#include "layout.h"

namespace streamoverlap {

struct AbortError : std::runtime_error {
  AbortError(const AbortRecord& record, const std::string& group, int rank, int world, const std::string& own_op);

  AbortKind kind;
  std::string group;
  std::string op;  // the call that failed first, on the rank that reported it
  int peer;        // the rank to blame, -1 where that is not known
  double elapsed;  // seconds from the start of the call to the report
};

}  // namespace streamoverlap
