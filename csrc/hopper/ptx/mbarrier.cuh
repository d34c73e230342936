// Barriers in shared memory (PTX ISA, "mbarrier"), by their address there or as they are declared.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/mma.cuh"
#include "hopper/wait_report.h"

namespace fastconv::hopper {

// In shared memory. A type of its own, so that none is taken for an address.
struct Barrier {
  std::uint64_t state;
};

__device__ __forceinline__ void barrier_init(std::uint32_t barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and tells the barrier how many bytes the copies will bring before its phase ends.
__device__ __forceinline__ void arrive_expecting(std::uint32_t barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ bool try_wait(std::uint32_t barrier, unsigned parity) {
  unsigned done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}
// Until the phase of that parity has ended. Bounded: a wait that expires reports itself and stops the kernel.
__device__ __forceinline__ void wait(std::uint32_t barrier, unsigned parity, const WaitSite& site) {
  if (try_wait(barrier, parity)) return;
#pragma unroll 1
  for (int tries = 0; !try_wait(barrier, parity); ++tries) {
    if (tries == WaitSite::limit) site.expire();
  }
}

// The same in one asm block: around a loop and a call in C++, ptxas 13.0 gives a thread fewer registers than setmaxnreg
// does, and spills.
template <int kernel, int role>
__device__ __forceinline__ void wait_in_place(std::uint32_t barrier, unsigned parity, WaitReport* report) {
  static_assert(offsetof(WaitReport, kernel) == 4 && offsetof(WaitReport, role) == 8 &&
                offsetof(WaitReport, block) == 12);
  asm volatile(
      "{\n.reg .pred p;\n.reg .u32 tries, old;\nmov.u32 tries, 0;\n"
      "again:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\n"
      "add.u32 tries, tries, 1;\nsetp.lt.u32 p, tries, %5;\n@p bra again;\n"
      "setp.eq.u64 p, %2, 0;\n@p bra stop;\n"
      "atom.sys.cas.b32 old, [%2], 0, 1;\nsetp.ne.u32 p, old, 0;\n@p bra stop;\n"
      "mov.u32 old, %%ctaid.x;\nst.u32 [%2+4], %3;\nst.u32 [%2+8], %4;\nst.u32 [%2+12], old;\nmembar.sys;\n"
      "stop:\ntrap;\ndone:\n}" ::"r"(barrier),
      "r"(parity), "l"(report), "n"(kernel), "n"(role), "n"(WaitSite::limit)
      : "memory");
}

// ---- The same for barriers as they are declared. Where a kernel has no registers to spare, the level of inlining that
// they add moves what ptxas allocates: persistent, fused and single-tile kernels wait by address.

__device__ __forceinline__ void barrier_init(Barrier& barrier, unsigned arrivals) {
  barrier_init(shared_address(&barrier), arrivals);
}
__device__ __forceinline__ void arrive(Barrier& barrier) { arrive(shared_address(&barrier)); }
// One arrival for a whole warp.
__device__ __forceinline__ void arrive_for_warp(Barrier& barrier) {
  if (threadIdx.x % 32 == 0) arrive(barrier);
}
__device__ __forceinline__ void arrive_expecting(Barrier& barrier, unsigned bytes) {
  arrive_expecting(shared_address(&barrier), bytes);
}
__device__ __forceinline__ void wait(Barrier& barrier, unsigned parity, const WaitSite& site) {
  wait(shared_address(&barrier), parity, site);
}
template <int kernel, int role>
__device__ __forceinline__ void wait_in_place(Barrier& barrier, unsigned parity, WaitReport* report) {
  wait_in_place<kernel, role>(shared_address(&barrier), parity, report);
}

}  // namespace fastconv::hopper
