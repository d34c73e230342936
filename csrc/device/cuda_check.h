#pragma once

#include <cuda_runtime.h>

#include "core/device_error.h"

namespace fastconv {

inline void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw_device_error(what, cudaGetErrorString(status));
}

// After every launch: reports a bad configuration; a fault inside the kernel appears at the next synchronisation.
inline void check_launch(const char* kernel) { check_cuda(cudaGetLastError(), kernel); }

}  // namespace fastconv
