// Clusters of blocks (sm_90): each can read the others' shared memory and arrive at their barriers.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "hopper/wait_report.h"

namespace fastconv::hopper {

// All threads of all its blocks arrive; whole warps that need to know of it wait.
__device__ __forceinline__ void arrive_in_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_for_cluster_arrival() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Where the same address is in the shared memory of the cluster's block `rank`.
__device__ __forceinline__ std::uint32_t address_in_block(std::uint32_t address, int rank) {
  std::uint32_t result;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(address), "r"(rank));
  return result;
}

// What this thread knows of is known to whoever waits there with wait_for_cluster().
__device__ __forceinline__ void arrive_in_block(std::uint32_t barrier, int rank) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(address_in_block(barrier, rank))
               : "memory");
}
__device__ __forceinline__ bool try_wait_for_cluster(std::uint32_t barrier, unsigned parity) {
  unsigned done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}
__device__ __forceinline__ void wait_for_cluster(std::uint32_t barrier, unsigned parity, const WaitSite& site) {
#pragma unroll 1
  for (int tries = 0; !try_wait_for_cluster(barrier, parity); ++tries) {
    if (tries == WaitSite::limit) site.expire();
  }
}

__device__ __forceinline__ float4 load_from_block(std::uint32_t address_in_block) {
  float4 value;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address_in_block)
               : "memory");
  return value;
}

// As tma_load, into the same places of several blocks, at the same barrier of each: mask has a bit for each rank.
__device__ __forceinline__ void tma_load_multicast(std::uint32_t target, const CUtensorMap& map, int x0, int x1, int x2,
                                                   int x3, std::uint32_t barrier, unsigned mask) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%2, %3, %4, %5}], [%6], %7;" ::"r"(target),
      "l"(&map), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(barrier), "h"(static_cast<unsigned short>(mask))
      : "memory");
}

// Four words into another block's shared memory, at an address of address_in_block(), that report to a barrier there as
// copies do. What arrive_in_block() and wait_for_cluster() cost, the rest of a thread's stores and the L1 cache, they
// do not.
__device__ __forceinline__ void store_in_block(std::uint32_t target, const float* four, std::uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(target),
      "f"(four[0]), "f"(four[1]), "f"(four[2]), "f"(four[3]), "r"(barrier)
      : "memory");
}
// Arrives at the same barrier of another block, for it to know that something was read. What was stored before need not
// be known there: no fence, as arrive_in_block() has one.
__device__ __forceinline__ void arrive_remote(std::uint32_t barrier, int rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in_block(barrier, rank)) : "memory");
}
// Sets bits of a word of a block's shared memory. Known there after the cluster's next barrier.
__device__ __forceinline__ void set_bits_in_block(std::uint32_t address, int rank, unsigned bits) {
  asm volatile("red.relaxed.cluster.shared::cluster.or.b32 [%0], %1;" ::"r"(address_in_block(address, rank)), "r"(bits)
               : "memory");
}
__device__ __forceinline__ int block_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Of the same address in another block's shared memory.
__device__ __forceinline__ unsigned load_word_from_block(std::uint32_t address, int rank) {
  unsigned value;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address_in_block(address, rank)) : "memory");
  return value;
}

}  // namespace fastconv::hopper
