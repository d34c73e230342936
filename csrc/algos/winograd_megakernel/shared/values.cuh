// Two neighbouring channels of a lane, and the scales of transformed values (docs/concepts/numerics.md).
#pragma once

#include <cstdint>
#include <cstring>

#include "device/epilogue.h"
#include "device/numeric.h"

namespace fastconv::algos::winograd_megakernel {

struct Values {
  float e[2];

  friend __device__ __forceinline__ Values operator+(const Values& a, const Values& b) {
    return {a.e[0] + b.e[0], a.e[1] + b.e[1]};
  }
  friend __device__ __forceinline__ Values operator-(const Values& a, const Values& b) {
    return {a.e[0] - b.e[0], a.e[1] - b.e[1]};
  }
  friend __device__ __forceinline__ Values operator*(const Values& a, float b) { return {a.e[0] * b, a.e[1] * b}; }
};

// The activation of four neighbours in a row. identity: there is none; plain: it is not SiLU.
template <bool plain>
__device__ __forceinline__ void apply(const ActivationFunction& activate, bool identity, Values (&row)[4]) {
  if (!plain && activate.is_silu) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      row[j].e[0] = ActivationFunction::silu(row[j].e[0]), row[j].e[1] = ActivationFunction::silu(row[j].e[1]);
    }
  } else if (!identity) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      row[j].e[0] = activate.piecewise(row[j].e[0]), row[j].e[1] = activate.piecewise(row[j].e[1]);
    }
  }
}

// Neighbouring elements in memory, moved by one instruction.
template <typename T, int count>
struct alignas(sizeof(T) * count) Aligned {
  T e[count];
};

__device__ __forceinline__ Values load_pair(const float* source) {
  const float2 pair = *reinterpret_cast<const float2*>(source);
  return {pair.x, pair.y};
}
__device__ __forceinline__ Values load_pair(const half_t* source) {
  const float2 pair = __half22float2(*reinterpret_cast<const half2*>(source));
  return {pair.x, pair.y};
}
__device__ __forceinline__ Values load_pair(const bfloat16_t* source) {
  const float2 pair = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(source));
  return {pair.x, pair.y};
}
template <typename T>
__device__ __forceinline__ void store_pair(T* target, const Values& values) {
  *reinterpret_cast<Aligned<T, 2>*>(target) = {from_float<T>(values.e[0]), from_float<T>(values.e[1])};
}

template <typename Pair>
__device__ __forceinline__ std::uint32_t to_bits(Pair value) {
  std::uint32_t bits;
  static_assert(sizeof bits == sizeof value);
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Past the L2 cache, if index < count: predicated, not branched around.
__device__ __forceinline__ void store_bits_past(int index, int count, void* target, std::uint32_t bits) {
  asm volatile("{\n.reg .pred p;\nsetp.lt.s32 p, %1, %2;\n@p st.global.cs.b32 [%0], %3;\n}" ::"l"(target), "r"(index),
               "r"(count), "r"(bits)
               : "memory");
}
__device__ __forceinline__ void store_pair_past(int index, int count, float* target, const Values& values) {
  asm volatile("{\n.reg .pred p;\nsetp.lt.s32 p, %1, %2;\n@p st.global.cs.v2.f32 [%0], {%3, %4};\n}" ::"l"(target),
               "r"(index), "r"(count), "f"(values.e[0]), "f"(values.e[1])
               : "memory");
}
__device__ __forceinline__ void store_pair_past(int index, int count, half_t* target, const Values& values) {
  store_bits_past(index, count, target, to_bits(__floats2half2_rn(values.e[0], values.e[1])));
}
__device__ __forceinline__ void store_pair_past(int index, int count, bfloat16_t* target, const Values& values) {
  store_bits_past(index, count, target, to_bits(__floats2bfloat162_rn(values.e[0], values.e[1])));
}

// The powers of two to which the largest |d| of a raw tile and the largest |U| of a filter are brought: then
// |V| < gain^2 2^11 = 53 700 and |U| < 2^14 are halves.
constexpr int input_target_exponent = 10, filter_target_exponent = 13;

// Halves alone: the exponent of V's scale, given the one that would bring the largest |d| of a tile's chunk to 2^10. As
// far as its largest |d| lies in [2^-12, 2^9), or all are zero, all have the same one, so that their products can be
// added up as they come; down there, a largest |V| of 2^-10 is as far above the quantum as rounding asks for. M has the
// scale of the least of a tile's fitting exponents, made smaller by a shift, with which |M| < 53 700
// (docs/concepts/numerics.md).
constexpr int common_exponent = 2, zero_exponent = 127;
__device__ __forceinline__ int v_exponent(int fitting) {
  return (2 <= fitting && fitting <= 22) || fitting == zero_exponent ? common_exponent : fitting;
}
__device__ __forceinline__ int product_shift(int chunks) { return filter_target_exponent + 1 + 38 - __clz(chunks - 1); }

}  // namespace fastconv::algos::winograd_megakernel
