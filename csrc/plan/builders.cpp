#include "builders.h"

#include <stdexcept>
#include <string>

#include "all_reduce.h"
#include "gather.h"
#include "scatter.h"

namespace streamoverlap::plan {
namespace {

std::string outside(const char* field, int value, int low, int high) {
  if (value >= low && value <= high) return "";
  return std::string(field) + " is " + std::to_string(value) + "; expected " + std::to_string(low) + " to " +
         std::to_string(high);
}

void expect_none(const std::string& wrong) {
  if (!wrong.empty()) throw std::invalid_argument(wrong);
}

// A ring that sums products in a Reduce passes on what no Gemm has made.
std::string wrong_store(const Spec& spec) {
  if (gathers(spec) || !multiplies(spec)) {
    return std::string("transfer is store for ") + name(spec.operation) +
           "; expected copy: only gemm_reduce_scatter and gemm_all_reduce have partial products to store";
  }
  if (spec.algorithm == Algorithm::Ring && spec.reduction == Reduction::Sum) {
    return "transfer is store with algorithm ring and reduce sum; expected reduce accumulate, as what such a ring "
           "passes on is no product";
  }
  return "";
}

// A Gemm neither adds what is packed nor stores packed; a direct plan unpacks it first, in the Reduce that sums what
// has arrived.
std::string wrong_quantised(const Spec& spec) {
  if (gathers(spec)) {
    return std::string("quantised is set for ") + name(spec.operation) +
           "; expected only for gemm_reduce_scatter, gemm_all_reduce, reduce_scatter and all_reduce";
  }
  if (multiplies(spec) && spec.algorithm == Algorithm::Ring && spec.reduction != Reduction::Sum) {
    return "quantised is set with algorithm ring and reduce accumulate; expected reduce sum";
  }
  if (spec.transfer == Transfer::Store) return "quantised is set with transfer store; expected transfer copy";
  return "";
}

}  // namespace

Shards shards_of(const Spec& spec, Buffer buffer, int rank) {
  const bool input = buffer == Buffer::Input || buffer == Buffer::Scales;
  const bool own_alone = (input && gathers(spec)) || (buffer == Buffer::Output && scatters(spec));
  if (own_alone) return {rank, rank + 1};
  return {0, in_slot(buffer) ? slot_shards(spec) : spec.world};
}

std::string wrong_spec(const Spec& spec) {
  std::string wrong = outside("world", spec.world, 1, kMaxWorld);
  if (wrong.empty()) wrong = outside("chunks", spec.chunks, 1, kMaxChunks);
  if (wrong.empty()) wrong = outside("compute_streams", spec.compute_streams, 1, kMaxComputeStreams);
  if (wrong.empty() && spec.keep_gathered && spec.operation != Operation::AllGatherGemm) {
    wrong = std::string("keep_gathered is set for ") + name(spec.operation) + "; expected only for all_gather_gemm";
  }
  if (wrong.empty() && spec.copy_input && multiplies(spec)) {
    wrong = std::string("copy_input is set for ") + name(spec.operation) +
            "; expected only for all_gather, reduce_scatter and all_reduce";
  }
  if (wrong.empty() && spec.transfer == Transfer::Store) wrong = wrong_store(spec);
  if (wrong.empty() && spec.quantised) wrong = wrong_quantised(spec);
  if (wrong.empty() && spec.scaled && !multiplies(spec)) {
    wrong = std::string("scaled is set for ") + name(spec.operation) + "; expected only for products";
  }
  if (wrong.empty() && spec.scaled && spec.keep_gathered) {
    wrong = "scaled and keep_gathered are set; expected one of them: the gathered scales are not handed out";
  }
  return wrong;
}

void validate(const Spec& spec) { expect_none(wrong_spec(spec)); }

Plan build(const Spec& spec, int rank) {
  validate(spec);
  expect_none(outside("rank", rank, 0, spec.world - 1));
  const bool ring = spec.algorithm == Algorithm::Ring;
  if (reduces_all(spec)) return ring ? all_reduce_ring(spec, rank) : all_reduce_direct(spec, rank);
  if (gathers(spec)) return ring ? gather_ring(spec, rank) : gather_direct(spec, rank);
  return ring ? scatter_ring(spec, rank) : scatter_direct(spec, rank);
}

std::vector<Plan> build_all(const Spec& spec) {
  validate(spec);
  std::vector<Plan> plans;
  for (int rank = 0; rank < spec.world; ++rank) plans.push_back(build(spec, rank));
  return plans;
}

}  // namespace streamoverlap::plan
