// Plans in Python: build, print, check, walk, and write one by hand.
#include "../plan/plan.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "../plan/builders.h"
#include "../plan/check.h"
#include "../plan/groups.h"
#include "../plan/prune.h"
#include "modules.h"

namespace py = pybind11;

namespace streamoverlap {
namespace {

using plan::Flag;
using plan::Op;
using plan::Plan;
using plan::Region;
using plan::Spec;

// Enumerators travel as their names, which is what a person types and reads.
template <class Enum>
Enum parse(const char* field, const std::string& text, int count) {
  std::string expected;
  for (int i = 0; i < count; ++i) {
    const Enum value = static_cast<Enum>(i);
    if (text == name(value)) return value;
    expected += (i ? ", " : "") + std::string(name(value));
  }
  throw py::value_error(std::string(field) + " is '" + text + "'; expected one of " + expected);
}

plan::Operation parse_operation(const std::string& text) {
  return parse<plan::Operation>("operation", text, plan::kOperations);
}
plan::Algorithm parse_algorithm(const std::string& text) { return parse<plan::Algorithm>("algorithm", text, 2); }
plan::Reduction parse_reduction(const std::string& text) { return parse<plan::Reduction>("reduce", text, 2); }
plan::Transfer parse_transfer(const std::string& text) { return parse<plan::Transfer>("transfer", text, 2); }
plan::Taper parse_taper(const std::string& text) { return parse<plan::Taper>("taper", text, 4); }
plan::Buffer parse_buffer(const std::string& text) { return parse<plan::Buffer>("buffer", text, plan::kBuffers); }
plan::Kind parse_kind(const std::string& text) { return parse<plan::Kind>("kind", text, plan::kKinds); }

plan::Stream parse_stream(const std::string& text) {
  for (plan::Stream stream = 0; stream < plan::kMaxStreams; ++stream) {
    if (text == plan::name(stream)) return stream;
  }
  throw py::value_error("stream is '" + text + "'; expected main, send, recv, compute0, compute1 or compute2");
}

plan::FlagKind parse_flag_kind(const std::string& text) {
  if (text == "full") return plan::FlagKind::Full;
  if (text == "empty") return plan::FlagKind::Empty;
  throw py::value_error("flag kind is '" + text + "'; expected full or empty");
}

template <class T>
std::string repr(const T& value) {
  return "<" + plan::to_string(value) + ">";
}

void register_parts(py::module_& m) {
  py::class_<Spec>(m, "Spec", "A variant of an operation: what all ranks must agree on.")
      .def(py::init([](const std::string& operation, const std::string& algorithm, const std::string& reduction,
                       int world, int chunks, int compute_streams, bool keep_gathered, bool copy_input, bool scaled,
                       const std::string& transfer, const std::string& taper, bool quantised) {
             return Spec{parse_operation(operation),
                         parse_algorithm(algorithm),
                         parse_reduction(reduction),
                         world,
                         chunks,
                         compute_streams,
                         keep_gathered,
                         copy_input,
                         scaled,
                         parse_transfer(transfer),
                         parse_taper(taper),
                         quantised};
           }),
           py::arg("operation"), py::arg("algorithm") = "direct", py::arg("reduction") = "accumulate",
           py::arg("world") = 1, py::arg("chunks") = 1, py::arg("compute_streams") = 1,
           py::arg("keep_gathered") = false, py::arg("copy_input") = false, py::arg("scaled") = false,
           py::arg("transfer") = "copy", py::arg("taper") = "none", py::arg("quantised") = false)
      .def_property_readonly("operation", [](const Spec& s) { return plan::name(s.operation); })
      .def_property_readonly("algorithm", [](const Spec& s) { return plan::name(s.algorithm); })
      .def_property_readonly("reduction", [](const Spec& s) { return plan::name(s.reduction); })
      .def_readonly("world", &Spec::world)
      .def_readonly("chunks", &Spec::chunks)
      .def_readonly("compute_streams", &Spec::compute_streams)
      .def_readonly("keep_gathered", &Spec::keep_gathered)
      .def_readonly("copy_input", &Spec::copy_input)
      .def_readonly("scaled", &Spec::scaled)
      .def_property_readonly("transfer", [](const Spec& s) { return plan::name(s.transfer); })
      .def_property_readonly("taper", [](const Spec& s) { return plan::name(s.taper); })
      .def_readonly("quantised", &Spec::quantised)
      .def("__eq__", [](const Spec& a, const Spec& b) { return a == b; })
      .def("__hash__", [](const Spec& s) { return py::hash(py::str(plan::to_string(s))); })
      .def("__str__", [](const Spec& s) { return plan::to_string(s); })
      .def("__repr__", &repr<Spec>);

  py::class_<Region>(m, "Region", "One chunk of one shard in a buffer of a rank.")
      .def(py::init([](const std::string& buffer, int rank, int shard, int chunk) {
             return Region{parse_buffer(buffer), rank, shard, chunk};
           }),
           py::arg("buffer"), py::arg("rank"), py::arg("shard"), py::arg("chunk"))
      .def_property_readonly("buffer", [](const Region& r) { return plan::name(r.buffer); })
      .def_readonly("rank", &Region::rank)
      .def_readonly("shard", &Region::shard)
      .def_readonly("chunk", &Region::chunk)
      .def("__eq__", [](const Region& a, const Region& b) { return a == b; })
      .def("__hash__", [](const Region& r) { return py::hash(py::str(plan::to_string(r))); })
      .def("__repr__", &repr<Region>);

  py::class_<Flag>(m, "Flag", "A word in shared memory: 'full' says data has arrived, 'empty' is the credit.")
      .def(py::init([](const std::string& kind, int sender, int receiver, int index) {
             return Flag{parse_flag_kind(kind), sender, receiver, index};
           }),
           py::arg("kind") = "full", py::arg("sender") = -1, py::arg("receiver") = -1, py::arg("index") = 0)
      .def_property_readonly("kind", [](const Flag& f) { return f.kind == plan::FlagKind::Full ? "full" : "empty"; })
      .def_readonly("sender", &Flag::sender)
      .def_readonly("receiver", &Flag::receiver)
      .def_readonly("index", &Flag::index)
      .def("__eq__", [](const Flag& a, const Flag& b) { return a == b; })
      .def("__repr__", &repr<Flag>);
}

void register_plan_classes(py::module_& m) {
  py::class_<Op>(m, "Op", "One op of a plan: its stream, what it reads and writes, its flag or event.")
      .def(py::init([](const std::string& kind, const std::string& stream, std::vector<Region> reads,
                       std::vector<Region> writes, bool bias, const Flag& flag, int event) {
             return Op{parse_kind(kind), parse_stream(stream), std::move(reads), std::move(writes), bias, flag, event};
           }),
           py::arg("kind"), py::arg("stream"), py::arg("reads") = std::vector<Region>{},
           py::arg("writes") = std::vector<Region>{}, py::arg("bias") = false, py::arg("flag") = Flag{},
           py::arg("event") = -1)
      .def_property(
          "kind", [](const Op& o) { return plan::name(o.kind); },
          [](Op& o, const std::string& text) { o.kind = parse_kind(text); })
      .def_property(
          "stream", [](const Op& o) { return plan::name(o.stream); },
          [](Op& o, const std::string& text) { o.stream = parse_stream(text); })
      .def_readwrite("reads", &Op::reads)
      .def_readwrite("writes", &Op::writes)
      .def_readwrite("bias", &Op::bias)
      .def_readwrite("flag", &Op::flag)
      .def_readwrite("event", &Op::event)
      .def("__eq__", [](const Op& a, const Op& b) { return a == b; })
      .def("__str__", [](const Op& o) { return plan::to_string(o); })
      .def("__repr__", &repr<Op>);

  py::class_<Plan>(m, "Plan", "What one rank does in one call; `ops` is in issue order (assign it to change it).")
      .def(py::init([](const Spec& spec, int rank, int events, std::vector<Op> ops) {
             return Plan{spec, rank, events, std::move(ops)};
           }),
           py::arg("spec"), py::arg("rank"), py::arg("events"), py::arg("ops"))
      .def_readwrite("spec", &Plan::spec)
      .def_readwrite("rank", &Plan::rank)
      .def_readwrite("events", &Plan::events)
      .def_readwrite("ops", &Plan::ops)
      .def_property_readonly("join_begin", &plan::join_begin, "Where in `ops` the join begins.")
      .def("__eq__", [](const Plan& a, const Plan& b) { return a == b; })
      .def("__str__", [](const Plan& p) { return plan::to_string(p); })
      .def("__repr__", [](const Plan& p) {
        return "<plan of rank " + std::to_string(p.rank) + " for " + plan::to_string(p.spec) + ", " +
               std::to_string(p.ops.size()) + " ops>";
      });

  py::class_<plan::Fault>(m, "Fault", "What the checker found: `kind`, and a `message` that names the ops.")
      .def_property_readonly("kind", [](const plan::Fault& f) { return plan::name(f.kind); })
      .def_readonly("message", &plan::Fault::message)
      .def_property_readonly(
          "ops",
          [](const plan::Fault& f) {
            std::vector<std::tuple<int, int, int>> places;
            for (const plan::Place& place : f.ops) places.emplace_back(place.call, place.rank, place.op);
            return places;
          },
          "Those that the message names: (call, rank, index in the plan's ops); none where it is about a sum or count.")
      .def("__repr__",
           [](const plan::Fault& f) { return std::string("<fault: ") + plan::name(f.kind) + ": " + f.message + ">"; });
}

}  // namespace

void register_plan(py::module_& m) {
  register_parts(m);
  register_plan_classes(m);
  const auto released = py::call_guard<py::gil_scoped_release>();
  m.def("build_all", &plan::build_all, py::arg("spec"), released);
  m.def("prune", &plan::prune, py::arg("plans"), released);
  m.def("prune_implied", &plan::prune_implied, py::arg("plans"), released);
  m.def("check", &plan::check, py::arg("plans"), released);
  m.def("check_sequence", &plan::check_sequence, py::arg("calls"), released);
  m.def(
      "check_groups",
      [](const std::vector<std::pair<std::vector<Plan>, std::vector<int>>>& calls,
         std::vector<std::vector<int>> orders) {
        std::vector<plan::GroupCall> group_calls;
        for (const auto& [plans, members] : calls) group_calls.push_back({plans, members});
        return plan::check_groups(group_calls, std::move(orders));
      },
      py::arg("calls"), py::arg("orders") = std::vector<std::vector<int>>{}, released);
  m.attr("MAX_WORLD") = plan::kMaxWorld;
  m.attr("MAX_CHUNKS") = plan::kMaxChunks;
  m.attr("MAX_COMPUTE_STREAMS") = plan::kMaxComputeStreams;
}

}  // namespace streamoverlap
