// The portable tensor-core path (sm_80 and later): asynchronous copies, ldmatrix, mma.sync.m16n8k16.
//
// Fragments of D[16][8] += A[16][16] * B[8][16]^T, in lane l (PTX ISA, "Matrix fragments for mma.m16n8k16"):
//   A: 4 registers of two neighbouring k: rows l/4 and l/4 + 8, k = 2 (l%4), then the same rows at k + 8
//   B: 2 registers: row l/4, k = 2 (l%4) and k + 8
//   D: 4 floats: row l/4, columns 2 (l%4) and the next; then row l/4 + 8
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
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int pending>
__device__ __forceinline__ void wait_for_copies() {  // until at most `pending` groups of this thread are under way
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Four 8x8 matrices of halves; lane l names row l%8 of matrix l/8, and receives row l/4, columns 2 (l%4) of each.
__device__ __forceinline__ void load_matrices(std::uint32_t (&value)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(value[0]), "=r"(value[1]), "=r"(value[2]), "=r"(value[3])
               : "r"(address)
               : "memory");
}

template <typename Half>
__device__ __forceinline__ void multiply_add(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                             std::uint32_t b1);
template <>
__device__ __forceinline__ void multiply_add<half_t>(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                                     std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void multiply_add<bfloat16_t>(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                                         std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace fastconv
