// An affine input: x * scale + shift and its activation, applied in FP32 on the way from a stage of one tap to the
// registers that wgmma reads. Scales and shifts of a stage's channels are beside it in shared memory, zeros beyond C
// (ChannelLoader in kernel.cuh).
#pragma once

#include "algos/implicit_gemm/persistent/tile.cuh"

namespace fastconv::algos::implicit_gemm::persistent {

// Of a stage, in shared memory: [pair of neighbouring channels] {scale, scale, shift, shift}; and the limits of the
// activation.
struct StageChannels {
  std::uint32_t address;
  float floor, cap;

  __device__ __forceinline__ bool has_cap() const { return cap != INFINITY; }
};

// Two neighbouring channels of a half type in a word. Both limits are exact in these types, so rounding before clamping
// gives the same.
template <typename T>
struct HalfPair {
  using Pair = std::conditional_t<std::is_same_v<T, bfloat16_t>, __nv_bfloat162, __half2>;

  static __device__ __forceinline__ Pair of_word(std::uint32_t word) { return reinterpret_cast<const Pair&>(word); }
  static __device__ __forceinline__ std::uint32_t word_of(Pair pair) {
    return reinterpret_cast<const std::uint32_t&>(pair);
  }
  static __device__ __forceinline__ Pair rounded(float first, float second) {
    if constexpr (std::is_same_v<T, bfloat16_t>) {
      return __floats2bfloat162_rn(first, second);
    } else {
      return __floats2half2_rn(first, second);
    }
  }
  static __device__ __forceinline__ float2 values(std::uint32_t word) {
    if constexpr (std::is_same_v<T, bfloat16_t>) {
      return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
    } else {
      return __half22float2(of_word(word));
    }
  }

  static __device__ __forceinline__ std::uint32_t norm(std::uint32_t word, uint4 affine, Pair floor) {
    const float2 x = values(word);
    return word_of(__hmax2_nan(rounded(fmaf(x.x, __uint_as_float(affine.x), __uint_as_float(affine.z)),
                                       fmaf(x.y, __uint_as_float(affine.y), __uint_as_float(affine.w))),
                               floor));
  }
  static __device__ __forceinline__ std::uint32_t at_most(std::uint32_t word, Pair cap) {
    return word_of(__hmin2_nan(of_word(word), cap));
  }
};

}  // namespace fastconv::algos::implicit_gemm::persistent
