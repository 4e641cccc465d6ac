// reduce_scatter and gemm_reduce_scatter: rank s gets the sum over all ranks of their part for shard s. A rank's own
// shard comes last, so that its GEMM hides the arrival of the others' partials.
#include "scatter.h"

#include <vector>

#include "sums.h"

namespace streamoverlap::plan {

// Each partial goes straight to the rank that needs it; that rank sums all W of them.
Plan scatter_direct(const Spec& spec, int rank) {
  Writer w(spec, rank);
  std::vector<std::vector<int>> sent(spec.chunks, std::vector<int>(spec.world));

  w.take_credits();
  for (int step = 1; step < spec.world; ++step) {
    const int to = w.peer(step);
    for (int c = 0; c < spec.chunks; ++c) {
      const Region slot = Writer::slot_of(to, rank, c);
      sent[c][step] = send(w, direct_partial(w, to, c, slot), slot, c);
    }
  }

  // One chunk after the other on a compute stream of its own: multiply, then add what has arrived.
  const std::vector<Stream> compute = own_partials(w);
  for (int c = 0; c < spec.chunks; ++c) sum_own(w, compute[c], c, sent[c]);
  w.return_credits();
  return w.join();
}

// The partial of shard s starts at rank s+1 and travels the ring to rank s; every rank on the way adds its own.
Plan scatter_ring(const Spec& spec, int rank) {
  Writer w(spec, rank);
  const int next = w.peer(1);
  std::vector<int> sent(spec.chunks);

  w.take_credits();
  for (int step = 0; step < spec.world; ++step) {
    const int shard = w.peer(-1 - step);
    const bool last = step + 1 == spec.world;
    for (int c = 0; c < spec.chunks; ++c) {
      const Region slot = Writer::slot_of(next, shard, c);
      const Region sum = last ? w.output(shard, c) : made_in(w, w.scratch(shard, c), slot);
      const Made part = ring_partial(w, step, shard, c, sent[c], sum);
      if (!last) sent[c] = send(w, part, slot, step * spec.chunks + c);
    }
  }
  w.return_credits();
  return w.join();
}

}  // namespace streamoverlap::plan
