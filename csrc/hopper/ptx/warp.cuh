// Collective operations of a block's threads: registers (PTX ISA, "setmaxnreg"), the elected lane, named barriers,
// matrices and vectors in shared memory.
#pragma once

#include <cstdint>

namespace fastconv::hopper {

template <int registers>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

// Whether this is the elected lane of a whole warp. threadIdx.x % 32 == 0 does the same where the lanes have converged;
// this makes them converge, without the registers that a __syncwarp() before it costs (winograd_fused, which has none
// left, spills with it).
__device__ __forceinline__ bool elect_one() {
  unsigned elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected != 0;
}

// ---- Ordinary stores to shared memory, and named barriers

__device__ __forceinline__ void store_shared(std::uint32_t target, float first, float second) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(target), "f"(first), "f"(second) : "memory");
}
// Four matrices of 8 x 8 elements of 16 bits, transposed: lane l gives the address of column l % 8 of matrix l / 8, of
// 16 bytes, and holds (row l/4, columns 2 (l%4) and the next) of each. So two rows of D become columns.
__device__ __forceinline__ void store_transposed(std::uint32_t target, const std::uint32_t (&matrix)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(target), "r"(matrix[0]),
               "r"(matrix[1]), "r"(matrix[2]), "r"(matrix[3])
               : "memory");
}
// A warp's matrix of 8 x 8 elements of 16 bits, (row l/4, columns 2 (l%4) and the next) in lane l, transposed.
__device__ __forceinline__ std::uint32_t transpose(std::uint32_t matrix) {
  std::uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
  return result;
}
__device__ __forceinline__ void store_shared(std::uint32_t target, const float* four) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(target), "f"(four[0]), "f"(four[1]), "f"(four[2]),
               "f"(four[3])
               : "memory");
}
__device__ __forceinline__ void load_shared(float* four, std::uint32_t source) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(four[0]), "=f"(four[1]), "=f"(four[2]), "=f"(four[3])
               : "r"(source)
               : "memory");
}
// A named barrier of so many threads.
__device__ __forceinline__ void synchronise(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// Arrives there without waiting.
__device__ __forceinline__ void arrive_at(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace fastconv::hopper
