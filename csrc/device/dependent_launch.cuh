// Kernels of a series that start before the one before has ended (programmatic dependent launch, compute capability
// 9.0): what does not depend on it, loads and set-up, runs beside its last blocks. Everything else comes after
// wait_for_predecessor(), which returns when the kernel before is complete and its stores are visible.
#pragma once

#include <cuda_runtime.h>

#include <utility>

#include "device/cuda_check.h"

namespace fastconv {

__device__ __forceinline__ void wait_for_predecessor() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// What the kernel before has written, behind wait_for_predecessor(). Volatile, and not through a restricted pointer to
// constants: that says that nobody writes there while this kernel runs, and the compiler may load before the wait.
__device__ __forceinline__ int load_written(const int* source) {
  int value;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(value) : "l"(source) : "memory");
  return value;
}
__device__ __forceinline__ int2 load_written(const int2* source) {
  int2 value;
  asm volatile("ld.global.v2.s32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "l"(source) : "memory");
  return value;
}

// When all blocks have come here, or have ended, blocks of the next kernel take the room that is free.
__device__ __forceinline__ void launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// early: may begin before the kernel before has ended. It must call wait_for_predecessor() before it touches anything
// that an earlier kernel of the series touches.
template <typename... Parameters, typename... Arguments>
void launch_in_series(bool early, void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t shared_bytes,
                      cudaStream_t stream, const char* name, Arguments&&... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared_bytes, config.stream = stream;
  config.attrs = &attribute, config.numAttrs = early ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, kernel, Parameters(std::forward<Arguments>(arguments))...), name);
}

template <typename... Parameters, typename... Arguments>
void launch_dependent(void (*kernel)(Parameters...), Arguments&&... arguments) {
  launch_in_series(true, kernel, std::forward<Arguments>(arguments)...);
}

}  // namespace fastconv
