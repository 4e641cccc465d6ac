#include <pthread.h>
#include <pybind11/functional.h>
#include <torch/extension.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <optional>
#include <thread>

#include "../group/signature.h"
#include "communicator.h"
#include "interrupted.h"
#include "modules.h"
#include "quantise.h"
#include "test_hook.h"
#ifdef STREAMOVERLAP_WITH_CUDA
#include "../cuda/streams.h"
#endif

namespace py = pybind11;

namespace streamoverlap {
namespace {

constexpr std::chrono::milliseconds kReportWait{200};  // the watchdog looks every few milliseconds

// AbortError becomes the Python class of its kind, with its fields and what the watchdog saw as attributes.
template <class Source>  // Communicator or Work
[[noreturn]] void raise(const AbortError& error, Source& source) {
  const std::string report = source.report(kReportWait);
  const py::gil_scoped_acquire gil;
  const char* name = error.kind == AbortKind::PeerTimeout ? "PeerTimeoutError"
                     : error.kind == AbortKind::Mismatch  ? "MismatchError"
                                                          : "CommunicatorError";
  const py::module_ errors = py::module_::import("streamoverlap.errors");
  const auto what = py::reinterpret_steal<py::str>(  // causes may be texts of anybody's exceptions
      PyUnicode_DecodeUTF8(error.what(), static_cast<py::ssize_t>(std::strlen(error.what())), "replace"));
  const py::object value = errors.attr(name)(what, error.group, error.op, error.peer, error.elapsed, report);
  if (source.first_to_ask()) errors.attr("log_failure")(value);
  PyErr_SetObject(py::type::handle_of(value).ptr(), value.ptr());
  throw py::error_already_set();
}

std::atomic<int> threads_inside{0};  // methods that have let go of the GIL
// A forked child has none of the threads.
[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, [] { threads_inside = 0; });

bool in_main_thread() {
  static const auto main = [] {
    const py::gil_scoped_acquire gil;
    return py::module_::import("threading").attr("main_thread")().attr("ident").cast<unsigned long>();
  }();
  return PyThread_get_thread_ident() == main;
}

// At the end of a program the GIL ends other threads that want it, by an unwinding that C++ does not survive. So they
// are waited for, and who comes later stays.
struct Inside {
  Inside() { ++threads_inside; }
  ~Inside() {
    --threads_inside;
#if PY_VERSION_HEX >= 0x030d0000
    const bool ending = Py_IsFinalizing();
#else
    const bool ending = _Py_IsFinalizing();
#endif
    while (ending && !in_main_thread()) pause();
  }
};

bool wait_until_outside(double seconds) {
  const py::gil_scoped_release no_gil;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (threads_inside > 0 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return threads_inside == 0;
}

// A method without the GIL, whose errors are Python's: torch's own wrapper turns c10's into TypeError, ValueError, ...
template <class Self, class Result, class... Args>
auto released(Result (Self::*method)(Args...)) {
  return torch::wrap_pybind_function_no_gil([method](Self& self, Args... args) -> Result {
    const Inside inside;
    try {
      return (self.*method)(std::forward<Args>(args)...);
    } catch (const AbortError& error) {
      raise(error, self);
    } catch (const std::invalid_argument& error) {
      const py::gil_scoped_acquire gil;
      PyErr_SetString(PyExc_ValueError, error.what());
      throw py::error_already_set();
    } catch (const Interrupted& interrupted) {
      throw py::error_already_set(*static_cast<py::error_already_set*>(interrupted.error.get()));
    }
  });
}

// Python's handlers of signals run in its main thread, when that asks. Others must not ask: at the end of the program
// the GIL ends a thread that wants it.
Poll check_signals() {
  in_main_thread();  // finds it out, while the GIL is there to ask
  return [] {
    if (!in_main_thread()) return;
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw Interrupted(std::make_shared<py::error_already_set>());
  };
}

// Nobody can catch what a destructor throws: Ctrl-C while it waits is passed on as if it came after.
void let_calls_end(Communicator& communicator) {
  try {
    communicator.wind_down();
  } catch (const Interrupted& interrupted) {
    communicator.abort("interrupted while it let go of its communicator");
    const py::gil_scoped_acquire gil;
    auto& error = *static_cast<py::error_already_set*>(interrupted.error.get());
    if (error.matches(PyExc_KeyboardInterrupt)) {
      PyErr_SetInterrupt();
    } else {
      error.discard_as_unraisable("streamoverlap.Communicator");
    }
  } catch (const std::exception&) {  // of CUDA, which is no more; the executor's end copes
  }
}

// Calls take the locks of a communicator without the GIL, and streams may wait for it to let go of a tensor. So its
// end, which waits for both, must not hold it. A forked child has none of its threads to wait for, and no part in the
// group: there the memory is left alone.
std::shared_ptr<Communicator> make(std::string group_name, int rank, int world, double timeout, int device, int slots) {
  return {new Communicator(std::move(group_name), rank, world, timeout, device, slots, check_signals()),
          [maker = getpid()](Communicator* communicator) {
            if (getpid() != maker) return;
            std::optional<py::gil_scoped_release> no_gil;
            if (PyGILState_Check()) no_gil.emplace();
            const Inside inside;
            let_calls_end(*communicator);
            delete communicator;
          }};
}

// What identifies a serial call: its signature, and a text for messages.
std::pair<std::uint32_t, std::string> serial_call(plan::Operation operation, const Problem& problem, int world) {
  plan::Spec spec;
  spec.operation = operation;
  spec.world = world;
  spec.chunks = 0;  // as no plan has
  spec.quantised = problem.call.packed_unit > 0;
  return {signature(spec, problem.shape_key()),
          std::string("serial ") + plan::name(operation) + " on " + problem.description()};
}

// allocate(bytes) returns (owner, address by rank); both callable and owner are let go with the GIL held.
std::shared_ptr<void> owned(py::object object) {
  return std::shared_ptr<void>(object.release().ptr(), [](void* pointer) {
    const py::gil_scoped_acquire gil;
    py::handle(static_cast<PyObject*>(pointer)).dec_ref();
  });
}

AllocateSlots from_python(const py::object& allocate) {
  if (allocate.is_none()) return {};
  const std::shared_ptr<void> callable = owned(allocate);
  return [callable](std::int64_t bytes) {
    const py::gil_scoped_acquire gil;
    py::object found;
    try {
      found = py::handle(static_cast<PyObject*>(callable.get()))(bytes);
    } catch (py::error_already_set& error) {
      if (error.matches(PyExc_KeyboardInterrupt)) throw Interrupted(std::make_shared<py::error_already_set>(error));
      throw;
    }
    const auto [owner, addresses] = found.cast<std::pair<py::object, std::vector<std::uintptr_t>>>();
    SlotMemory memory;
    for (const std::uintptr_t address : addresses) memory.bases.push_back(reinterpret_cast<std::byte*>(address));
    memory.owner = owned(owner);
    return memory;
  };
}

}  // namespace

void register_communicator(py::module_& m) {
  py::class_<CallOptions> options(m, "CallOptions");
  options.def(py::init([](bool prepare, bool issue, bool async_op, double timeout) {
                CallOptions made;
                made.prepare = prepare;
                made.issue = issue;
                made.async = async_op;
                made.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(std::ceil(timeout * 1000)));
                return made;
              }),
              py::arg("prepare"), py::arg("issue"), py::arg("async_op"), py::arg("timeout"));
#ifdef STREAMOVERLAP_WITH_CUDA
  register_streams(m);
  options.def_readwrite("streams", &CallOptions::streams);
#endif

