#include "core/device_error.h"

#include <stdexcept>
#include <string>

#include "core/error.h"

namespace fastconv {

void throw_device_error(const char* what, const char* reason) { throw DeviceError(std::string(what) + ": " + reason); }

void throw_not_compiled(long long value) {
  throw std::logic_error("dispatch_value: nothing is compiled for " + std::to_string(value));
}

}  // namespace fastconv
