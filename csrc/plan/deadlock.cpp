#include "deadlock.h"

#include <algorithm>
#include <string>

namespace streamoverlap::plan {
namespace {

// Runs queues, each in its order; `source(node)` has to be over before a node, -1 where there is none.
template <class Source>
class Run {
 public:
  Run(const std::vector<std::vector<int>>& queues, std::size_t nodes, Source source)
      : queues_(queues),
        source_(source),
        heads_(queues.size(), 0),
        queue_of_(nodes, -1),
        done_(nodes, 0),
        first_waiting_(nodes, -1),
        next_waiting_(queues.size(), -1) {
    std::vector<int> ready;
    for (int queue = static_cast<int>(queues.size()) - 1; queue >= 0; --queue) {
      total_ += queues[queue].size();
      for (const int node : queues[queue]) queue_of_[node] = queue;
      ready.push_back(queue);
    }
    order_.reserve(total_);
    while (!ready.empty()) {
      const int queue = ready.back();
      ready.pop_back();
      advance(queue, ready);
    }
  }

  bool finished() const { return order_.size() == total_; }
  std::vector<int>& order() { return order_; }

  // The heads of queues that wait for each other, each for a node in the queue of the next.
  std::vector<int> cycle() const {
    int queue = 0;
    while (heads_[queue] == queues_[queue].size()) ++queue;
    std::vector<int> path;
    for (int node = head(queue);; node = head(queue_of_[source_(node)])) {
      const auto seen = std::find(path.begin(), path.end(), node);
      if (seen != path.end()) return {seen, path.end()};
      path.push_back(node);
    }
  }

 private:
  int head(int queue) const { return queues_[queue][heads_[queue]]; }

  void advance(int queue, std::vector<int>& ready) {
    while (heads_[queue] < queues_[queue].size()) {
      const int node = head(queue);
      const int source = source_(node);
      if (source >= 0 && !done_[source]) {
        next_waiting_[queue] = first_waiting_[source];
        first_waiting_[source] = queue;
        return;
      }
      ++heads_[queue];
      done_[node] = 1;
      order_.push_back(node);
      for (int waiting = first_waiting_[node]; waiting >= 0; waiting = next_waiting_[waiting]) {
        ready.push_back(waiting);
      }
    }
  }

  const std::vector<std::vector<int>>& queues_;
  const Source source_;
  std::vector<std::size_t> heads_;
  std::vector<int> queue_of_;
  std::vector<char> done_;
  std::vector<int> first_waiting_;  // by node: a queue that waits for it
  std::vector<int> next_waiting_;   // by queue: another that waits for the same node
  std::vector<int> order_;
  std::size_t total_ = 0;
};

std::string told(const Graph& graph, const std::vector<int>& cycle) {
  std::string text;
  for (std::size_t i = 0; i < cycle.size(); ++i) {
    const int blocker = cycle[(i + 1) % cycle.size()];
    const int source = graph.nodes[cycle[i]].source;
    text += (i ? "; " : "") + graph.describe(cycle[i]) + " waits for " + graph.describe(source);
    if (source != blocker) text += ", which can be stuck behind " + graph.describe(blocker);
  }
  return text;
}

void add_cycle(const char* model, const std::vector<int>& cycle, const Graph& graph, Report& report) {
  report.add(FaultKind::Deadlock, model + told(graph, cycle), graph.places(cycle));
}

// The Awaits that an adversary can be stuck in: a waits on b if b is an Await of the rank that notifies a, and is
// not after that Notify by the rank's own edges. Awaits that wait on none that is left are struck off until only
// cycles, and what leads to them, are left.
class AnyOrder {
 public:
  AnyOrder(const Graph& graph, const Clocks& local)
      : g_(graph),
        local_(local),
        awaits_(graph.chains.size()),
        first_(graph.chains.size(), 0),
        struck_(graph.nodes.size(), 0),
        first_waiting_(graph.nodes.size(), -1),
        next_waiting_(graph.nodes.size(), -1) {
    std::vector<int> ready;
    for (std::size_t chain = 0; chain < g_.chains.size(); ++chain) {
      for (const int node : g_.chains[chain]) {
        if (!g_.nodes[node].is(Kind::Await)) continue;
        awaits_[chain].push_back(node);
        ready.push_back(node);
      }
    }
    left_ = ready.size();
    while (!ready.empty()) {
      const int await = ready.back();
      ready.pop_back();
      const int blocker = blocker_of(await);
      if (blocker >= 0) {
        next_waiting_[await] = first_waiting_[blocker];
        first_waiting_[blocker] = await;
        continue;
      }
      struck_[await] = 1;
      --left_;
      for (int other = first_waiting_[await]; other >= 0; other = next_waiting_[other]) ready.push_back(other);
    }
  }

