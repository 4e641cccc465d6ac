// Waiting for a group's own collective (serial).
#include <torch/extension.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "communicator.h"
#include "modules.h"

namespace py = pybind11;

namespace streamoverlap {
namespace {

using WorkOfGroup = c10::intrusive_ptr<c10d::Work>;

// Gloo's wait ignores its timeout, and some of its works never say they are done. So a thread waits, which may stay
// until a peer is gone. It has no Python: at the end of a program the GIL would end it by an unwinding that C++ does
// not survive.
class Waiter {
 public:
  // Once the collective has been done, serial call `number` of the communicator is left, if there is one.
  Waiter(WorkOfGroup work, const std::shared_ptr<Communicator>& communicator, std::uint32_t number)
      : state_(std::make_shared<State>()) {
    state_->work = std::move(work);
    state_->group = communicator == nullptr ? nullptr : communicator->shared_group();
    state_->number = number;
    std::thread([state = state_] { state->run(); }).detach();
  }

  ~Waiter() {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    // To let go of the work may take the GIL, so the thread must not; what it may still use is better lost.
    if (!state_->ended) static_cast<void>(new WorkOfGroup(state_->work));
  }

  bool wait(double seconds) const {
    std::unique_lock<std::mutex> lock(state_->mutex);
    return state_->changed.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return state_->ended; });
  }

  std::optional<std::string> error() const {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    return state_->error;
  }

 private:
  struct State {
    void run() {
      std::optional<std::string> failure;
      try {
        work->wait();
        if (group != nullptr) group->leave_serial(number);
      } catch (const std::exception& exception) {
        failure = exception.what();
      }
      const std::lock_guard<std::mutex> lock(mutex);
      error = std::move(failure);
      ended = true;
      changed.notify_all();
    }

    WorkOfGroup work;
    std::shared_ptr<Group> group;
    std::uint32_t number = 0;
    std::mutex mutex;
    std::condition_variable changed;
    bool ended = false;
    std::optional<std::string> error;
  };

  std::shared_ptr<State> state_;
};

}  // namespace

void register_waiter(py::module_& m) {
  py::class_<Waiter>(m, "Waiter")
      .def(py::init<WorkOfGroup, const std::shared_ptr<Communicator>&, std::uint32_t>(), py::arg("work"),
           py::arg("communicator"), py::arg("number"))
      .def("wait", &Waiter::wait, py::call_guard<py::gil_scoped_release>(), py::arg("seconds"))
      .def("error", &Waiter::error);
}

}  // namespace streamoverlap
