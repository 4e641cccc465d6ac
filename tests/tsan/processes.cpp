// Ranks as processes that share memory through descriptors: right results, and clear errors where a rank is killed,
// stopped, throws or makes another call than its peers.
#include <dirent.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/group/fd_exchange.h"
#include "rank.h"

namespace streamoverlap::test {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kTimeout{1000};
constexpr milliseconds kSetUp{10'000};

void expect(bool ok, const std::string& what) {
  if (!ok) throw std::runtime_error("expected: " + what);
}

// What the store is to the ranks of a job.
struct Board {
  std::atomic<int> ready{0};
  std::atomic<int> failed{0};  // ranks that have seen the error they should see
  char addresses[8][64] = {};
};

int open_descriptors() {
  DIR* folder = opendir("/proc/self/fd");
  int count = 0;
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

// Streams let go of a call's memory a moment after it has ended.
void expect_descriptors(int count) {
  for (int i = 0; open_descriptors() > count && i < 200; ++i) std::this_thread::sleep_for(milliseconds(5));
  expect(open_descriptors() <= count, "no descriptor left behind: " + std::to_string(open_descriptors()) +
                                          " are open, " + std::to_string(count) + " were before");
}

struct Rank {
  Board& board;
  int rank, world;
  FdExchange exchange;
  std::shared_ptr<Group> group;
  std::unique_ptr<host::Executor> executor;
  host::StreamSet streams = host::StreamSet::make();

  Rank(Board& board, int rank, int world) : board(board), rank(rank), world(world), exchange(rank, world) {
    std::strcpy(board.addresses[rank], exchange.address().c_str());
    ++board.ready;
    while (board.ready < world) std::this_thread::sleep_for(milliseconds(1));
    exchange.connect({board.addresses, board.addresses + world});
    GroupConfig config;
    config.name = "tp";
    config.rank = rank;
    config.world = world;
    config.timeout = kTimeout;
    group = std::make_shared<Group>(config, exchange.share(make_control(config), kSetUp));
    executor = std::make_unique<host::Executor>(group);
    grow();
  }

  void grow() {
    const int slots = group->layout().slots();
    auto own = Segment::create(static_cast<std::size_t>(slot_bytes(world) * slots));
    executor->use_slots(exchange.share(std::move(own), kSetUp), slot_bytes(world));
  }

  AbortError expect_abort(const Case& test, milliseconds within, int calls = 1000) {
    const Plans plans = make_plans({test});
    const auto start = Clock::now();
    try {
      run_cases(*executor, streams, rank, std::vector<Case>(calls, test), plans, 1);
    } catch (const AbortError& error) {
      const auto elapsed = std::chrono::duration_cast<milliseconds>(Clock::now() - start);
      std::printf("    rank %d, %d ms: %s\n", rank, int(elapsed.count()), error.what());
      expect(elapsed < within, "an error within " + std::to_string(within.count()) + " ms");
      try {
        run_cases(*executor, streams, rank, {test}, plans, 1);
      } catch (const AbortError& again) {
        expect(again.kind == error.kind, "every later call throws the same");
        ++board.failed;
        return error;
      }
      throw std::runtime_error("a call on an aborted group went through");
    }
    throw std::runtime_error("no error");
  }
};

// Runs body(rank) in `world` processes. `strange`: a rank that need not end with 0; `parent` sees it by its process id.
bool run(const std::string& name, int world, const std::function<void(Rank&)>& body, int strange = -1,
         const std::function<void(Board&, pid_t)>& parent = nullptr) {
  std::printf("%s\n", name.c_str());
  std::fflush(stdout);
  void* memory = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  Board& board = *new (memory) Board;
  std::vector<pid_t> children;
  for (int rank = 0; rank < world; ++rank) {
    const pid_t child = fork();
    if (child == 0) {
      int status = 0;
      try {
        Rank self(board, rank, world);
        body(self);
      } catch (const std::exception& error) {
        std::printf("    rank %d FAILED: %s\n", rank, error.what());
        status = 1;
      }
      std::fflush(stdout);
      _exit(status);
    }
    children.push_back(child);
  }
  if (parent) parent(board, children[strange]);
  bool good = true;
  for (int rank = 0; rank < world; ++rank) {
    int status = 0;
    waitpid(children[rank], &status, 0);
    if (rank != strange && status != 0) good = false;
  }
  munmap(memory, sizeof(Board));
  std::printf("  %s\n", good ? "ok" : "FAILED");
  return good;
}

Case case_of(plan::Operation operation, plan::Algorithm algorithm, int world) {
  return {{operation, algorithm, plan::Reduction::Accumulate, world, 2, 2}, kMaxRows, 1};
}

// All variants back to back, each op delayed at random, the slots' memory replaced now and then.
std::function<void(Rank&)> mixed_calls(int world) {
  const std::vector<Case> cases = all_cases(world, 7);
  return [cases, plans = make_plans(cases)](Rank& rank) {
    rank.group->set_timeout(kSetUp);
    std::mt19937 random(rank.rank);
    std::mutex mutex;
    rank.executor->set_before_op([&](const plan::Op&, std::uint64_t) {
      int delay = 0;
      {
        std::lock_guard<std::mutex> lock(mutex);
        if (random() % 20 == 0) delay = static_cast<int>(random() % 3000);
      }
      if (delay) std::this_thread::sleep_for(std::chrono::microseconds(delay));
    });
    int descriptors = 0;
    for (int in_flight = 1; in_flight <= 3; ++in_flight) {
      const auto first = cases.begin() + (in_flight - 1) * 60;
      run_cases(*rank.executor, rank.streams, rank.rank, {first, first + 60}, plans, in_flight);
      rank.grow();
      if (in_flight == 1) descriptors = open_descriptors();
    }
    expect_descriptors(descriptors);
  };
}

std::function<void(Rank&)> dies(int victim, int signal, plan::Kind kind, plan::Algorithm algorithm) {
  return [=](Rank& rank) {
    if (rank.rank == victim) {
      rank.executor->set_before_op([=](const plan::Op& op, std::uint64_t call) {
        if (call == 5 && op.kind == kind) raise(signal);
      });
    }
    const auto error = rank.expect_abort(case_of(plan::Operation::AllGatherGemm, algorithm, rank.world),
                                         kTimeout + milliseconds(2000));
    expect(error.kind == AbortKind::PeerTimeout && error.peer == victim, "the stopped rank is named");
  };
}

void disagrees(Rank& rank) {
  Case test = case_of(plan::Operation::GemmReduceScatter, plan::Algorithm::Ring, rank.world);
  if (rank.rank == 1) test.rows = 3;
  const auto error = rank.expect_abort(test, milliseconds(500));
  expect(error.kind == AbortKind::Mismatch, "a mismatch");
}

// The host executor's own Await sees most mismatches; this one only the watchdog sees: the flag is not awaited.
void disagrees_unawaited(Rank& rank) {
  Case test = case_of(plan::Operation::AllGather, plan::Algorithm::Direct, rank.world);
  if (rank.rank == 1) {
    rank.group->control(0).full(0, 1, rank.group->layout().full_flags() - 1).store(0x100);
    std::this_thread::sleep_for(milliseconds(200));
  }
  const auto error = rank.expect_abort(test, milliseconds(700));
  expect(error.kind == AbortKind::Mismatch && error.peer == 1, "a mismatch");
}

void makes_fewer_calls(Rank& rank) {
  const Case test = case_of(plan::Operation::AllGather, plan::Algorithm::Direct, rank.world);
  if (rank.rank == 2) {
    run_cases(*rank.executor, rank.streams, 2, std::vector<Case>(3, test), make_plans({test}), 1);
    while (!rank.group->aborted()) std::this_thread::sleep_for(milliseconds(5));
    return;
  }
  const auto error = rank.expect_abort(test, kTimeout + milliseconds(2000));
  expect(error.kind == AbortKind::PeerTimeout && error.peer == 2, "the rank that made no call is named");
}

void is_busy(Rank& rank) {
  const Case test = case_of(plan::Operation::AllGatherGemm, plan::Algorithm::Ring, rank.world);
  if (rank.rank == 2) {
    rank.executor->set_before_op([](const plan::Op& op, std::uint64_t call) {
      if (call == 1 && op.kind == plan::Kind::Put) std::this_thread::sleep_for(kTimeout + milliseconds(1500));
    });
  }
  const auto error = rank.expect_abort(test, kTimeout + milliseconds(2000));
  expect(error.kind == AbortKind::PeerTimeout && error.peer == 2, "the busy rank is named");
}

void throws(Rank& rank) {
  const Case test = case_of(plan::Operation::AllGatherGemm, plan::Algorithm::Ring, rank.world);
  if (rank.rank != 1) {
    const auto error = rank.expect_abort(test, milliseconds(500));
    expect(error.kind == AbortKind::Aborted && std::strstr(error.what(), "out of memory"), "the text of the exception");
    return;
  }
  rank.executor->set_before_op([](const plan::Op& op, std::uint64_t call) {
    if (call == 2 && op.kind == plan::Kind::Gemm) throw std::length_error("out of memory");
  });
  try {
    run_cases(*rank.executor, rank.streams, 1, std::vector<Case>(5, test), make_plans({test}), 1);
  } catch (const std::length_error&) {
    return;
  }
  throw std::runtime_error("the exception did not reach its caller");
}

void own_timeout(Rank& rank) {
  rank.group->set_timeout(std::chrono::minutes(10));
  const Case test = case_of(plan::Operation::AllGather, plan::Algorithm::Ring, rank.world);
  if (rank.rank == 1) {
    while (!rank.group->aborted()) std::this_thread::sleep_for(milliseconds(5));
    return;
  }
  const Plans plans = make_plans({test});
  Problem problem(test, plans.at(test.spec)[0]);
  try {
    rank.executor->issue(problem.call(), problem.compute(), rank.streams, milliseconds(300))->wait();
  } catch (const AbortError& error) {
    expect(error.elapsed < 1, "the timeout of the call, not of the group");
    return;
  }
  throw std::runtime_error("no error");
}

// A peer that ends before it has handed over its memory, and a stranger that guesses.
bool exchange_fails() {
  std::printf("exchange with a rank that is gone, and with a silent one\n");
  auto gone = std::make_unique<FdExchange>(1, 2);
  FdExchange self(0, 2), silent(1, 2);
  const int before = open_descriptors();
  bool good = true;
  const auto fails = [&](const std::string& address, const char* text) {
    FdExchange first(0, 2);
    first.connect({first.address(), address});
    try {
      first.share(Segment::create(1), milliseconds(200));
      good = false;
    } catch (const std::exception& error) {
      std::printf("    %s\n", error.what());
      good = good && std::strstr(error.what(), text) && std::strstr(error.what(), "1");
    }
  };
  const std::string address = gone->address();
  gone.reset();
  fails(address, "nobody listens");
  fails(silent.address(), "got no shared memory");
  good = good && open_descriptors() == before - 1;
  std::printf("  %s\n", good ? "ok" : "FAILED");
  return good;
}

bool made_again() {
  std::printf("100 communicators, one after the other\n");
  const std::vector<Case> cases(3, case_of(plan::Operation::AllGatherGemm, plan::Algorithm::Ring, 2));
  const Plans plans = make_plans(cases);
  const int descriptors = open_descriptors();
  std::atomic<bool> good{true};
  for (int i = 0; i < 100; ++i) {
    Board board;
    const auto live = [&](int number) {
      try {
        Rank rank(board, number, 2);
        run_cases(*rank.executor, rank.streams, number, cases, plans, 1);
      } catch (const std::exception& error) {
        std::printf("    rank %d FAILED: %s\n", number, error.what());
        good = false;
      }
    };
    std::thread second(live, 1);
    live(0);
    second.join();
  }
  good = good && open_descriptors() == descriptors;
  std::printf("  %s\n", good ? "ok" : "FAILED");
  return good;
}

int run_all() {
  using plan::Algorithm;
  using plan::Kind;
  bool good = true;
  for (const int world : {1, 2, 3, 4, 8}) {
    good &= run("mixed calls, " + std::to_string(world) + " rank(s)", world, mixed_calls(world));
  }
  for (const Algorithm algorithm : {Algorithm::Direct, Algorithm::Ring}) {
    for (const Kind kind : {Kind::Put, Kind::Gemm, Kind::Await, Kind::Notify}) {
      const std::string where = std::string(" at ") + plan::name(kind) + ", " + plan::name(algorithm);
      good &= run("rank 2 of 4 killed" + where, 4, dies(2, SIGKILL, kind, algorithm), 2);
      good &= run("rank 0 of 3 stopped" + where, 3, dies(0, SIGSTOP, kind, algorithm), 0,
                  [](Board& board, pid_t victim) {  // once continued it must see the error, too
                    while (board.failed < 2) std::this_thread::sleep_for(milliseconds(5));
                    kill(victim, SIGCONT);
                    int waited = 0;
                    while (board.failed < 3 && ++waited < 400) std::this_thread::sleep_for(milliseconds(5));
                    if (board.failed < 3) std::printf("    the stopped rank saw no error\n");
                  });
    }
  }
  good &= run("other rows on rank 1", 3, disagrees);
  good &= run("a flag of another call that nobody awaits", 2, disagrees_unawaited);
  good &= run("rank 2 makes fewer calls", 4, makes_fewer_calls);
  good &= run("rank 2 is busy", 4, is_busy);
  good &= run("rank 1 throws", 3, throws);
  good &= run("a timeout of one call", 2, own_timeout);
  good &= exchange_fails();
  good &= made_again();
  std::printf(good ? "all good\n" : "FAILED\n");
  return good ? 0 : 1;
}

}  // namespace
}  // namespace streamoverlap::test

int main() { return streamoverlap::test::run_all(); }
