// Bulk and tensor copies (PTX ISA, "cp.async.bulk").
#pragma once

#include <cuda.h>
#include <cstdint>

namespace fastconv::hopper {

// ---- Copies into shared memory that report to a barrier

// Orders what is known of ordinary accesses to shared memory before copies that this thread starts later.
__device__ __forceinline__ void fence_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// `bytes` (a multiple of 16) from global memory; both addresses multiples of 16.
__device__ __forceinline__ void copy_bulk(std::uint32_t target, const void* source, unsigned bytes,
                                          std::uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}
// A box of a 4-dimensional tensor; zeros outside the tensor.
__device__ __forceinline__ void tma_load(std::uint32_t target, const CUtensorMap& map, int x0, int x1, int x2, int x3,
                                         std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(target),
      "l"(&map), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(barrier)
      : "memory");
}
// `bytes` (a multiple of 16) from global memory into the L2 cache.
__device__ __forceinline__ void prefetch_bulk(const void* source, unsigned bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes) : "memory");
}
// A grid's data into the L2 cache, so many pieces of that many bytes: each block asks for its share, by one thread.
template <unsigned piece>
__device__ __forceinline__ void prefetch_pieces(const void* source, unsigned pieces) {
  static_assert(piece % 128 == 0 && piece <= 16384);
  constexpr unsigned copied = 16384 / piece;  // by a copy at most
  const unsigned share = pieces / gridDim.x + 1, first = share * blockIdx.x, end = min(pieces, first + share);
#pragma unroll 1
  for (unsigned at = first; at < end; at += copied) {
    prefetch_bulk(static_cast<const char*>(source) + std::int64_t{at} * piece, min(end - at, copied) * piece);
  }
}
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// ---- Copies out of shared memory. Between ordinary stores and them: fence_copies() by the threads that have stored,
// then a barrier. A thread waits for what it has started itself.

// A box of shared memory into a 4-dimensional tensor, where it lies within.
__device__ __forceinline__ void tma_store(const CUtensorMap& map, int x0, int x1, int x2, int x3,
                                          std::uint32_t source) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(&map),
               "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(source)
               : "memory");
}
__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until all but `pending` groups have been read from shared memory.
template <int pending>
__device__ __forceinline__ void wait_for_reading() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}
// Until all but `pending` groups have been written.
template <int pending>
__device__ __forceinline__ void wait_for_writing() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
}

}  // namespace fastconv::hopper
