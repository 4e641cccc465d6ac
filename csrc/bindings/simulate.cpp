// The simulator in Python, with rows split into chunks as the executors do it.
#include "../plan/simulate.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>

#include "../group/call.h"
#include "modules.h"

namespace py = pybind11;

namespace streamoverlap {
namespace {

using plan::Costs;
using plan::Plan;
using Spans = std::vector<std::vector<std::pair<double, double>>>;

void expect_size(const char* name, std::int64_t value) {
  if (value < 0)
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + "; expected 0 or more");
}

Spans simulate(const std::vector<Plan>& plans, const Costs& costs, std::int64_t shard_rows, std::int64_t missing_rows,
               std::int64_t n, std::int64_t k, std::int64_t row, std::int64_t element_bytes, bool graph) {
  expect_size("shard_rows", shard_rows);
  expect_size("missing_rows", missing_rows);
  expect_size("n", n);
  expect_size("k", k);
  expect_size("row", row);
  expect_size("element_bytes", element_bytes);
  Call call;
  call.plan = plans.data();
  call.shard_rows = shard_rows;
  call.missing_rows = missing_rows;
  for (View& view : call.views) view.row_bytes = row * element_bytes;
  for (const plan::Buffer scales : {plan::Buffer::Scales, plan::Buffer::SlotScales}) {
    call.views[static_cast<int>(scales)].row_bytes = kScaleBytes;
  }
  if (!plans.empty() && plans[0].spec.quantised) call.pack(element_bytes);
  const auto rows = [&](const plan::Region& region) { return block_of(call, region, nullptr).rows.count; };
  const auto bytes = [&](const plan::Region& region) { return block_of(call, region, nullptr).bytes(); };
  Spans result;
  for (const auto& spans : plan::simulate(plans, costs, {rows, bytes, n, k}, graph)) {
    auto& of_rank = result.emplace_back();
    for (const plan::Span& span : spans) of_rank.emplace_back(span.start, span.end);
  }
  return result;
}

}  // namespace

void register_simulate(py::module_& m) {
  py::class_<Costs>(m, "Costs", "The constants of the simulator; see streamoverlap.simulate.Costs.")
      .def(py::init<>())
      .def_readwrite("gemm_flops", &Costs::gemm_flops)
      .def_readwrite("sms", &Costs::sms)
      .def_readwrite("tile_m", &Costs::tile_m)
      .def_readwrite("tile_n", &Costs::tile_n)
      .def_readwrite("gemm_latency", &Costs::gemm_latency)
      .def_readwrite("gemm_accumulate", &Costs::gemm_accumulate)
      .def_readwrite("link_bandwidth", &Costs::link_bandwidth)
      .def_readwrite("put_latency", &Costs::put_latency)
      .def_readwrite("store_efficiency", &Costs::store_efficiency)
      .def_readwrite("copy_bandwidth", &Costs::copy_bandwidth)
      .def_readwrite("copy_latency", &Costs::copy_latency)
      .def_readwrite("reduce_bandwidth", &Costs::reduce_bandwidth)
      .def_readwrite("notify", &Costs::notify)
      .def_readwrite("await_", &Costs::await)
      .def_readwrite("record", &Costs::record)
      .def_readwrite("wait", &Costs::wait)
      .def_readwrite("flag_latency", &Costs::flag_latency)
      .def_readwrite("issue", &Costs::issue, "By kind of op, in the order of plan.h.")
      .def("validate", [](const Costs& costs) { plan::validate(costs); })
      .def("gemm_seconds", [](const Costs& costs, std::int64_t rows, std::int64_t n, std::int64_t k) {
        plan::validate(costs);
        return plan::gemm_cost(costs, rows, n, k, false).seconds;
      });
  m.def("simulate", &simulate, py::arg("plans"), py::arg("costs"), py::arg("shard_rows"), py::arg("missing_rows"),
        py::arg("n"), py::arg("k"), py::arg("row"), py::arg("element_bytes"), py::arg("graph"),
        py::call_guard<py::gil_scoped_release>());
  m.def(
      "chunk_rows",
      [](const plan::Spec& spec, std::int64_t shard_rows, int chunk, std::int64_t available) {
        const Rows rows = chunk_rows(shard_rows, spec, chunk, available);
        return std::pair(rows.begin, rows.count);
      },
      py::arg("spec"), py::arg("shard_rows"), py::arg("chunk"), py::arg("available"),
      "Begin and count of the rows of a chunk within its shard.");
}

}  // namespace streamoverlap
