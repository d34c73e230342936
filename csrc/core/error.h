#pragma once

#include <stdexcept>
#include <string>

namespace fastconv {

// A caller's mistake. The message names the argument, its value and what was expected.
struct InvalidArgument : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// A named algorithm that cannot serve the problem. Becomes fastconv.UnsupportedError in Python, which recognises
// the prefix: an exception crosses the operator boundary as its message alone.
struct Unsupported : std::runtime_error {
  static constexpr const char* prefix = "fastconv.UnsupportedError: ";
  explicit Unsupported(const std::string& message) : std::runtime_error(prefix + message) {}
};

// A failure of the machine: a CUDA or cuBLAS call that returned an error. Becomes torch.AcceleratorError, or
// torch.OutOfMemoryError if that is what it says.
struct DeviceError : std::runtime_error {
  static constexpr const char* prefix = "fastconv.DeviceError: ";
  explicit DeviceError(const std::string& message) : std::runtime_error(prefix + message) {}
};

}  // namespace fastconv
