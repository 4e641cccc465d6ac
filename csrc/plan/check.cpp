#include "check.h"

#include <set>
#include <string>
#include <utility>

#include "clocks.h"
#include "deadlock.h"
#include "flags.h"
#include "graph.h"
#include "held_up.h"
#include "malformed.h"
#include "report.h"
#include "requirements.h"
#include "values.h"

namespace streamoverlap::plan {
namespace {

void check_events(const Graph& graph, Report& report) {
  for (const int wait : graph.unrecorded) {
    report.add(FaultKind::UnrecordedEvent,
               graph.describe(wait) + " is issued before any record of the event: it waits for nothing",
               graph.places({wait}));
  }
  for (const int record : graph.recorded_twice) {
    report.add(FaultKind::UnrecordedEvent, graph.describe(record) + " is not the first record of the event",
               graph.places({record}));
  }
}

void check_order(const Graph& graph, const std::vector<int>& order, Report& report) {
  Clocks clocks(graph, Edges::All);
  clocks.compute(order);
  std::set<std::pair<int, int>> raced;
  for (const Requirement& requirement : requirements(graph)) {
    if (holds(requirement, graph, clocks)) continue;
    const bool race = requirement.rule == Requirement::Rule::Race;
    if (race && !raced.emplace(requirement.before, requirement.after).second) continue;
    report_broken(requirement, graph, clocks, report);
  }
}

}  // namespace

const char* name(FaultKind value) {
  constexpr const char* names[] = {"race",   "deadlock", "not joined",  "unrecorded event", "flag state",
                                   "credit", "held up",  "wrong value", "malformed"};
  return names[static_cast<int>(value)];
}

std::vector<Fault> check(const std::vector<Plan>& plans) { return check_sequence({plans}); }

std::vector<Fault> check_sequence(const std::vector<std::vector<Plan>>& calls) {
  Report report;
  if (calls.empty()) return {};
  check_form(calls, report);
  if (!report.empty()) return report.take();

  const Graph graph(calls);
  check_events(graph, report);
  check_flags(graph, report);
  const std::vector<int> order = order_of(graph, report);
  if (order.empty()) return report.take();  // a cycle: nothing is before anything

  check_one_queue(graph, report);
  Clocks local(graph, Edges::Local);
  local.compute(order);
  check_any_order(graph, local, report);
  check_held_up(graph, report);
  check_order(graph, order, report);
  check_values(graph, order, report);
  return report.take();
}

}  // namespace streamoverlap::plan
