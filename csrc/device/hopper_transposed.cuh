// Warpgroup matrix products whose operands both lie in shared memory with the reduction slow (PTX ISA, "wgmma",
// "MN-major"): D[64][n] (+)= A[16][64]^T B[16][n], 16-bit types, FP32 accumulation.
#pragma once

#include "device/hopper.cuh"

namespace fastconv::hopper {

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
