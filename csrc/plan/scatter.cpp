// reduce_scatter and gemm_reduce_scatter: rank s gets the sum over all ranks of their part for shard s. A rank's own
// shard comes last, so that its GEMM hides the arrival of the others' partials.
#include "scatter.h"

#include <vector>

#include "builders.h"
#include "writer.h"

namespace streamoverlap::plan {

// Each partial goes straight to the rank that needs it; that rank sums all W of them.
Plan scatter_direct(const Spec& spec, int rank) {
  Writer w(spec, rank);
  const bool accumulate = multiplies(spec) && spec.reduction == Reduction::Accumulate;
  std::vector<std::vector<int>> sent(spec.world, std::vector<int>(spec.chunks));

  w.take_credits();
  for (int step = 1; step < spec.world; ++step) {
    const int to = w.peer(step);
    for (int c = 0; c < spec.chunks; ++c) {
      Region part = w.source(to, c);
      if (multiplies(spec)) {
        const Stream compute = w.next_compute();
        w.gemm(compute, {w.input(to, c)}, w.scratch(to, c), false);
        w.wait(kSend, w.record(compute));
        part = w.scratch(to, c);
      }
      sent[step][c] = w.put(part, Writer::slot_of(to, rank, c), c);
    }
  }

  // One chunk after the other on a compute stream of its own: multiply, then add what has arrived.
  std::vector<Stream> compute(spec.chunks);
  for (int c = 0; c < spec.chunks; ++c) {
    compute[c] = w.next_compute();
    if (multiplies(spec) && !accumulate) {
      w.gemm(compute[c], {w.input(rank, c)}, w.scratch(rank, c), true);
    }
  }
  for (int c = 0; c < spec.chunks; ++c) {
    for (int step = 1; step < spec.world; ++step) {
      w.wait(compute[c], w.await(w.peer(-step), c, sent[step][c]));
    }
    // Summed in the order of ranks, so the result does not depend on which rank sums.
    std::vector<Region> terms;
    for (int j = 0; j < spec.world; ++j) {
      if (j != rank) {
        terms.push_back(w.slot(j, c));
      } else if (!accumulate) {
        terms.push_back(multiplies(spec) ? w.scratch(rank, c) : w.source(rank, c));
      }
    }
    if (!accumulate) {
      w.reduce(compute[c], terms, w.output(rank, c));
      continue;
    }
    if (terms.size() > 1) {
      w.reduce(compute[c], terms, w.scratch(rank, c));
      terms = {w.scratch(rank, c)};
    }
    terms.insert(terms.begin(), w.input(rank, c));
    w.gemm(compute[c], terms, w.output(rank, c), true);
  }
  w.return_credits();
  return w.join();
}

// The partial of shard s starts at rank s+1 and travels the ring to rank s; every rank on the way adds its own.
Plan scatter_ring(const Spec& spec, int rank) {
  Writer w(spec, rank);
  const bool accumulate = multiplies(spec) && spec.reduction == Reduction::Accumulate;
  const int next = w.peer(1), previous = w.peer(-1);
  std::vector<int> sent(spec.chunks);

  w.take_credits();
  for (int step = 0; step < spec.world; ++step) {
    const int shard = w.peer(-1 - step);
    const bool last = step + 1 == spec.world;
    for (int c = 0; c < spec.chunks; ++c) {
      const Stream compute = w.next_compute();
      const Region sum = last ? w.output(shard, c) : w.scratch(shard, c);
      std::vector<Region> terms = {w.source(shard, c)};
      // Where the sum is a Reduce of its own, the GEMM need not wait for what the neighbour sends.
      if (multiplies(spec) && !accumulate) {
        const Region product = spec.world == 1 ? sum : w.scratch(shard, c);
        w.gemm(compute, terms, product, last);
        terms = {product};
      }
      if (step > 0) {
        w.wait(compute, w.await(previous, (step - 1) * spec.chunks + c, sent[c]));
        terms.insert(accumulate ? terms.end() : terms.begin(), w.slot(shard, c));
      }
      if (accumulate) {
        w.gemm(compute, terms, sum, last);
        terms = {sum};
      } else if (step > 0 || (last && !multiplies(spec))) {
        w.reduce(compute, terms, sum);
        terms = {sum};
      }
      if (last) continue;
      const Region& part = terms[0];
      const bool computed = step > 0 || multiplies(spec);
      if (computed) w.wait(kSend, w.record(compute));
      sent[c] = w.put(part, Writer::slot_of(next, shard, c), step * spec.chunks + c);
    }
  }
  w.return_credits();
  return w.join();
}

}  // namespace streamoverlap::plan
