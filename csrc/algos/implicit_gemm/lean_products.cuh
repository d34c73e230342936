// D[64][n] (+)= A[64][16] B[n][16]^T, both in shared memory, 32 bytes of each row; TF32: 8 values of 4 bytes.
#pragma once

#include <type_traits>

#include "device/hopper.cuh"

namespace fastconv::algos::implicit_gemm::lean {

#define FASTCONV_LEAN_PRODUCT(shape, types, transposed, count, a0, b0, p0)                                        \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p0 ", 0;\nwgmma.mma_async.sync.aligned." shape ".f32." types \
               " {" FASTCONV_S##count "}, %" #a0 ", %" #b0 ", p, 1, 1" transposed ";\n}"                          \
               : FASTCONV_D##count                                                                                \
               : "l"(a), "l"(b), "n"(accumulate ? 1 : 0))
#define FASTCONV_LEAN_SIZES(depth, types, transposed)                                                  \
  if constexpr (count == 16) FASTCONV_LEAN_PRODUCT("m64n32" depth, types, transposed, 16, 16, 17, 18); \
  if constexpr (count == 24) FASTCONV_LEAN_PRODUCT("m64n48" depth, types, transposed, 24, 24, 25, 26); \
  if constexpr (count == 32) FASTCONV_LEAN_PRODUCT("m64n64" depth, types, transposed, 32, 32, 33, 34); \
  if constexpr (count == 64) FASTCONV_LEAN_PRODUCT("m64n128" depth, types, transposed, 64, 64, 65, 66);

// a, b: matrix descriptors. accumulate: whether D is added to, or replaced.
template <typename T, bool accumulate, int count>
__device__ __forceinline__ void multiply_shared(float (&d)[count], std::uint64_t a, std::uint64_t b) {
  static_assert(count == 16 || count == 24 || count == 32 || count == 64);
#if defined(FASTCONV_HAS_WGMMA)
  if constexpr (std::is_same_v<T, float>) {
    FASTCONV_LEAN_SIZES("k8", "tf32.tf32", "")
  } else if constexpr (std::is_same_v<T, bfloat16_t>) {
    FASTCONV_LEAN_SIZES("k16", "bf16.bf16", ", 0, 0")
  } else {
    FASTCONV_LEAN_SIZES("k16", "f16.f16", ", 0, 0")
  }
#endif
}

#undef FASTCONV_LEAN_SIZES
#undef FASTCONV_LEAN_PRODUCT

}  // namespace fastconv::algos::implicit_gemm::lean
