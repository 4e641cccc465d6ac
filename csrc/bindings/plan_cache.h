// Plans of this process: built, pruned and checked at first use, then shared by all communicators.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "../plan/plan.h"

namespace streamoverlap {

class PlanCache {
 public:
  static PlanCache& instance();

  // Throws std::logic_error with the checker's messages if the plan has a fault: nothing faulty ever runs.
  std::shared_ptr<const plan::Plan> get(const plan::Spec&, int rank);

 private:
  std::mutex mutex_;
  std::map<std::pair<plan::Spec, int>, std::shared_ptr<const plan::Plan>> plans_;
};

}  // namespace streamoverlap
