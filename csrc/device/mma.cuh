// The portable tensor-core path (sm_80 and later): asynchronous copies and mma.sync.m16n8k16.
#pragma once

#include <cstdint>

#include "device/numeric.h"

namespace fastconv {

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes from global to shared memory, or zeros. Both addresses are multiples of 16.
__device__ __forceinline__ void copy_async(std::uint32_t target, const void* source, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(valid ? 16 : 0)
               : "memory");
}
// The first `bytes` of `size` (4, 8 or 16) bytes, then zeros. Both addresses are multiples of `size`.
template <int size>
__device__ __forceinline__ void copy_async(std::uint32_t target, const void* source, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target), "l"(source), "n"(size), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int pending>
__device__ __forceinline__ void wait_for_copies() {  // until at most `pending` groups of this thread are under way
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// D[16][8] = C[16][8] + A[16][16] B[8][16]^T, FP32 accumulation. In lane l (PTX ISA, "Matrix fragments for
// mma.m16n8k16 with floating point type"), a register of A or B holding two neighbouring k:
//   A: (row l/4, k 2 (l%4)), (row l/4 + 8, same k), then the same rows at k + 8
//   B: (row l/4, k 2 (l%4)), (row l/4, k + 8)
//   C, D: row l/4, columns 2 (l%4) and the next; then row l/4 + 8
template <typename Half>
__device__ __forceinline__ void multiply_add(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                             std::uint32_t b1, const float (&c)[4]);
template <>
__device__ __forceinline__ void multiply_add<half_t>(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                                     std::uint32_t b1, const float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}
template <>
__device__ __forceinline__ void multiply_add<bfloat16_t>(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                                         std::uint32_t b1, const float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

}  // namespace fastconv
