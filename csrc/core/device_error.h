// How CUDA sources report device failures, without the headers of exceptions and strings, which each source would
// compile for the host and for every architecture.
#pragma once

namespace fastconv {

// Throws DeviceError (core/error.h), "what: reason".
[[noreturn]] void throw_device_error(const char* what, const char* reason);

}  // namespace fastconv
