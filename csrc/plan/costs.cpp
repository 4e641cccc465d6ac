#include "costs.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

namespace streamoverlap::plan {
namespace {

void expect(bool right, const std::string& what, const char* expected) {
  if (!right) throw std::invalid_argument(what + "; expected " + expected);
}

void expect_positive(const char* name, double value) {
  expect(std::isfinite(value) && value > 0, std::string(name) + " is " + std::to_string(value), "more than 0");
}

void expect_seconds(const std::string& name, double value) {
  expect(std::isfinite(value) && value >= 0, name + " is " + std::to_string(value), "seconds, 0 or more");
}

std::int64_t tiles(std::int64_t size, std::int64_t tile) { return (size + tile - 1) / tile; }

// What cuBLASLt chooses among where large tiles would leave multiprocessors idle: smaller tiles, and parts of k that
// are summed afterwards. The rates, relative to a wave of large tiles, are fitted to an H200: benchmarks/gemm_model.py.
struct Shape {
  int rows;     // the large tile's are divided by this
  int eighths;  // of the large tile's columns
  int splits;   // of k
  double rate;
};
constexpr Shape kShapes[] = {{1, 8, 1, 1.0}, {1, 6, 1, 1.0}, {1, 5, 1, 1.0}, {1, 4, 1, 0.9},  {2, 4, 1, 0.89},
                             {2, 2, 1, 0.9}, {1, 8, 2, 1.0}, {1, 4, 2, 0.8}, {1, 4, 4, 0.97}, {1, 4, 8, 0.5}};

}  // namespace

void validate(const Costs& costs) {
  expect_positive("gemm_flops", costs.gemm_flops);
  expect_positive("sms", costs.sms);
  expect_positive("tile_m", costs.tile_m);
  expect_positive("tile_n", costs.tile_n);
  expect(costs.gemm_accumulate >= 1 && std::isfinite(costs.gemm_accumulate),
         "gemm_accumulate is " + std::to_string(costs.gemm_accumulate), "a factor of 1 or more");
  expect(costs.store_efficiency > 0 && costs.store_efficiency <= 1,
         "store_efficiency is " + std::to_string(costs.store_efficiency), "more than 0, 1 at most");
  expect_positive("copy_bandwidth", costs.copy_bandwidth);
  expect_positive("reduce_bandwidth", costs.reduce_bandwidth);
  expect(!costs.link_bandwidth.empty(), "link_bandwidth is empty", "at least one (bytes, bytes/s)");
  double before = 0;
  for (const auto& [bytes, bandwidth] : costs.link_bandwidth) {
    expect(std::isfinite(bytes) && bytes > before, "link_bandwidth has size " + std::to_string(bytes),
           "sizes above 0, rising");
    expect_positive("link_bandwidth", bandwidth);
    before = bytes;
  }
  expect_seconds("gemm_latency", costs.gemm_latency);
  expect_seconds("put_latency", costs.put_latency);
  expect_seconds("copy_latency", costs.copy_latency);
  expect_seconds("notify", costs.notify);
  expect_seconds("await", costs.await);
  expect_seconds("record", costs.record);
  expect_seconds("wait", costs.wait);
  expect_seconds("flag_latency", costs.flag_latency);
  for (int kind = 0; kind < kKinds; ++kind) {
    expect_seconds(std::string("issue of ") + name(static_cast<Kind>(kind)), costs.issue[kind]);
  }
}

GemmCost gemm_cost(const Costs& costs, std::int64_t rows, std::int64_t n, std::int64_t k, bool accumulates) {
  if (rows == 0 || n == 0) return {};
  const double flops_of_wave = 2.0 * costs.sms * costs.tile_m * costs.tile_n * static_cast<double>(k);
  double least = std::numeric_limits<double>::infinity();  // waves of full tiles and all of k
  double share = 1;
  std::int64_t fewest = 1;
  for (const Shape& shape : kShapes) {
    const std::int64_t tile_m = std::max<std::int64_t>(1, costs.tile_m / shape.rows);
    const std::int64_t tile_n = std::max<std::int64_t>(1, costs.tile_n * shape.eighths / 8);
    const std::int64_t count = tiles(rows, tile_m) * tiles(n, tile_n) * shape.splits;
    const double work = static_cast<double>(tile_m * tile_n) / (costs.tile_m * costs.tile_n) / shape.splits;
    const std::int64_t waves = tiles(count, costs.sms);
    const double took = static_cast<double>(waves) * work / shape.rate;
    if (took >= least) continue;
    least = took;
    share = static_cast<double>(count) / static_cast<double>(waves * costs.sms);
    fewest = waves;
  }
  const double factor = accumulates ? costs.gemm_accumulate : 1;
  return {costs.gemm_latency + factor * least * flops_of_wave / costs.gemm_flops, share, static_cast<double>(fewest)};
}

StoreCost store_cost(const Costs& costs, const GemmCost& alone, double bytes) {
  const double computing = alone.seconds - costs.gemm_latency;
  const double sending = bytes / (costs.store_efficiency * link_bandwidth(costs, bytes));
  const double working = std::max(computing + sending / alone.waves, computing / alone.waves + sending);
  if (working <= 0) return {alone.seconds, alone.share, 0};
  return {costs.gemm_latency + working, alone.share * computing / working, sending / working};
}

double link_bandwidth(const Costs& costs, double bytes) {
  const auto& table = costs.link_bandwidth;
  const auto above = std::find_if(table.begin(), table.end(), [&](const auto& row) { return row.first >= bytes; });
  if (above == table.begin()) return above->second;
  if (above == table.end()) return table.back().second;
  const auto& [low, slow] = *(above - 1);
  const auto& [high, fast] = *above;
  return slow + (fast - slow) * std::log(bytes / low) / std::log(high / low);
}

}  // namespace streamoverlap::plan
