#include "builders.h"

#include <stdexcept>

#include "gather.h"
#include "scatter.h"

namespace streamoverlap::plan {
namespace {

void expect_range(const char* field, int value, int low, int high) {
  if (value < low || value > high) {
    throw std::invalid_argument(std::string(field) + " is " + std::to_string(value) + "; expected " +
                                std::to_string(low) + " to " + std::to_string(high));
  }
}

}  // namespace

void validate(const Spec& spec) {
  expect_range("world", spec.world, 1, kMaxWorld);
  expect_range("chunks", spec.chunks, 1, kMaxChunks);
  expect_range("compute_streams", spec.compute_streams, 1, kMaxComputeStreams);
  if (spec.keep_gathered && spec.operation != Operation::AllGatherGemm) {
    throw std::invalid_argument(std::string("keep_gathered is set for ") + name(spec.operation) +
                                "; expected only for all_gather_gemm");
  }
}

Plan build(const Spec& spec, int rank) {
  validate(spec);
  expect_range("rank", rank, 0, spec.world - 1);
  const bool gathers = spec.operation == Operation::AllGather || spec.operation == Operation::AllGatherGemm;
  const bool ring = spec.algorithm == Algorithm::Ring;
  if (gathers) return ring ? gather_ring(spec, rank) : gather_direct(spec, rank);
  return ring ? scatter_ring(spec, rank) : scatter_direct(spec, rank);
}

std::vector<Plan> build_all(const Spec& spec) {
  validate(spec);
  std::vector<Plan> plans;
  for (int rank = 0; rank < spec.world; ++rank) plans.push_back(build(spec, rank));
  return plans;
}

}  // namespace streamoverlap::plan