  py::class_<Scaling>(m, "Scaling")
      .def(py::init([](at::Tensor x, Tensors weights, at::ScalarType out_dtype, bool use_fast_accum) {
             return Scaling{std::move(x), std::move(weights), out_dtype, use_fast_accum};
           }),
           py::arg("x"), py::arg("weights"), py::arg("out_dtype"), py::arg("use_fast_accum"))
      .def_readonly("x", &Scaling::x)
      .def_readonly("weights", &Scaling::weights)
      .def_readonly("out_dtype", &Scaling::out_dtype)
      .def_readonly("use_fast_accum", &Scaling::fast_accumulation)
      .def_property_readonly("row_wise", &Scaling::row_wise)
      .def("__str__", &Scaling::text);

  py::class_<Work, std::shared_ptr<Work>>(m, "Work")
      .def("join", released(&Work::join))
      .def("wait_for", released(&Work::wait_for), py::arg("seconds"))
      .def("is_completed", released(&Work::is_completed))
      .def("check", released(&Work::check))
      .def("stream", &Work::stream);

  py::class_<CallTrace, std::shared_ptr<CallTrace>>(m, "CallTrace")
      .def_property_readonly("spec", [](const CallTrace& self) { return self.spec; })
      .def_property_readonly("title", [](const CallTrace& self) { return self.title; })
      .def("spans", [](const CallTrace& self) {  // (start, end) by op, in nanoseconds of CLOCK_MONOTONIC; 0: not done
        std::vector<std::pair<std::int64_t, std::int64_t>> spans;
        for (const CallTrace::Span& span : self.spans()) spans.emplace_back(span.start, span.end);
        return spans;
      });

