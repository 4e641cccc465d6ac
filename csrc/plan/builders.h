// Builders: a plan for every operation, algorithm and option. What each must hold to is in docs/plans.md.
#pragma once

#include <string>
#include <vector>

#include "plan.h"

namespace streamoverlap::plan {

// What an operation does with shards: gather those of all ranks, or else sum them, and scatter the sums or give all to
// every rank; multiply, or else only move.
inline bool gathers(const Spec& spec) {
  return spec.operation == Operation::AllGatherGemm || spec.operation == Operation::AllGather;
}
inline bool scatters(const Spec& spec) {
  return spec.operation == Operation::GemmReduceScatter || spec.operation == Operation::ReduceScatter;
}
inline bool multiplies(const Spec& spec) {
  return spec.operation == Operation::AllGatherGemm || spec.operation == Operation::GemmReduceScatter ||
         spec.operation == Operation::GemmAllReduce;
}
inline bool reduces_all(const Spec& spec) {
  return spec.operation == Operation::AllReduce || spec.operation == Operation::GemmAllReduce;
}

// The shards of a buffer of a rank: first to last-1.
struct Shards {
  int first = 0, last = 0;
};
Shards shards_of(const Spec&, Buffer, int rank);

// Where the input is read from once it is copied. An output of all shards takes it: it holds what the input holds until
// results replace it.
inline Buffer copy_of_input(const Spec& spec) { return scatters(spec) ? Buffer::Copied : Buffer::Output; }

// Names the field that is out of range, what it was and what was expected; empty where all are in range.
std::string wrong_spec(const Spec&);
void validate(const Spec&);  // throws that as std::invalid_argument

Plan build(const Spec&, int rank);         // as written, unpruned
std::vector<Plan> build_all(const Spec&);  // build() for every rank

}  // namespace streamoverlap::plan
