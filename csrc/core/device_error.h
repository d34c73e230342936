// What CUDA sources throw, without the headers of exceptions and strings, which each source would compile for the host
// and for every architecture.
#pragma once

namespace fastconv {

// Throws DeviceError (core/error.h), "what: reason".
[[noreturn]] void throw_device_error(const char* what, const char* reason);

// Throws std::logic_error: a plan has a value that no kernel is compiled for.
[[noreturn]] void throw_not_compiled(long long value);

}  // namespace fastconv
