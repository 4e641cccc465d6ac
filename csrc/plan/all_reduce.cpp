// all_reduce: a reduce-scatter, then an all-gather of the sums, chunk by chunk: a chunk is gathered as soon as it is
// summed. A rank's own shard comes last in the one and so is the first in the other. The output takes partials on their
// way, and the copy of the input; no scratch memory is needed.
#include "all_reduce.h"

#include <vector>

#include "writer.h"

namespace streamoverlap::plan {

// Each partial goes straight to the rank that sums that shard, each sum straight to all others. A rank may get the sum
// of another while it still adds up what that rank sent it, so the slot has room for partials and sums.
Plan all_reduce_direct(const Spec& spec, int rank) {
  Writer w(spec, rank);
  std::vector<std::vector<int>> sent(spec.chunks, std::vector<int>(spec.world));
  const auto sum_in = [&](int shard) { return spec.world + shard; };

  w.take_credits();
  for (int c = 0; c < spec.chunks; ++c) {
    for (int step = 1; step < spec.world; ++step) {
      const int to = w.peer(step);
      sent[c][step] = w.put(w.source(to, c), Writer::slot_of(to, rank, c), c);
    }
  }

  for (int c = 0; c < spec.chunks; ++c) {
    const Stream compute = w.next_compute();
    const Region sum = w.output(rank, c);
    for (int step = 1; step < spec.world; ++step) w.wait(compute, w.await(w.peer(-step), c, sent[c][step]));
    // In the order of ranks, so the result does not depend on which rank sums.
    std::vector<Region> terms;
    for (int j = 0; j < spec.world; ++j) terms.push_back(j == rank ? w.source(rank, c) : w.slot(j, c));
    w.reduce(compute, terms, sum);
    if (spec.world > 1) w.wait(kSend, w.record(compute));
    for (int step = 1; step < spec.world; ++step) {
      sent[c][step] = w.put(sum, Writer::slot_of(w.peer(step), sum_in(rank), c), spec.chunks + c);
    }
  }

  for (int c = 0; c < spec.chunks; ++c) {
    for (int step = 1; step < spec.world; ++step) {
      const int from = w.peer(-step);
      w.wait(kSend, w.await(from, spec.chunks + c, sent[c][step]));
      w.copy(w.slot(sum_in(from), c), w.output(from, c));
    }
  }
  w.return_credits();
  return w.join();
}

// The partial of shard s starts at rank s+1 and travels to rank s, which completes it; from there the sum goes once
// more around the ring. It comes to a rank after that rank's partial has gone into it, so it may take the same place.
Plan all_reduce_ring(const Spec& spec, int rank) {
  Writer w(spec, rank);
  const int next = w.peer(1), previous = w.peer(-1);
  std::vector<int> sent(spec.chunks);

  w.take_credits();
  for (int step = 0; step < spec.world; ++step) {
    const int shard = w.peer(-1 - step);
    const bool last = step + 1 == spec.world;
    for (int c = 0; c < spec.chunks; ++c) {
      Region part = w.source(shard, c);
      if (step > 0 || last) {
        const Stream compute = w.next_compute();
        std::vector<Region> terms = {part};
        if (step > 0) {
          w.wait(compute, w.await(previous, (step - 1) * spec.chunks + c, sent[c]));
          terms.insert(terms.begin(), w.slot(shard, c));
        }
        part = w.output(shard, c);
        w.reduce(compute, terms, part);
        if (spec.world > 1) w.wait(kSend, w.record(compute));
      }
      if (spec.world > 1) sent[c] = w.put(part, Writer::slot_of(next, shard, c), step * spec.chunks + c);
    }
  }

  for (int step = 1; step < spec.world; ++step) {
    const int shard = w.peer(-step);
    for (int c = 0; c < spec.chunks; ++c) {
      const int message = (spec.world - 1 + step) * spec.chunks + c;
      w.wait(kSend, w.await(previous, message - spec.chunks, sent[c]));
      if (step + 1 < spec.world) sent[c] = w.put(w.slot(shard, c), Writer::slot_of(next, shard, c), message);
      w.copy(w.slot(shard, c), w.output(shard, c));
    }
  }
  w.return_credits();
  return w.join();
}

}  // namespace streamoverlap::plan
