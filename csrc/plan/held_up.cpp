#include "held_up.h"

namespace streamoverlap::plan {
namespace {

constexpr const char* kPart = ", which is part of the join, and the caller may join at any time or never";

void check_call(const Graph& graph, int call, int rank, Report& report) {
  const int join = graph.nodes[graph.end(call, rank)].chain;
  for (int id = graph.begin(call, rank) + 1; id < graph.issued(call, rank); ++id) {
    const Node& node = graph.nodes[id];
    if (node.chain == join && node.works()) {
      report.add(FaultKind::HeldUp, "the exchange is held up: nothing may come of " + graph.describe(id) + kPart,
                 graph.places({id}));
    }
    if (!node.is(Kind::Wait) || node.source < 0 || node.chain == join) continue;
    if (graph.nodes[node.source].chain == join) {
      report.add(FaultKind::HeldUp,
                 "the exchange is held up: " + graph.describe(id) + " waits for " + graph.describe(node.source) + kPart,
                 graph.places({id, node.source}));
    }
  }
}

}  // namespace

void check_held_up(const Graph& graph, Report& report) {
  for (int call = 0; call < static_cast<int>(graph.calls.size()); ++call) {
    for (int rank = 0; rank < graph.world; ++rank) check_call(graph, call, rank, report);
  }
}

}  // namespace streamoverlap::plan
