#include "interpreter.h"

#include <algorithm>

#include "search.h"

namespace streamoverlap::interpreter {

bool add(Report& report, const Limits& limits, std::string breakage) {
  auto& all = report.breakages;
  if (std::find(all.begin(), all.end(), breakage) == all.end()) all.push_back(std::move(breakage));
  return all.size() < limits.breakages;
}

Report interpret(const Calls& calls, const Limits& limits) {
  Report report;
  const Program program(calls, Queues::Streams);
  for (const std::string& fault : program.faults) add(report, limits, fault);
  const bool runnable = std::none_of(program.faults.begin(), program.faults.end(),
                                     [](const std::string& f) { return f.rfind("malformed", 0) == 0; });
  const auto more = [&] { return report.breakages.size() < limits.breakages; };
  if (!runnable) return report;
  // Cheap searches first: most broken plans need no more.
  if (more()) delays(program, limits, report);
  if (more()) one_queue(calls, limits, report);
  if (more()) topological_orders(program, limits, report);
  if (more() && limits.schedules > 0) random_schedules(program, limits, report);
  if (more() && limits.states > 0) every_interleaving(program, limits, report);
  return report;
}

}  // namespace streamoverlap::interpreter
