// How partials become sums: what the builders of operations that sum have in common. A rank's partial of a shard is its
// input there, or the product of it.
#pragma once

#include <vector>

#include "plan.h"
#include "writer.h"

namespace streamoverlap::plan {

// A region, and the compute stream that makes it; -1 where it is there from the start.
struct Made {
  Region region;
  Stream stream = -1;
};

// Where a partial is made on its way to `to`, in a peer's slot: there, if Gemms store it themselves, or else in `own`.
Region made_in(const Writer&, const Region& own, const Region& to);

// Where the sum of a shard is in a slot of an all-reduce: apart from partials, where there is a place for it.
int sum_in(const Spec&, int shard);

// Direct: this rank's partial of another's shard, which goes to `to`.
Made direct_partial(Writer&, int shard, int chunk, const Region& to);

// Direct: of each chunk of the own shard the compute stream that is going to sum it, and has the product, where that is
// a term of a Reduce.
std::vector<Stream> own_partials(Writer&);
// Sums a chunk of the own shard into the output. sent[d]: the event of the Put to the rank at distance d.
void sum_own(Writer&, Stream compute, int chunk, const std::vector<int>& sent);

// Ring: what this rank passes on of a shard in a step, or at the last step its sum. `sent`: the event of the Put of the
// step before. `sum`: where it is summed.
Made ring_partial(Writer&, int step, int shard, int chunk, int sent, const Region& sum);

// Puts what has been made, if that was not done in place, packed if it is to be, and sets the receiver's flag `index`.
int send(Writer&, const Made&, const Region& to, int index);

}  // namespace streamoverlap::plan
