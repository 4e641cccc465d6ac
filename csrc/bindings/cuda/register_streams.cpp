#include <cublasLt.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "../../cuda/streams.h"
#include "../modules.h"

namespace py = pybind11;

namespace streamoverlap {

void register_streams(py::module_& m) {
  m.def("cublaslt_version", &cublasLtGetVersion);
  using cuda::StreamSet;
  py::class_<StreamSet, std::shared_ptr<StreamSet>>(m, "StreamSet")
      .def(py::init(
               [](int device, std::uintptr_t send, std::uintptr_t recv, const std::vector<std::uintptr_t>& compute) {
                 const auto stream = [device](std::uintptr_t handle) {
                   return c10::cuda::getStreamFromExternal(reinterpret_cast<cudaStream_t>(handle),
                                                           static_cast<c10::DeviceIndex>(device));
                 };
                 std::vector<c10::cuda::CUDAStream> computes;
                 for (const std::uintptr_t handle : compute) computes.push_back(stream(handle));
                 return std::make_shared<StreamSet>(stream(send), stream(recv), computes);
               }),
           py::arg("device"), py::arg("send"), py::arg("recv"), py::arg("compute"));
}

}  // namespace streamoverlap
