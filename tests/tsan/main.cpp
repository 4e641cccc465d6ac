// All ranks as threads of one process, for ThreadSanitizer: every builder, with calls back to back on the same slots.
//
//   ranks              every variant on 1 to 4 ranks; must end with 0 and without a report
//   ranks --seed-race  one plan from which a needed Wait is deleted; ThreadSanitizer must report it
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <thread>

#include "rank.h"

namespace streamoverlap::test {
namespace {

constexpr int kRounds = 2;  // each variant so often, in another order, with other rows and data

// Two mappings of one segment would be two different memories to ThreadSanitizer, so all ranks share the same ones.
struct SharedMemory {
  std::vector<std::shared_ptr<Segment>> controls, slots;

  explicit SharedMemory(int world) {
    for (int rank = 0; rank < world; ++rank) {
      const GroupConfig config = group_config(rank, world);
      controls.push_back(make_control(config));
      slots.push_back(Segment::create(static_cast<std::size_t>(config.slots * slot_bytes(world))));
    }
  }

  static GroupConfig group_config(int rank, int world) {
    GroupConfig config;
    config.name = "threads";
    config.rank = rank;
    config.world = world;
    config.timeout = std::chrono::seconds(60);
    return config;
  }
};

// Returns the number of ranks that failed.
int run_world(int world, const std::vector<Case>& cases, const Plans& plans, int in_flight) {  // 0: behind the caller
  const SharedMemory memory(world);
  std::vector<int> failed(world);
  const auto run_rank = [&](int rank) {
    const auto group = std::make_shared<Group>(SharedMemory::group_config(rank, world), memory.controls);
    try {
      const host::StreamSet streams = host::StreamSet::make();
      host::Executor executor(group);
      executor.use_slots(memory.slots, slot_bytes(world));
      if (in_flight > 0) {
        run_cases(executor, streams, rank, cases, plans, in_flight);
      } else {
        run_cases_behind(executor, streams, rank, cases, plans);
      }
    } catch (const std::exception& e) {
      std::fprintf(stderr, "rank %d of %d: %s\n", rank, world, e.what());
      failed[rank] = 1;
      group->abort({});  // the others need not wait for it
    }
  };
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < world; ++rank) ranks.emplace_back(run_rank, rank);
  for (std::thread& rank : ranks) rank.join();
  return static_cast<int>(std::count(failed.begin(), failed.end(), 1));
}

bool refuses_an_unrecorded_event() {
  const Case test{{plan::Operation::AllGather, plan::Algorithm::Direct, plan::Reduction::Accumulate, 1}, 1, 1};
  plan::Plan plan = make_plans({test}).at(test.spec)[0];
  const auto is_record = [](const plan::Op& op) { return op.kind == plan::Kind::Record; };
  std::rotate(plan.ops.begin(), std::find_if(plan.ops.begin(), plan.ops.end(), is_record) + 1, plan.ops.end());
  const SharedMemory memory(1);
  host::Executor executor(std::make_shared<Group>(SharedMemory::group_config(0, 1), memory.controls));
  Problem problem(test, plan);
  try {
    executor.issue(problem.call(), problem.compute(), host::StreamSet::make());
  } catch (const std::invalid_argument& error) {
    std::printf("%s\n", error.what());
    return true;
  }
  std::fprintf(stderr, "a wait for an event that is not recorded went through\n");
  return false;
}

int run_all() {
  int failed = 0;
  for (int world = 1; world <= 4; ++world) {
    for (const int in_flight : {1, 3, 0}) {
      std::vector<Case> cases;
      for (int round = 0; round < kRounds; ++round) {
        const std::vector<Case> more = all_cases(world, 100 * round + 10 * world + in_flight);
        cases.insert(cases.end(), more.begin(), more.end());
      }
      failed += run_world(world, cases, make_plans(cases), in_flight);
      const std::string how = in_flight > 0 ? std::to_string(in_flight) + " call(s) in flight" : "behind the caller";
      std::printf("%d rank(s), %s: %zu calls\n", world, how.c_str(), cases.size());
    }
  }
  if (!refuses_an_unrecorded_event()) ++failed;
  return failed == 0 ? 0 : 1;
}

// The wait of a GEMM for the arrival of the shard it reads from the slot.
bool delete_wait(plan::Plan& plan) {
  const auto reads_slot = [](const plan::Op& op) {
    return op.kind == plan::Kind::Gemm && op.reads[0].buffer == plan::Buffer::Slot;
  };
  const auto gemm = std::find_if(plan.ops.begin(), plan.ops.end(), reads_slot);
  if (gemm == plan.ops.end()) return false;
  for (auto op = gemm; op-- != plan.ops.begin();) {
    if (op->kind != plan::Kind::Wait || op->stream != gemm->stream) continue;
    plan.ops.erase(op);
    return true;
  }
  return false;
}

int run_seeded() {
  const plan::Spec spec{plan::Operation::AllGatherGemm, plan::Algorithm::Direct, plan::Reduction::Accumulate, 2, 1, 2};
  const std::vector<Case> cases(20, Case{spec, kMaxRows, 1});
  Plans plans = make_plans(cases);
  if (!delete_wait(plans.at(spec)[0])) {
    std::fprintf(stderr, "found no wait to delete\n");
    return 2;
  }
  return run_world(2, cases, plans, 1) == 0 ? 0 : 1;
}

}  // namespace
}  // namespace streamoverlap::test

int main(int argc, char** argv) {
  const bool seeded = argc == 2 && std::strcmp(argv[1], "--seed-race") == 0;
  if (argc > 1 && !seeded) {
    std::fprintf(stderr, "usage: %s [--seed-race]\n", argv[0]);
    return 2;
  }
  return seeded ? streamoverlap::test::run_seeded() : streamoverlap::test::run_all();
}
