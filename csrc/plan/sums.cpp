#include "sums.h"

#include "builders.h"

namespace streamoverlap::plan {
namespace {

bool accumulates(const Spec& spec) { return multiplies(spec) && spec.reduction == Reduction::Accumulate; }

// Where a product lies until it is sent or summed: where results replace it, if that is this rank's for all shards.
Region product(const Writer& w, int shard, int chunk) {
  return scatters(w.spec()) ? w.scratch(shard, chunk) : w.output(shard, chunk);
}

}  // namespace

Region made_in(const Writer& w, const Region& own, const Region& to) {
  return w.spec().transfer == Transfer::Store ? to : own;
}

int sum_in(const Spec& spec, int shard) { return slot_shards(spec) > spec.world ? spec.world + shard : shard; }

Made direct_partial(Writer& w, int shard, int chunk, const Region& to) {
  if (!multiplies(w.spec())) return {w.source(shard, chunk)};
  const Made made = {made_in(w, product(w, shard, chunk), to), w.next_compute()};
  w.gemm(made.stream, {w.input(shard, chunk)}, made.region, false);
  return made;
}

std::vector<Stream> own_partials(Writer& w) {
  std::vector<Stream> compute;
  for (int c = 0; c < w.spec().chunks; ++c) {
    compute.push_back(w.next_compute());
    if (multiplies(w.spec()) && !accumulates(w.spec())) {
      w.gemm(compute[c], {w.input(w.rank(), c)}, product(w, w.rank(), c), true);
    }
  }
  return compute;
}

void sum_own(Writer& w, Stream compute, int chunk, const std::vector<int>& sent) {
  const int rank = w.rank();
  const bool accumulate = accumulates(w.spec());
  for (int step = 1; step < w.world(); ++step) {
    w.wait(compute, w.await(w.peer(-step), chunk, sent[step]));
  }
  // Summed in the order of ranks, so the result does not depend on which rank sums.
  std::vector<Region> terms;
  for (int j = 0; j < w.world(); ++j) {
    if (j != rank) {
      terms.push_back(w.slot(j, chunk));
    } else if (!accumulate) {
      terms.push_back(multiplies(w.spec()) ? product(w, rank, chunk) : w.source(rank, chunk));
    }
  }
  const Region sum = w.output(rank, chunk);
  if (!accumulate) {
    if (terms != std::vector<Region>{sum}) w.reduce(compute, terms, sum);
    return;
  }
  if (terms.size() > 1 || (w.spec().quantised && !terms.empty())) {
    w.reduce(compute, terms, w.scratch(rank, chunk));
    terms = {w.scratch(rank, chunk)};
  }
  terms.insert(terms.begin(), w.input(rank, chunk));
  w.gemm(compute, terms, sum, true);
}

Made ring_partial(Writer& w, int step, int shard, int chunk, int sent, const Region& sum) {
  const Spec& spec = w.spec();
  const bool last = step + 1 == w.world();
  const bool accumulate = accumulates(spec);
  if (!multiplies(spec) && step == 0 && !last) return {w.source(shard, chunk)};
  const Stream compute = w.next_compute();
  std::vector<Region> terms = {w.source(shard, chunk)};
  // Where the sum is a Reduce of its own, the GEMM need not wait for what the neighbour sends.
  if (multiplies(spec) && !accumulate) {
    const Region part = w.world() == 1 ? sum : product(w, shard, chunk);
    w.gemm(compute, terms, part, last);
    terms = {part};
  }
  if (step > 0) {
    w.wait(compute, w.await(w.peer(-1), (step - 1) * spec.chunks + chunk, sent));
    terms.insert(accumulate ? terms.end() : terms.begin(), w.slot(shard, chunk));
  }
  if (accumulate) {
    w.gemm(compute, terms, sum, last);
  } else if (step > 0 || !multiplies(spec)) {
    w.reduce(compute, terms, sum);
  } else {
    return {terms[0], compute};
  }
  return {sum, compute};
}

int send(Writer& w, const Made& made, const Region& to, int index) {
  if (made.region == to) return w.notify(to.rank, index, w.record(made.stream));
  // Where a partial was made it is packed, too, so that what is on its way to the peer keeps no other waiting.
  const bool packs = is_packed(w.spec(), to);
  const Region sent = packs ? w.packed(data_shard(w.spec(), to), to.chunk) : made.region;
  if (packs) w.quantise(made.stream >= 0 ? made.stream : kSend, made.region, sent);
  if (made.stream >= 0) w.wait(kSend, w.record(made.stream));
  return w.put(sent, to, index);
}

}  // namespace streamoverlap::plan
