// Shared memory beyond 48 KB has to be asked for, once for each kernel and device. Host code.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "device/cuda_check.h"

namespace fastconv {

// Calls set(), whose type is its own for every kernel, once for each device. With the compiler's atomic operations:
// <atomic> has headers of exceptions and strings, which each CUDA source would compile for every architecture.
template <typename Set>
void once_for_each_device(const char* what, const Set& set) {
  static std::uint64_t devices = 0;
  int device = 0;
  check_cuda(cudaGetDevice(&device), what);
  const std::uint64_t bit = device < 64 ? std::uint64_t{1} << device : 0;
  if ((__atomic_load_n(&devices, __ATOMIC_RELAXED) & bit) != 0) return;
  set();
  __atomic_fetch_or(&devices, bit, __ATOMIC_RELAXED);
}

// Lets blocks of `kernel` have so many bytes, always the same for one kernel. rest_is_cache: and asks for no more of
// the multiprocessor's memory than one block takes, so that the rest is L1 cache.
template <auto kernel, bool rest_is_cache = false>
void allow_shared_memory(int bytes, const char* what) {
  once_for_each_device(what, [&] {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), what);
    if constexpr (rest_is_cache) {
      const int carveout = (bytes + 1024) * 100 / (228 * 1024) + 1;  // per cent
      check_cuda(
          cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, carveout < 100 ? carveout : 100),
          what);
    }
  });
}

// The whole of the multiprocessor's memory is shared memory while `kernel` runs, so that a kernel that needs much of it
// can begin beside its last blocks.
template <auto kernel>
void prefer_shared_memory(const char* what) {
  once_for_each_device(what, [&] {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100), what);
  });
}

}  // namespace fastconv
