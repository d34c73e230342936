// Warpgroup matrix products (PTX ISA, "wgmma").
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/numeric.h"

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define FASTCONV_HAS_WGMMA \
  1  // elsewhere kernels that need it are compiled empty, and supports() keeps them from running
#endif

namespace fastconv::hopper {

// ---- Warpgroup matrix products: D[64][n] (+)= A[64][16] B[n][16]^T, FP32 accumulation
//
// A in registers, four of a thread; D in n/2. With l the lane and w the warp of the warpgroup, register by register:
//   A: (row 16w + l/4, k 2 (l%4) and the next), (row + 8, same k), then both at k + 8
//   D[4j .. 4j+3]: (row 16w + l/4, columns 8j + 2 (l%4) and the next), then row + 8
// B in shared memory, rows of 128 (or 64) bytes along k in the swizzle of that width, groups of 8 rows adjacent.

// The 16-byte piece in which piece `piece` of row `row` lies.
constexpr __host__ __device__ int swizzle_128(int row, int piece) { return piece ^ (row & 7); }
constexpr __host__ __device__ int swizzle_64(int row, int piece) { return piece ^ (row >> 1 & 3); }

// Of B at an address whose group of 8 rows starts at a multiple of 1024 (512) bytes. A step of 16 along k: 32 bytes.
template <int row_bytes>
__device__ __forceinline__ std::uint64_t matrix_descriptor(std::uint32_t address) {
  static_assert(row_bytes == 128 || row_bytes == 64);
  constexpr std::uint64_t swizzle = row_bytes == 128 ? 1 : 2;
  constexpr std::uint64_t group_stride = 8 * row_bytes / 16;
  return swizzle << 62 | group_stride << 32 | std::uint64_t{1} << 16 | (address & 0x3ffff) >> 4;
}
// The same, `bytes` further along k.
__device__ __forceinline__ std::uint64_t advance_descriptor(std::uint64_t descriptor, int bytes) {
  return descriptor + static_cast<std::uint64_t>(bytes / 16);
}

__device__ __forceinline__ void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int pending>
__device__ __forceinline__ void wait_for_products() {  // until at most `pending` groups are under way
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
// Keeps the compiler from moving accesses to an operand of asynchronous products across this point.
template <int count>
__device__ __forceinline__ void fence_operand(float (&d)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#define FASTCONV_D8(i)                                                                                        \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define FASTCONV_S16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define FASTCONV_S24 FASTCONV_S16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define FASTCONV_S28 FASTCONV_S24 ",%24,%25,%26,%27"
#define FASTCONV_S32 FASTCONV_S24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define FASTCONV_S48 FASTCONV_S32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define FASTCONV_S52 FASTCONV_S48 ",%48,%49,%50,%51"
#define FASTCONV_S56 FASTCONV_S48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define FASTCONV_S64 FASTCONV_S48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define FASTCONV_D16 FASTCONV_D8(0), FASTCONV_D8(8)
#define FASTCONV_D24 FASTCONV_D16, FASTCONV_D8(16)
#define FASTCONV_D28 FASTCONV_D24, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define FASTCONV_D32 FASTCONV_D24, FASTCONV_D8(24)
#define FASTCONV_D48 FASTCONV_D32, FASTCONV_D8(32), FASTCONV_D8(40)
#define FASTCONV_D52 FASTCONV_D48, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define FASTCONV_D56 FASTCONV_D48, FASTCONV_D8(48)
#define FASTCONV_D64 FASTCONV_D48, FASTCONV_D8(48), FASTCONV_D8(56)

// a0..p: numbers of the operands behind the accumulators
#define FASTCONV_PRODUCT(n, type, count, a0, a1, a2, a3, b, p)                                                       \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #type \
               "." #type " {" FASTCONV_S##count "}, {%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 "}, %" #b ", p, 1, 1, 0;\n}"  \
               : FASTCONV_D##count                                                                                   \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor), "n"(accumulate ? 1 : 0))

// accumulate: whether D is added to, or replaced.
template <typename Half, bool accumulate, int count>
__device__ __forceinline__ void multiply(float (&d)[count], const std::uint32_t (&a)[4], std::uint64_t descriptor) {
  static_assert(count == 16 || count == 24 || count == 28 || count == 32 || count == 48 || count == 52 || count == 56 ||
                count == 64);
#if defined(FASTCONV_HAS_WGMMA)
  if constexpr (std::is_same_v<Half, bfloat16_t>) {
    if constexpr (count == 16) FASTCONV_PRODUCT(32, bf16, 16, 16, 17, 18, 19, 20, 21);
    if constexpr (count == 24) FASTCONV_PRODUCT(48, bf16, 24, 24, 25, 26, 27, 28, 29);
    if constexpr (count == 28) FASTCONV_PRODUCT(56, bf16, 28, 28, 29, 30, 31, 32, 33);
    if constexpr (count == 32) FASTCONV_PRODUCT(64, bf16, 32, 32, 33, 34, 35, 36, 37);
    if constexpr (count == 48) FASTCONV_PRODUCT(96, bf16, 48, 48, 49, 50, 51, 52, 53);
    if constexpr (count == 52) FASTCONV_PRODUCT(104, bf16, 52, 52, 53, 54, 55, 56, 57);
    if constexpr (count == 56) FASTCONV_PRODUCT(112, bf16, 56, 56, 57, 58, 59, 60, 61);
    if constexpr (count == 64) FASTCONV_PRODUCT(128, bf16, 64, 64, 65, 66, 67, 68, 69);
  } else {
    if constexpr (count == 16) FASTCONV_PRODUCT(32, f16, 16, 16, 17, 18, 19, 20, 21);
    if constexpr (count == 24) FASTCONV_PRODUCT(48, f16, 24, 24, 25, 26, 27, 28, 29);
    if constexpr (count == 28) FASTCONV_PRODUCT(56, f16, 28, 28, 29, 30, 31, 32, 33);
    if constexpr (count == 32) FASTCONV_PRODUCT(64, f16, 32, 32, 33, 34, 35, 36, 37);
    if constexpr (count == 48) FASTCONV_PRODUCT(96, f16, 48, 48, 49, 50, 51, 52, 53);
    if constexpr (count == 52) FASTCONV_PRODUCT(104, f16, 52, 52, 53, 54, 55, 56, 57);
    if constexpr (count == 56) FASTCONV_PRODUCT(112, f16, 56, 56, 57, 58, 59, 60, 61);
    if constexpr (count == 64) FASTCONV_PRODUCT(128, f16, 64, 64, 65, 66, 67, 68, 69);
  }
#endif
}

#undef FASTCONV_PRODUCT

// The same with A in shared memory, too, laid out like B: 64 rows of 32 bytes, 16 halves, or float32 read as 8 values
// of TF32. a0, b0, p0: numbers of the operands behind the accumulators
#define FASTCONV_SHARED_PRODUCT(shape, types, transposed, count, a0, b0, p0)                                      \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p0 ", 0;\nwgmma.mma_async.sync.aligned." shape ".f32." types \
               " {" FASTCONV_S##count "}, %" #a0 ", %" #b0 ", p, 1, 1" transposed ";\n}"                          \
               : FASTCONV_D##count                                                                                \
               : "l"(a), "l"(b), "n"(accumulate ? 1 : 0))
#define FASTCONV_SHARED_SIZES(depth, types, transposed)                                                  \
  if constexpr (count == 16) FASTCONV_SHARED_PRODUCT("m64n32" depth, types, transposed, 16, 16, 17, 18); \
  if constexpr (count == 24) FASTCONV_SHARED_PRODUCT("m64n48" depth, types, transposed, 24, 24, 25, 26); \
  if constexpr (count == 32) FASTCONV_SHARED_PRODUCT("m64n64" depth, types, transposed, 32, 32, 33, 34); \
  if constexpr (count == 64) FASTCONV_SHARED_PRODUCT("m64n128" depth, types, transposed, 64, 64, 65, 66);

template <typename T, bool accumulate, int count>
__device__ __forceinline__ void multiply_shared(float (&d)[count], std::uint64_t a, std::uint64_t b) {
  static_assert(count == 16 || count == 24 || count == 32 || count == 64);
#if defined(FASTCONV_HAS_WGMMA)
  if constexpr (std::is_same_v<T, float>) {
    FASTCONV_SHARED_SIZES("k8", "tf32.tf32", "")
  } else if constexpr (std::is_same_v<T, bfloat16_t>) {
    FASTCONV_SHARED_SIZES("k16", "bf16.bf16", ", 0, 0")
  } else {
    FASTCONV_SHARED_SIZES("k16", "f16.f16", ", 0, 0")
  }
#endif
}

#undef FASTCONV_SHARED_SIZES
#undef FASTCONV_SHARED_PRODUCT

// ---- Both operands in shared memory with the reduction slow ("MN-major"): D[64][n] (+)= A[16][64]^T B[16][n], 16-bit
// types

// Rows of 128 bytes (64 elements) in the swizzle of that width, one for each index of the reduction. group_stride:
// bytes from 8 rows to the next 8; block_stride: from 64 columns to the next 64. The swizzle is one of absolute
// addresses, so rows may start anywhere a multiple of 128 bytes.
__device__ __forceinline__ std::uint64_t transposed_descriptor(std::uint32_t address, int block_stride,
                                                               int group_stride) {
  return std::uint64_t{1} << 62 | static_cast<std::uint64_t>(group_stride / 16) << 32 |
         static_cast<std::uint64_t>(block_stride / 16) << 16 | (address & 0x3ffff) >> 4;
}

#define FASTCONV_S96                                                                                      \
  FASTCONV_S64                                                                                            \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88," \
  "%89,%90,%91,%92,%93,%94,%95"
#define FASTCONV_D96 FASTCONV_D64, FASTCONV_D8(64), FASTCONV_D8(72), FASTCONV_D8(80), FASTCONV_D8(88)

// a, b, p: numbers of the operands behind the accumulators
#define FASTCONV_PRODUCT(n, type, count, a, b, p)                                                                    \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #type \
               "." #type " {" FASTCONV_S##count "}, %" #a ", %" #b ", p, 1, 1, 1, 1;\n}"                             \
               : FASTCONV_D##count                                                                                   \
               : "l"(descriptor_a), "l"(descriptor_b), "r"(accumulate))

// accumulate: 0 replaces D.
template <typename Half, int count>
__device__ __forceinline__ void multiply_transposed(float (&d)[count], std::uint64_t descriptor_a,
                                                    std::uint64_t descriptor_b, int accumulate) {
  static_assert(count == 32 || count == 64 || count == 96);
#if defined(FASTCONV_HAS_WGMMA)
  if constexpr (std::is_same_v<Half, bfloat16_t>) {
    if constexpr (count == 32) FASTCONV_PRODUCT(64, bf16, 32, 32, 33, 34);
    if constexpr (count == 64) FASTCONV_PRODUCT(128, bf16, 64, 64, 65, 66);
    if constexpr (count == 96) FASTCONV_PRODUCT(192, bf16, 96, 96, 97, 98);
  } else {
    if constexpr (count == 32) FASTCONV_PRODUCT(64, f16, 32, 32, 33, 34);
    if constexpr (count == 64) FASTCONV_PRODUCT(128, f16, 64, 64, 65, 66);
    if constexpr (count == 96) FASTCONV_PRODUCT(192, f16, 96, 96, 97, 98);
  }
#endif
}

#undef FASTCONV_PRODUCT

}  // namespace fastconv::hopper
