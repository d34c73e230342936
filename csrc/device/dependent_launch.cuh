// Kernels of a series that start before their predecessor has ended (programmatic dependent launch, compute capability
// 9.0): independent loads and set-up overlap its last blocks. Everything else comes after wait_for_predecessor(), which
// returns when the predecessor is complete and its stores are visible.
#pragma once

#include <cuda_runtime.h>

namespace fastconv {

__device__ __forceinline__ void wait_for_predecessor() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Loads what the predecessor has written, after wait_for_predecessor(). Volatile, not through a restricted pointer to
// constants: that would promise that nothing is written there while this kernel runs, so that the compiler may load
// before the wait.
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

// Once all blocks have reached this, or have ended, blocks of the next kernel may start in the free space.
__device__ __forceinline__ void launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace fastconv
