#include "simulate.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <queue>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "graph.h"
#include "malformed.h"
#include "report.h"

namespace streamoverlap::plan {
namespace {

struct Task {
  const Op* op = nullptr;
  int rank = 0, stream = 0;
  int node = 0;  // in the graph
  bool finished = false;
  double issued = 0;
  double remaining = 0;  // of its work on a shared resource, in seconds of it alone
  double share = 0;      // of the multiprocessors that it can use
  double link = 0;       // of its links
  Span span;
  std::vector<int> released;  // tasks that have got to their Wait or Await and need this one
};

struct Stream {
  std::vector<int> tasks;
  std::size_t next = 0;
};

class Simulation {
 public:
  Simulation(const Graph& graph, const Costs& costs, const Sizes& sizes, bool captured)
      : graph_(graph),
        costs_(costs),
        sizes_(sizes),
        engine_(graph.world),
        outgoing_(graph.world),
        incoming_(graph.world) {
    task_of_.assign(graph.nodes.size(), -1);
    streams_.resize(static_cast<std::size_t>(graph.world) * kMaxStreams);
    for (int rank = 0; rank < graph.world; ++rank) add_rank(rank, captured);
  }

  std::vector<std::vector<Span>> run() {
    for (Stream& stream : streams_) start_next(stream, 0);
    while (!events_.empty() || !sharing_.empty()) step();
    require_all_finished();
    std::vector<std::vector<Span>> spans(graph_.world);
    for (const Task& task : tasks_) spans[task.rank].push_back(task.span);
    return spans;
  }

 private:
  struct Event {
    double time;
    int task;
    bool shares;  // its latency is over and its work on a shared resource begins; else the task is finished
    bool operator>(const Event& other) const { return std::tie(time, task) > std::tie(other.time, other.task); }
  };

  void add_rank(int rank, bool captured) {
    double issued = 0;
    for (int node = graph_.begin(0, rank) + 1; node < graph_.issued(0, rank); ++node) {
      Task task;
      task.op = graph_.nodes[node].op;
      task.rank = rank;
      task.stream = rank * kMaxStreams + task.op->stream;
      task.node = node;
      if (!captured && !is_empty(task)) issued += costs_.issue[static_cast<int>(task.op->kind)];
      task.issued = issued;
      task_of_[node] = static_cast<int>(tasks_.size());
      streams_[task.stream].tasks.push_back(task_of_[node]);
      tasks_.push_back(std::move(task));
    }
  }

  // A chunk without rows, which executors leave out.
  bool is_empty(const Task& task) const { return task.op->is_data() && sizes_.rows(task.op->writes[0]) == 0; }

  double bytes_of(const Region& region) const { return static_cast<double>(sizes_.bytes(region)); }

  void start_next(Stream& stream, double now) {
    if (stream.next == stream.tasks.size()) return;
    const int id = stream.tasks[stream.next++];
    Task& task = tasks_[id];
    const double start = std::max(now, task.issued);
    task.span.start = start;
    if (is_empty(task)) return finish_at(start, id);
    const double bytes = task.op->is_data() ? bytes_of(task.op->writes[0]) : 0;
    switch (task.op->kind) {
      case Kind::Gemm: {
        const std::int64_t rows = sizes_.rows(task.op->writes[0]);
        const GemmCost alone = gemm_cost(costs_, rows, sizes_.n, sizes_.k, task.op->c() != nullptr);
        StoreCost cost = {alone.seconds, alone.share, 0};
        if (task.op->writes_peer(task.rank)) cost = store_cost(costs_, alone, bytes);
        task.share = cost.share;
        task.link = cost.link;
        return share_after(start + costs_.gemm_latency, cost.seconds - costs_.gemm_latency, id);
      }
      case Kind::Put:
        task.link = 1;
        return share_after(start + costs_.put_latency, bytes / link_bandwidth(costs_, bytes), id);
      case Kind::Quantise:
      case Kind::Reduce: {
        task.share = 1;
        double touched = bytes;
        for (const Region& region : task.op->reads) touched += bytes_of(region);
        return share_after(start + costs_.copy_latency, touched / costs_.reduce_bandwidth, id);
      }
      case Kind::Copy:
        return finish_at(start + costs_.copy_latency + bytes / costs_.copy_bandwidth, id);
      case Kind::Notify:
        return finish_at(start + costs_.notify, id);
      case Kind::Record:
        return finish_at(start + costs_.record, id);
      case Kind::Await:
      case Kind::Wait:
        return wait_for_source(id);
    }
  }

  void wait_for_source(int id) {
    const Task& task = tasks_[id];
    const int source = graph_.nodes[task.node].source;
    if (source < 0) {  // a credit is there from the start; nothing else comes without a source
      const bool credit = task.op->kind == Kind::Await && task.op->flag.kind == FlagKind::Empty;
      if (credit) finish_at(task.span.start + costs_.await, id);
      return;
    }
    Task& setter = tasks_[task_of_[source]];
    if (setter.finished) return finish_at(end_of_wait(task, setter), id);
    setter.released.push_back(id);
  }

