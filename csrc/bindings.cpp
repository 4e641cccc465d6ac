#include "bindings/modules.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "The compiled part of streamoverlap: plans, the checker and the executors.";
  streamoverlap::register_plan(m);
  streamoverlap::register_simulate(m);
  streamoverlap::register_communicator(m);
  streamoverlap::register_waiter(m);
}
