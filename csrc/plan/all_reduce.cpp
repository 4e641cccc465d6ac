// all_reduce and gemm_all_reduce: a reduce-scatter, then an all-gather of the sums, chunk by chunk: a chunk is gathered
// as soon as it is summed. A rank's own shard comes last in the one and so is the first in the other. The output takes
// partials on their way, and the copy of the input.
#include "all_reduce.h"

#include <vector>

#include "sums.h"

namespace streamoverlap::plan {

// Each partial goes straight to the rank that sums that shard, each sum straight to all others. A rank may get the sum
// of another while it still adds up what that rank sent it, so the slot has room for partials and sums.
Plan all_reduce_direct(const Spec& spec, int rank) {
  Writer w(spec, rank);
  std::vector<std::vector<int>> sent(spec.chunks, std::vector<int>(spec.world));

  w.take_credits();
  for (int c = 0; c < spec.chunks; ++c) {
    for (int step = 1; step < spec.world; ++step) {
      const int to = w.peer(step);
      const Region slot = Writer::slot_of(to, rank, c);
      sent[c][step] = send(w, direct_partial(w, to, c, slot), slot, c);
    }
  }

  const std::vector<Stream> compute = own_partials(w);
  for (int c = 0; c < spec.chunks; ++c) {
    sum_own(w, compute[c], c, sent[c]);
    for (int step = 1; step < spec.world; ++step) {
      const Region to = Writer::slot_of(w.peer(step), sum_in(spec, rank), c);
      sent[c][step] = send(w, {w.output(rank, c), compute[c]}, to, spec.chunks + c);
    }
  }

  for (int c = 0; c < spec.chunks; ++c) {
    for (int step = 1; step < spec.world; ++step) {
      const int from = w.peer(-step);
      w.wait(kSend, w.await(from, spec.chunks + c, sent[c][step]));
      w.copy(w.slot(sum_in(spec, from), c), w.output(from, c));
    }
  }
  w.return_credits();
  return w.join();
}

// The partial of shard s starts at rank s+1 and travels to rank s, which completes it; from there the sum goes once
// more around the ring. It comes to a rank after that rank's partial has gone into it, so it may take the same place,
// unless partials are packed and take less room.
Plan all_reduce_ring(const Spec& spec, int rank) {
  Writer w(spec, rank);
  const int next = w.peer(1), previous = w.peer(-1);
  std::vector<int> sent(spec.chunks);

  w.take_credits();
  for (int step = 0; step < spec.world; ++step) {
    const int shard = w.peer(-1 - step);
    for (int c = 0; c < spec.chunks; ++c) {
      const bool last = step + 1 == spec.world;  // the sum, which is a result here too
      const Region slot = Writer::slot_of(next, last ? sum_in(spec, shard) : shard, c);
      const Region sum = last ? w.output(shard, c) : made_in(w, w.output(shard, c), slot);
      const Made part = ring_partial(w, step, shard, c, sent[c], sum);
      if (spec.world > 1) sent[c] = send(w, part, slot, step * spec.chunks + c);
    }
  }

  for (int step = 1; step < spec.world; ++step) {
    const int shard = w.peer(-step), at = sum_in(spec, shard);
    for (int c = 0; c < spec.chunks; ++c) {
      const int message = (spec.world - 1 + step) * spec.chunks + c;
      w.wait(kSend, w.await(previous, message - spec.chunks, sent[c]));
      if (step + 1 < spec.world) sent[c] = w.put(w.slot(at, c), Writer::slot_of(next, at, c), message);
      w.copy(w.slot(at, c), w.output(shard, c));
    }
  }
  w.return_credits();
  return w.join();
}

}  // namespace streamoverlap::plan
