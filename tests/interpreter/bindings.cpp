// streamoverlap._interpreter: plans travel as plain tuples, so no type crosses from streamoverlap._C.
//
//   spec   = (operation, algorithm, reduction, world, chunks, compute_streams, keep_gathered, copy_input, scaled,
//             transfer, taper, quantised)
//   plan   = (*spec, rank, events, [op, ...])
//   op     = (kind, stream, [region, ...] read, [region, ...] written, bias, flag, event)
//   region = (buffer, rank, shard, chunk)
//   flag   = (flag_kind, sender, receiver, index)
//
// Enumerators are numbers, in the order of csrc/plan/plan.h; streams as there.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "campaign.h"
#include "interpreter.h"

namespace py = pybind11;

namespace streamoverlap::interpreter {
namespace {

template <class Enum>
Enum enumerator(const char* what, const py::handle& value, int count) {
  const int number = value.cast<int>();
  if (number < 0 || number >= count) {
    throw py::value_error(std::string(what) + " is " + std::to_string(number) + "; expected 0 to " +
                          std::to_string(count - 1));
  }
  return static_cast<Enum>(number);
}

void expect_fields(const char* what, const py::tuple& tuple, std::size_t count) {
  if (tuple.size() != count) {
    throw py::value_error(std::string(what) + " has " + std::to_string(tuple.size()) + " fields; expected " +
                          std::to_string(count));
  }
}

plan::Spec to_spec(const py::tuple& t) {
  plan::Spec spec;
  spec.operation = enumerator<plan::Operation>("operation", t[0], plan::kOperations);
  spec.algorithm = enumerator<plan::Algorithm>("algorithm", t[1], 2);
  spec.reduction = enumerator<plan::Reduction>("reduction", t[2], 2);
  spec.world = t[3].cast<int>();
  spec.chunks = t[4].cast<int>();
  spec.compute_streams = t[5].cast<int>();
  spec.keep_gathered = t[6].cast<bool>();
  spec.copy_input = t[7].cast<bool>();
  spec.scaled = t[8].cast<bool>();
  spec.transfer = enumerator<plan::Transfer>("transfer", t[9], 2);
  spec.taper = enumerator<plan::Taper>("taper", t[10], 4);
  spec.quantised = t[11].cast<bool>();
  return spec;
}

std::vector<plan::Region> to_regions(const py::handle& list) {
  std::vector<plan::Region> regions;
  for (const py::handle item : list) {
    const auto t = item.cast<py::tuple>();
    expect_fields("region", t, 4);
    regions.push_back({enumerator<plan::Buffer>("buffer", t[0], plan::kBuffers), t[1].cast<int>(), t[2].cast<int>(),
                       t[3].cast<int>()});
  }
  return regions;
}

plan::Op to_op(const py::tuple& t) {
  expect_fields("op", t, 7);
  const auto flag = t[5].cast<py::tuple>();
  expect_fields("flag", flag, 4);
  plan::Op op;
  op.kind = enumerator<plan::Kind>("kind", t[0], plan::kKinds);
  op.stream = t[1].cast<int>();
  op.reads = to_regions(t[2]);
  op.writes = to_regions(t[3]);
  op.bias = t[4].cast<bool>();
  op.flag = {enumerator<plan::FlagKind>("flag kind", flag[0], 2), flag[1].cast<int>(), flag[2].cast<int>(),
             flag[3].cast<int>()};
  op.event = t[6].cast<int>();
  return op;
}

plan::Plan to_plan(const py::tuple& t) {
  expect_fields("plan", t, 15);
  plan::Plan plan;
  plan.spec = to_spec(t);
  plan.rank = t[12].cast<int>();
  plan.events = t[13].cast<int>();
  for (const py::handle op : t[14]) plan.ops.push_back(to_op(op.cast<py::tuple>()));
  return plan;
}

std::vector<std::string> interpret_tuples(const std::vector<std::vector<py::tuple>>& tuples, std::size_t max_states) {
  Calls calls;
  for (const auto& ranks : tuples) {
    calls.emplace_back();
    for (const py::tuple& plan : ranks) calls.back().push_back(to_plan(plan));
  }
  const py::gil_scoped_release released;
  Limits limits;
  limits.states = max_states;
  Report report = interpret(calls, limits);
  if (!report.decided()) {
    report.breakages.push_back("undecided: nothing broke in " + std::to_string(report.states) +
                               " states, and there are more");
  }
  return std::move(report.breakages);
}

py::dict mutate_tuple(const py::tuple& spec_tuple, bool prune, std::size_t max_states, std::uint64_t seed) {
  expect_fields("spec", spec_tuple, 12);
  const plan::Spec spec = to_spec(spec_tuple);
  Campaign c;
  {
    const py::gil_scoped_release released;
    c = mutate(spec, prune, max_states, seed);
  }
  using namespace py::literals;
  return py::dict("mutants"_a = c.mutants, "broken"_a = c.broken, "missed"_a = c.missed,
                  "by_sequence"_a = c.by_sequence, "stricter"_a = c.stricter, "redundant"_a = c.redundant,
                  "undecided"_a = c.undecided, "exhaustive"_a = c.exhaustive, "missed_texts"_a = c.missed_texts,
                  "by_sequence_texts"_a = c.by_sequence_texts, "stricter_texts"_a = c.stricter_texts,
                  "redundant_texts"_a = c.redundant_texts);
}

}  // namespace

PYBIND11_MODULE(_interpreter, m) {
  m.doc() = "Runs plans in every order the hardware may choose, and says how they break.";
  m.def("interpret", &interpret_tuples, py::arg("calls"), py::arg("max_states") = 2'000'000,
        "What breaks when each calls[k] (the plan of every rank, as a tuple) is run on one slot in turn. Empty: "
        "nothing. Where the plans have more than max_states states, every op is delayed in turn instead; the list "
        "says 'undecided' where that is not enough.");
  m.def("mutate", &mutate_tuple, py::arg("spec"), py::arg("prune"), py::arg("max_states") = 20'000, py::arg("seed") = 0,
        "Deletes, moves and redirects each sync op of the plans of a spec, and compares the checker with the "
        "interpreter: counts, and the texts behind them. See campaign.h.");
}

}  // namespace streamoverlap::interpreter
