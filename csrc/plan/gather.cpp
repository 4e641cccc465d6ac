// all_gather and all_gather_gemm: every rank gets every shard; each is multiplied, or copied out, when it is there.
#include "gather.h"

#include <vector>

#include "writer.h"

namespace streamoverlap::plan {
namespace {

// What a rank does with a chunk: `source` holds it once `arrived` is reached (-1: from the start).
class Consumer {
 public:
  explicit Consumer(Writer& writer, const Spec& spec) : w_(writer), spec_(spec) {}

  void operator()(int shard, int chunk, const Region& source, int arrived) {
    if (spec_.operation == Operation::AllGather) {
      if (source != w_.output(shard, chunk)) copy(source, w_.output(shard, chunk), arrived);
      return;
    }
    const Stream compute = w_.next_compute();
    if (arrived >= 0) w_.wait(compute, arrived);
    w_.gemm(compute, {source}, w_.output(shard, chunk), true);
    if (spec_.keep_gathered) copy(source, w_.gathered(shard, chunk), arrived);
  }

 private:
  void copy(const Region& from, const Region& to, int arrived) {
    if (arrived >= 0) w_.wait(kSend, arrived);
    w_.copy(from, to);
  }

  Writer& w_;
  const Spec& spec_;
};

}  // namespace

// Each shard goes straight to its W-1 users; step t sends to rank+t and receives from rank-t, so that every link
// carries one shard at a time.
Plan gather_direct(const Spec& spec, int rank) {
  Writer w(spec, rank);
  Consumer consume(w, spec);
  std::vector<int> sent(spec.chunks);
  const auto send = [&](int step) {
    for (int c = 0; c < spec.chunks; ++c) {
      sent[c] = w.put(w.source(rank, c), Writer::slot_of(w.peer(step), rank, c), c);
    }
  };

  w.take_credits();
  if (spec.world > 1) send(1);
  for (int c = 0; c < spec.chunks; ++c) consume(rank, c, w.source(rank, c), -1);
  for (int step = 1; step < spec.world; ++step) {
    const std::vector<int> sent_this_step = sent;
    if (step + 1 < spec.world) send(step + 1);
    const int from = w.peer(-step);
    for (int c = 0; c < spec.chunks; ++c) {
      const int arrived = w.await(from, c, sent_this_step[c]);
      consume(from, c, w.slot(from, c), arrived);
    }
  }
  w.return_credits();
  return w.join();
}

// Shards travel around the ring: step t receives the shard of rank-t from the neighbour and passes it on.
Plan gather_ring(const Spec& spec, int rank) {
  Writer w(spec, rank);
  Consumer consume(w, spec);
  const int next = w.peer(1), previous = w.peer(-1);
  std::vector<int> sent(spec.chunks);

  w.take_credits();
  for (int c = 0; c < spec.chunks && spec.world > 1; ++c) {
    sent[c] = w.put(w.source(rank, c), Writer::slot_of(next, rank, c), c);
  }
  for (int c = 0; c < spec.chunks; ++c) consume(rank, c, w.source(rank, c), -1);
  for (int step = 1; step < spec.world; ++step) {
    const int shard = w.peer(-step);
    for (int c = 0; c < spec.chunks; ++c) {
      const int arrived = w.await(previous, (step - 1) * spec.chunks + c, sent[c]);
      if (step + 1 < spec.world) {
        w.wait(kSend, arrived);
        sent[c] = w.put(w.slot(shard, c), Writer::slot_of(next, shard, c), step * spec.chunks + c);
      }
      consume(shard, c, w.slot(shard, c), arrived);
    }
  }
  w.return_credits();
  return w.join();
}

}  // namespace streamoverlap::plan
