#include "plan_cache.h"

#include <stdexcept>
#include <string>
#include <vector>

#include "../plan/builders.h"
#include "../plan/check.h"
#include "../plan/prune.h"

namespace streamoverlap {

PlanCache& PlanCache::instance() {
  static PlanCache cache;
  return cache;
}

std::shared_ptr<const plan::Plan> PlanCache::get(const plan::Spec& spec, int rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<const plan::Plan>& entry = plans_[{spec, rank}];
  if (entry == nullptr) {
    const std::vector<plan::Plan> plans = plan::prune(plan::build_all(spec));
    std::vector<plan::Fault> faults = plan::check_sequence({plans, plans});
    if (!faults.empty()) {
      std::string text = "the plan for " + plan::to_string(spec) + " is faulty, please report it:";
      for (const plan::Fault& fault : faults) text += "\n  " + std::string(name(fault.kind)) + ": " + fault.message;
      throw std::logic_error(text);
    }
    entry = std::make_shared<const plan::Plan>(plans[rank]);
  }
  return entry;
}

}  // namespace streamoverlap
