#include "core/device_error.h"

#include <string>

#include "core/error.h"

namespace fastconv {

void throw_device_error(const char* what, const char* reason) { throw DeviceError(std::string(what) + ": " + reason); }

}  // namespace fastconv