  double end_of_wait(const Task& task, const Task& setter) const {
    const bool awaits = task.op->kind == Kind::Await;
    const double seen = setter.span.end + (awaits ? costs_.flag_latency : 0);
    return std::max(task.span.start, seen) + (awaits ? costs_.await : costs_.wait);
  }

  // Constants that are finite each may give together what is not.
  void expect_finite(double seconds, int id) const {
    if (std::isfinite(seconds)) return;
    throw std::invalid_argument("costs and sizes are such that " + graph_.describe(tasks_[id].node) +
                                " would take for ever");
  }

  void finish_at(double time, int id) {
    expect_finite(time, id);
    events_.push({time, id, false});
  }

  void share_after(double time, double alone, int id) {
    expect_finite(time + alone, id);
    tasks_[id].remaining = alone;
    events_.push({time, id, true});
  }

  void finish(int id, double now) {
    Task& task = tasks_[id];
    task.span.end = now;
    task.finished = true;
    for (const int waiting : task.released) finish_at(end_of_wait(tasks_[waiting], task), waiting);
    start_next(streams_[task.stream], now);
  }

  // By how much others slow a task down on the resource that it has the least of. GEMMs and Reduces at once do not, as
  // long as one runs on multiprocessors that the last waves of another leave idle.
  double slowdown(const Task& task) const {
    double most = 1;
    if (task.share > 0) most = std::max(most, engine_[task.rank]);
    if (task.link > 0) most = std::max({most, outgoing_[task.rank], incoming_[task.op->writes[0].rank]});
    return most;
  }

  void count(const Task& task, int change) {
    engine_[task.rank] += change * task.share;
    if (task.link == 0) return;
    outgoing_[task.rank] += change * task.link;
    incoming_[task.op->writes[0].rank] += change * task.link;
  }

  // On to the next event, or to the end of the work that is the first to be done at the present rates.
  void step() {
    std::size_t first = 0;
    double done = std::numeric_limits<double>::infinity();
    for (std::size_t i = 0; i < sharing_.size(); ++i) {
      const Task& task = tasks_[sharing_[i]];
      const double end = now_ + task.remaining * slowdown(task);
      if (end < done) std::tie(done, first) = std::pair(end, i);
    }
    const bool event_first = sharing_.empty() || (!events_.empty() && events_.top().time < done);
    const double then = event_first ? events_.top().time : done;
    for (const int id : sharing_) {
      Task& task = tasks_[id];
      task.remaining = std::max(0.0, task.remaining - (then - now_) / slowdown(task));
    }
    now_ = then;
    if (!event_first) {
      const int id = sharing_[first];
      sharing_.erase(sharing_.begin() + static_cast<std::ptrdiff_t>(first));
      count(tasks_[id], -1);
      return finish(id, now_);
    }
    const Event event = events_.top();
    events_.pop();
    if (!event.shares) return finish(event.task, now_);
    count(tasks_[event.task], 1);
    sharing_.push_back(event.task);
  }

  void require_all_finished() const {
    for (const Task& task : tasks_) {
      const Stream& stream = streams_[task.stream];
      // What its stream has got to, not what is behind that.
      if (task.finished || &tasks_[stream.tasks[stream.next - 1]] != &task) continue;
      throw std::invalid_argument("the plans deadlock: " + graph_.describe(task.node) + " waits for ever" +
                                  reason(task));
    }
  }

  std::string reason(const Task& task) const {
    const int source = graph_.nodes[task.node].source;
    if (source >= 0) return " for " + graph_.describe(source);
    return task.op->kind == Kind::Wait ? ": its event is not recorded before" : ": nobody sets its flag";
  }

  const Graph& graph_;
  const Costs& costs_;
  const Sizes& sizes_;
  double now_ = 0;
  std::vector<Task> tasks_;  // rank by rank, in issue order
  std::vector<int> task_of_;
  std::vector<Stream> streams_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::vector<int> sharing_;
  std::vector<double> engine_;               // what the tasks at work could use of the GPU, by rank; 1 is all of it
  std::vector<double> outgoing_, incoming_;  // the same of each link
};

}  // namespace

std::vector<std::vector<Span>> simulate(const std::vector<Plan>& plans, const Costs& costs, const Sizes& sizes,
                                        bool graph) {
  validate(costs);
  if (plans.empty()) throw std::invalid_argument("plans is empty; expected the plan of every rank");
  const Calls calls{plans};
  Report report;
  check_form(calls, report);
  if (!report.empty()) throw std::invalid_argument(report.take().front().message);
  const Graph all(calls);
  return Simulation(all, costs, sizes, graph).run();
}

}  // namespace streamoverlap::plan
