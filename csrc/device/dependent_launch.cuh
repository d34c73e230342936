// Kernels of a series that start before the one before has ended (programmatic dependent launch, compute capability
// 9.0): what does not depend on it, loads and set-up, runs beside its last blocks. Everything else comes after
// wait_for_predecessor(), which returns when the kernel before is complete and its stores are visible.
#pragma once

#include <cuda_runtime.h>

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

}  // namespace fastconv
