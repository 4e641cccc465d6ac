#include "rank.h"

#include <algorithm>
#include <deque>
#include <exception>
#include <functional>
#include <random>
#include <stdexcept>
#include <thread>
#include <utility>

#include "../../csrc/group/signature.h"
#include "../../csrc/plan/builders.h"
#include "../../csrc/plan/prune.h"

namespace streamoverlap::test {

using plan::Algorithm;
using plan::Buffer;
using plan::Operation;
using plan::Reduction;

namespace {

int weight(int rank, int n, int k) { return (rank * 7 + n * 3 + k * 5) % 11 - 5; }
int bias(int n) { return n + 1; }
constexpr std::int64_t kPackedRow = 8;

class Loops : public host::Compute {
 public:
  explicit Loops(int rank) : rank_(rank) {}

  void gemm(const plan::Op& op, Block a, const Block*, const Block* c, Block d) override {
    const int* x = reinterpret_cast<const int*>(a.data);
    const int* sum = c ? reinterpret_cast<const int*>(c->data) : nullptr;
    int* y = reinterpret_cast<int*>(d.data);
    for (std::int64_t m = 0; m < d.rows.count; ++m) {
      for (int n = 0; n < kN; ++n) {
        int value = (sum ? sum[m * kN + n] : 0) + (op.bias ? bias(n) : 0);
        for (int k = 0; k < kK; ++k) value += x[m * kK + k] * weight(rank_, n, k);
        y[m * kN + n] = value;
      }
    }
  }

  // Rows of kPackedRow numbers, further apart than they are long; nothing is lost, so that sums are exact.
  void quantise(const plan::Op&, Block a, Block packed) override {
    const int* x = reinterpret_cast<const int*>(a.data);
    for (std::int64_t i = 0; i < numbers(a); ++i) *in_packed(packed, i) = x[i];
  }

  void reduce(const plan::Op&, const std::vector<Block>& terms, Block sum) override {
    int* y = reinterpret_cast<int*>(sum.data);
    for (std::int64_t i = 0; i < numbers(sum); ++i) {
      int value = 0;
      for (const Block& term : terms) {
        value += term.packed ? *in_packed(term, i) : reinterpret_cast<const int*>(term.data)[i];
      }
      y[i] = value;
    }
  }

 private:
  static std::int64_t numbers(const Block& block) { return block.bytes() / std::int64_t(sizeof(int)); }
  static int* in_packed(const Block& block, std::int64_t i) {
    return reinterpret_cast<int*>(block.data + i / kPackedRow * block.row_bytes) + i % kPackedRow;
  }

