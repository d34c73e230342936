// What both CUDA kernels do to the counters of the task map, in device memory.
#pragma once

namespace fastconv::algos::winograd_megakernel {

// What this thread has done or seen happens before the raise.
__device__ __forceinline__ void raise(int* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

// The same in two steps, the first one for several raises.
__device__ __forceinline__ void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
__device__ __forceinline__ void raise_fenced(int* counter) {
  asm volatile("red.relaxed.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

// For tests: a delay of up to `mask` ns, now and then, that depends on who asks when.
__device__ __forceinline__ void delay_randomly(unsigned mask) {
  if (mask == 0) return;
  unsigned clock;
  asm volatile("mov.u32 %0, %clock;" : "=r"(clock));
  const unsigned random = (clock ^ blockIdx.x * 0x9E3779B9u) * 0x85EBCA6Bu;
  if (random >> 30 == 0) asm volatile("nanosleep.u32 %0;" ::"r"(random >> 8 & mask));
}

}  // namespace fastconv::algos::winograd_megakernel