  bool stuck() const { return left_ > 0; }

  std::vector<int> cycle() {
    int await = 0;
    while (!g_.nodes[await].is(Kind::Await) || struck_[await]) ++await;
    std::vector<int> path;
    for (;; await = blocker_of(await)) {
      const auto seen = std::find(path.begin(), path.end(), await);
      if (seen != path.end()) return {seen, path.end()};
      path.push_back(await);
    }
  }

 private:
  // What comes after the Notify in a chain is its tail, so the first Await that is left decides for the chain.
  int blocker_of(int await) {
    const int notify = g_.nodes[await].source;
    if (notify < 0) return -1;
    const int rank = g_.nodes[notify].rank;
    for (int chain = g_.first_chain[rank]; chain < g_.first_chain[rank + 1]; ++chain) {
      std::size_t& first = first_[chain];
      while (first < awaits_[chain].size() && struck_[awaits_[chain][first]]) ++first;
      if (first < awaits_[chain].size() && !local_.before(notify, awaits_[chain][first])) return awaits_[chain][first];
    }
    return -1;
  }

  const Graph& g_;
  const Clocks& local_;
  std::vector<std::vector<int>> awaits_;  // by chain
  std::vector<std::size_t> first_;        // by chain: the first that is left
  std::vector<char> struck_;
  // By Await: those to look at again once it is struck off, as a list.
  std::vector<int> first_waiting_, next_waiting_;
  std::size_t left_ = 0;
};

}  // namespace

std::vector<int> order_of(const Graph& graph, Report& report) {
  for (const int await : graph.never_set) {
    report.add(FaultKind::Deadlock,
               "deadlock with independent streams: " + graph.describe(await) + " waits for a flag that nobody sets",
               graph.places({await}));
  }
  Run run(graph.chains, graph.nodes.size(), [&](int node) { return graph.nodes[node].source; });
  if (run.finished()) return std::move(run.order());
  add_cycle("deadlock with independent streams: ", run.cycle(), graph, report);
  return {};
}

void check_one_queue(const Graph& graph, Report& report) {
  std::vector<std::vector<int>> queues(graph.world);
  for (int node = 0; node < static_cast<int>(graph.nodes.size()); ++node) {
    if (graph.nodes[node].is(Kind::Notify) || graph.nodes[node].is(Kind::Await)) {
      queues[graph.nodes[node].rank].push_back(node);
    }
  }
  Run run(queues, graph.nodes.size(), [&](int node) { return graph.nodes[node].source; });
  if (run.finished()) return;
  add_cycle("deadlock with the streams of each rank in one queue: ", run.cycle(), graph, report);
}

bool runs_in_any_order(const Graph& graph, const Clocks& local) { return !AnyOrder(graph, local).stuck(); }

void check_any_order(const Graph& graph, const Clocks& local, Report& report) {
  AnyOrder any(graph, local);
  if (!any.stuck()) return;
  add_cycle("deadlock with the ops of each rank in some topological order: ", any.cycle(), graph, report);
}

}  // namespace streamoverlap::plan