  py::class_<Communicator, std::shared_ptr<Communicator>>(m, "Communicator")
      .def(py::init(&make), py::arg("group_name"), py::arg("rank"), py::arg("world"), py::arg("timeout"),
           py::arg("device") = -1, py::arg("slots") = 2)
      .def("address", &Communicator::address)
      .def("connect", released(&Communicator::connect), py::arg("addresses"), py::arg("timeout"))
      .def(
          "attach",
          [](Communicator& self, const std::vector<int>& devices, const py::object& allocate,
             std::function<void(std::int64_t)> on_growth) {
            AllocateSlots allocate_slots = from_python(allocate);
            const py::gil_scoped_release no_gil;
            self.attach(devices, std::move(allocate_slots), std::move(on_growth));
          },
          py::arg("peer_devices") = std::vector<int>{}, py::arg("allocate") = py::none(),
          py::arg("on_growth") = py::none())
      .def("all_gather_gemm", released(&Communicator::all_gather_gemm))
      .def("gemm_reduce_scatter", released(&Communicator::gemm_reduce_scatter))
      .def("gemm_all_reduce", released(&Communicator::gemm_all_reduce))
      .def("all_gather", released(&Communicator::all_gather))
      .def("reduce_scatter", released(&Communicator::reduce_scatter))
      .def("all_reduce", released(&Communicator::all_reduce))
      .def("enter_serial", released(&Communicator::enter_serial), py::arg("signature"), py::arg("text"),
           py::arg("timeout"))
      .def("agree", released(&Communicator::agree), py::arg("number"), py::arg("shared"), py::arg("own"),
           py::arg("choice"), py::arg("call"), py::arg("timeout") = 0.0)
      .def("fail_serial", released(&Communicator::fail_serial), py::arg("number"), py::arg("cause"))
      .def("leave_serial", released(&Communicator::leave_serial), py::arg("number"))
      .def("reserve", released(&Communicator::reserve), py::arg("slot_bytes"))
      .def("slot_bytes", released(&Communicator::slot_bytes))
      .def("set_timeout", released(&Communicator::set_timeout), py::arg("seconds"))
      .def("set_report_path", released(&Communicator::set_report_path), py::arg("path"))
      .def("abort", released(&Communicator::abort), py::arg("cause"))
      .def("drain", released(&Communicator::drain), py::arg("seconds"))
      .def("check", released(&Communicator::check))
      .def("start_trace", released(&Communicator::start_trace))
      .def("stop_trace", released(&Communicator::stop_trace))
      .def("finish_traces", released(&Communicator::finish_traces))
      .def("set_tuning", released(&Communicator::set_tuning), py::arg("on"))
      .def("measured_gemms",
           [](Communicator& self) {  // (key, algorithm, seconds, seconds of cuBLASLt's own choice)
             std::vector<std::tuple<std::array<std::int64_t, 8>, int, double, double>> gemms;
             for (const TunedGemm& gemm : self.measured_gemms()) {
               gemms.emplace_back(gemm.key, gemm.algorithm, gemm.seconds, gemm.first_seconds);
             }
             return gemms;
           })
      .def(
          "prefer_gemms",
          [](Communicator& self, const std::vector<std::pair<std::array<std::int64_t, 8>, int>>& gemms) {
            std::vector<TunedGemm> tuned;
            for (const auto& [key, algorithm] : gemms) tuned.push_back({key, algorithm, 0, 0});
            self.prefer_gemms(tuned);
          },
          py::arg("gemms"))
      .def(
          "set_test_hook",
          [](Communicator& self, std::uint64_t seed, double max_delay_ms, std::vector<std::string> streams,
             std::int64_t kill_at, std::int64_t stop_at) {
            self.set_before_op(make_hook({seed, max_delay_ms, std::move(streams), kill_at, stop_at}));
          },
          py::call_guard<py::gil_scoped_release>(), py::arg("seed"), py::arg("max_delay_ms"), py::arg("streams"),
          py::arg("kill_at"), py::arg("stop_at"))
      .def(
          "clear_test_hook", [](Communicator& self) { self.set_before_op(nullptr); },
          py::call_guard<py::gil_scoped_release>())
      .def("raw_streams", &Communicator::raw_streams);