  int rank_;
};

std::vector<int> multiply(const std::vector<int>& x, int rank) {
  std::vector<int> y;
  for (std::size_t m = 0; m < x.size() / kK; ++m) {
    for (int n = 0; n < kN; ++n) {
      int value = 0;
      for (int k = 0; k < kK; ++k) value += x[m * kK + k] * weight(rank, n, k);
      y.push_back(value);
    }
  }
  return y;
}

void add_bias(std::vector<int>& y) {
  for (std::size_t i = 0; i < y.size(); ++i) y[i] += bias(static_cast<int>(i % kN));
}

}  // namespace

Problem::Problem(const Case& test, const plan::Plan& plan)
    : test_(test),
      rank_(plan.rank),
      gathers_(test.spec.operation == Operation::AllGatherGemm || test.spec.operation == Operation::AllGather),
      multiplies_(test.spec.operation == Operation::AllGatherGemm ||
                  test.spec.operation == Operation::GemmReduceScatter ||
                  test.spec.operation == Operation::GemmAllReduce),
      reduces_all_(test.spec.operation == Operation::AllReduce || test.spec.operation == Operation::GemmAllReduce),
      all_rows_(test.spec.world * test.rows - test.missing_rows),
      input_(input(rank_)),
      output_((gathers_ || reduces_all_ ? all_rows_ : test.rows) * (multiplies_ ? kN : kK), -1),
      gathered_(test.spec.keep_gathered ? all_rows_ * kK : 0, -1),
      copied_(test.spec.copy_input ? all_rows_ * kK : 0, -1),
      compute_(std::make_shared<Loops>(rank_)) {
  const auto set = [this](Buffer buffer, std::vector<int>* data, int columns, bool all_shards) {
    View& view = call_.views[static_cast<int>(buffer)];
    view.base = data ? reinterpret_cast<std::byte*>(data->data()) : nullptr;
    view.row_bytes = std::int64_t(columns * sizeof(int));
    view.shard_bytes = all_shards ? view.row_bytes * test_.rows : 0;
  };
  const int out = multiplies_ ? kN : kK;
  call_.plan = &plan;
  call_.shard_rows = test.rows;
  call_.missing_rows = test.missing_rows;
  call_.signature = signature(test.spec, {test.rows, test.missing_rows, kK, kN});
  set(Buffer::Input, &input_, kK, !gathers_);
  set(Buffer::Output, &output_, out, gathers_ || reduces_all_);
  set(Buffer::Gathered, &gathered_, kK, true);
  set(Buffer::Copied, &copied_, kK, true);
  set(Buffer::Slot, nullptr, gathers_ ? kK : out, false);
  set(Buffer::Scratch, nullptr, gathers_ ? 0 : out, false);
  if (test.spec.quantised) {
    call_.packed_unit = kPackedRow * std::int64_t(sizeof(int));
    call_.views[static_cast<int>(Buffer::Packed)].row_bytes = call_.packed_unit + kPackedAlignment;
  }
}

std::vector<int> Problem::input(int rank) const {
  std::vector<int> x((gathers_ ? test_.rows : all_rows_) * kK);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = int((i * 13 + rank * 29 + test_.seed * 31) % 97) - 48;
  return x;
}

std::vector<int> Problem::gathered() const {
  std::vector<int> all;
  for (int rank = 0; rank < test_.spec.world; ++rank) {
    const std::vector<int> shard = input(rank);
    all.insert(all.end(), shard.begin(), shard.end());
  }
  return all;
}

std::vector<int> Problem::expected() const {
  std::vector<int> result;
  if (gathers_) {
    result = multiplies_ ? multiply(gathered(), rank_) : gathered();
  } else {
    for (int rank = 0; rank < test_.spec.world; ++rank) {
      const std::vector<int> all = input(rank);
      const auto first = reduces_all_ ? all.begin() : all.begin() + rank_ * test_.rows * kK;
      const std::vector<int> x(first, reduces_all_ ? all.end() : first + test_.rows * kK);
      const std::vector<int> part = multiplies_ ? multiply(x, rank) : x;
      result.resize(part.size());
      std::transform(part.begin(), part.end(), result.begin(), result.begin(), std::plus<int>());
    }
  }
  if (multiplies_) add_bias(result);
  return result;
}

void Problem::verify() const {
  const std::string where = to_string(test_.spec) + ", rank " + std::to_string(rank_) + ", " +
                            std::to_string(test_.rows) + " rows a shard, " + std::to_string(test_.missing_rows) +
                            " missing, data " + std::to_string(test_.seed);
  if (output_ != expected()) throw std::runtime_error("wrong output of " + where);
  if (test_.spec.keep_gathered && gathered_ != gathered()) throw std::runtime_error("wrong gathered input of " + where);
}

void Problem::overwrite_input() { std::fill(input_.begin(), input_.end(), 0x5a5a5a5a); }

std::vector<Case> all_cases(int world, int seed) {
  std::mt19937 random(seed);
  std::vector<Case> cases;
  const auto add = [&](plan::Spec spec) {
    Case test{spec, std::int64_t(random() % (kMaxRows + 1)), int(random() % 1000)};
    // Rows that ranks cannot share equally: of the last shard, or of more where there are fewer rows than ranks.
    if ((spec.operation == Operation::AllReduce || spec.operation == Operation::GemmAllReduce) && test.rows > 0) {
      const std::int64_t all = (test.rows - 1) * world + 1 + std::int64_t(random() % world);
      test.missing_rows = test.rows * world - all;
    }
    cases.push_back(test);
  };
  for (const Operation operation : {Operation::AllGatherGemm, Operation::GemmReduceScatter, Operation::AllGather,
                                    Operation::ReduceScatter, Operation::AllReduce, Operation::GemmAllReduce}) {
    const bool sums_products = operation == Operation::GemmReduceScatter || operation == Operation::GemmAllReduce;
    const bool plain = operation != Operation::AllGatherGemm && !sums_products;
    for (const Algorithm algorithm : {Algorithm::Ring, Algorithm::Direct}) {
      for (const Reduction reduction : {Reduction::Accumulate, Reduction::Sum}) {
        for (const bool option : {false, true}) {
          if (option && sums_products) continue;
          for (int chunks = 1; chunks <= 3; ++chunks) {
            for (int streams = 1; streams <= plan::kMaxComputeStreams; ++streams) {
              plan::Spec spec{operation, algorithm, reduction,        world,
                              chunks,    streams,   option && !plain, option && plain};
              spec.taper = static_cast<plan::Taper>(random() % 4);
              add(spec);
              spec.transfer = plan::Transfer::Store;
              if (plan::wrong_spec(spec).empty()) add(spec);
              spec.transfer = plan::Transfer::Copy;
              spec.quantised = true;
              if (plan::wrong_spec(spec).empty()) add(spec);
            }
          }
        }
      }
    }
  }
  std::shuffle(cases.begin(), cases.end(), random);
  return cases;
}

Plans make_plans(const std::vector<Case>& cases) {
  Plans plans;
  for (const Case& test : cases) {
    std::vector<plan::Plan>& entry = plans[test.spec];
    if (entry.empty()) entry = plan::prune(plan::build_all(test.spec));
  }
  return plans;
}

void run_cases(host::Executor& executor, const host::StreamSet& streams, int rank, const std::vector<Case>& cases,
               const Plans& plans, int in_flight) {
  struct InFlight {
    std::unique_ptr<Problem> problem;
    std::shared_ptr<host::Pending> pending;
  };
  std::deque<InFlight> calls;
  const auto finish_first = [&calls] {
    InFlight& call = calls.front();
    call.pending->wait();
    call.problem->verify();
    call.problem->overwrite_input();  // by now it is the caller's again
    calls.pop_front();
  };
  for (const Case& test : cases) {
    auto problem = std::make_unique<Problem>(test, plans.at(test.spec)[rank]);
    auto pending = executor.issue(problem->call(), problem->compute(), streams);
    if (test.spec.copy_input) problem->overwrite_input();
    calls.push_back({std::move(problem), std::move(pending)});
    if (static_cast<int>(calls.size()) >= in_flight) finish_first();
  }
  while (!calls.empty()) finish_first();
}

void run_cases_behind(host::Executor& executor, const host::StreamSet& streams, int rank,
                      const std::vector<Case>& cases, const Plans& plans) {
  std::deque<std::function<void()>> later;
  int number = 0;
  for (const Case& test : cases) {
    const auto problem = std::make_shared<Problem>(test, plans.at(test.spec)[rank]);
    // As the bindings do it: who holds the arithmetic holds the tensors.
    const std::shared_ptr<host::Compute> compute(problem, problem->compute().get());
    const auto pending = executor.issue(problem->call(), compute, streams);
    const auto finish = [problem, pending] {
      pending->wait();
      problem->verify();
      problem->overwrite_input();
    };
    switch (number++ % 4) {
      case 0:
        break;  // nobody waits; it ends by itself
      case 1:
        later.push_back([problem, ended = pending->ended()] {
          ended->wait();
          problem->verify();
        });
        break;
      case 2: {
        std::exception_ptr error;
        std::thread other([&] {
          try {
            finish();
          } catch (...) {
            error = std::current_exception();
          }
        });
        other.join();
        if (error) std::rethrow_exception(error);
        break;
      }
      default:
        later.push_back(finish);
    }
    if (later.size() < 3) continue;
    later.back()();  // not in the order of the calls
    later.pop_back();
    later.front()();
    later.pop_front();
  }
  for (const auto& finish : later) finish();
}

}  // namespace streamoverlap::test
