// A Python signal handler has raised, such as that of Ctrl-C, while a call waited.
#pragma once

#include <memory>
#include <stdexcept>
#include <utility>

namespace streamoverlap {

struct Interrupted : std::runtime_error {
  explicit Interrupted(std::shared_ptr<void> error)
      : std::runtime_error("interrupted by a signal"), error(std::move(error)) {}

  std::shared_ptr<void> error;  // the Python exception: a pybind11::error_already_set
};

}  // namespace streamoverlap