  m.def("quantise_rows", torch::wrap_pybind_function([](const at::Tensor& rows) { return quantise_rows(rows); }),
        py::arg("rows"));

  m.def("wait_until_outside", &wait_until_outside, py::arg("seconds"));

#ifdef STREAMOVERLAP_WITH_CUDA
  m.attr("WITH_CUDA") = true;
#else
  m.attr("WITH_CUDA") = false;
#endif

  // The same checks for calls that do not reach an executor: `serial`, by the group's own collective. They return what
  // enter_serial takes.
  m.def("validate_all_gather_gemm",
        torch::wrap_pybind_function([](const at::Tensor& x, const Tensors& weights, const OptionalTensors& biases,
                                       int world, const std::optional<Scaling>& scaling) {
          const Problem problem = all_gather_gemm_problem(x, weights, biases, false, world, scaling);
          return serial_call(plan::Operation::AllGatherGemm, problem, world);
        }),
        py::arg("x"), py::arg("weights"), py::arg("biases"), py::arg("world"), py::arg("scaling") = py::none());
  const auto validate_sum = [&m](const char* name, plan::Operation operation, auto make_problem) {
    m.def(name,
          torch::wrap_pybind_function([=](const at::Tensor& x, const at::Tensor& weight,
                                          const std::optional<at::Tensor>& bias, int world,
                                          const std::optional<Scaling>& scaling, bool quantised) {
            return serial_call(operation, make_problem(x, weight, bias, world, scaling, quantised), world);
          }),
          py::arg("x"), py::arg("weight"), py::arg("bias"), py::arg("world"), py::arg("scaling") = py::none(),
          py::arg("quantised") = false);
  };
  validate_sum("validate_gemm_reduce_scatter", plan::Operation::GemmReduceScatter, &gemm_reduce_scatter_problem);
  validate_sum("validate_gemm_all_reduce", plan::Operation::GemmAllReduce, &gemm_all_reduce_problem);
  m.def("validate_all_gather", torch::wrap_pybind_function([](const at::Tensor& x, int world) {
          return serial_call(plan::Operation::AllGather, all_gather_problem(x, world), world);
        }),
        py::arg("x"), py::arg("world"));
  m.def("validate_reduce_scatter", torch::wrap_pybind_function([](const at::Tensor& x, int world, bool quantised) {
          return serial_call(plan::Operation::ReduceScatter, reduce_scatter_problem(x, world, quantised), world);
        }),
        py::arg("x"), py::arg("world"), py::arg("quantised") = false);
  m.def("validate_all_reduce", torch::wrap_pybind_function([](const at::Tensor& x, int world, bool quantised) {
          return serial_call(plan::Operation::AllReduce, all_reduce_problem(x, world, quantised), world);
        }),
        py::arg("x"), py::arg("world"), py::arg("quantised") = false);
}

}  // namespace streamoverlap
