#pragma once

#include <pybind11/pybind11.h>

namespace streamoverlap {

void register_plan(pybind11::module_&);
void register_simulate(pybind11::module_&);
void register_communicator(pybind11::module_&);
void register_waiter(pybind11::module_&);
#ifdef STREAMOVERLAP_WITH_CUDA
void register_streams(pybind11::module_&);
#endif

}  // namespace streamoverlap
