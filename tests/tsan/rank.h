// One rank with plain-loop arithmetic on small integers, whose every result is compared exactly.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "../../csrc/group/group.h"
#include "../../csrc/host/executor.h"

namespace streamoverlap::test {

struct Case {
  plan::Spec spec;
  std::int64_t rows = 0;  // of a shard
  int seed = 0;           // of the data
  std::int64_t missing_rows = 0;
};

constexpr int kK = 5;
constexpr int kN = 3;
constexpr std::int64_t kMaxRows = 7;

// The memory of one call and what must come out.
class Problem {
 public:
  Problem(const Case& test, const plan::Plan& plan);

  const Call& call() const { return call_; }
  std::shared_ptr<host::Compute> compute() const { return compute_; }
  void verify() const;  // throws std::runtime_error
  void overwrite_input();

 private:
  std::vector<int> input(int rank) const;
  std::vector<int> gathered() const;
  std::vector<int> expected() const;

  Case test_;
  int rank_;
  bool gathers_, multiplies_, reduces_all_;
  std::int64_t all_rows_;  // of all shards
  std::vector<int> input_, output_, gathered_, copied_;
  std::shared_ptr<host::Compute> compute_;
  Call call_;
};

// The variants of all operations for a world size, in a random order, with changing rows and data.
std::vector<Case> all_cases(int world, int seed);

// Bytes of a slot that any case fits in. Packed rows take more room here than others.
constexpr std::int64_t slot_bytes(int world) { return 1024 * world; }
static_assert(kMaxRows * kK * sizeof(int) * 2 < 512);

// The pruned plans of all ranks, for every Spec in `cases`. Made before the ranks start: a cache with a lock would
// order what the plans must order.
using Plans = std::map<plan::Spec, std::vector<plan::Plan>>;
Plans make_plans(const std::vector<Case>& cases);

// The ranks' way through `cases`, with up to `in_flight` calls started before the first is waited for.
void run_cases(host::Executor& executor, const host::StreamSet& streams, int rank, const std::vector<Case>& cases,
               const Plans& plans, int in_flight);

// The same with two calls in flight, each waited for later by this thread, by another one, or by nobody: its tensors
// then belong to the call alone.
void run_cases_behind(host::Executor& executor, const host::StreamSet& streams, int rank,
                      const std::vector<Case>& cases, const Plans& plans);

}  // namespace streamoverlap::test
