// Builders: a plan for every operation, algorithm and option. What each must hold to is in docs/plans.md.
#pragma once

#include <string>
#include <vector>

#include "plan.h"

namespace streamoverlap::plan {

// What an operation does with shards: gather those of all ranks, or else sum and scatter; multiply, or else only move.
inline bool gathers(const Spec& spec) {
  return spec.operation == Operation::AllGatherGemm || spec.operation == Operation::AllGather;
}
inline bool multiplies(const Spec& spec) {
  return spec.operation == Operation::AllGatherGemm || spec.operation == Operation::GemmReduceScatter;
}

// Names the field that is out of range, what it was and what was expected; empty where all are in range.
std::string wrong_spec(const Spec&);
void validate(const Spec&);  // throws that as std::invalid_argument

Plan build(const Spec&, int rank);         // as written, unpruned
std::vector<Plan> build_all(const Spec&);  // build() for every rank

}  // namespace streamoverlap::plan
