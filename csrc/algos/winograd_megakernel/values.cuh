// Two neighbouring channels of a lane, and the scales of transformed values (docs/numerics.md).
#pragma once

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

// Neighbouring elements in memory, moved by one instruction.
template <typename T, int count>
struct alignas(sizeof(T) * count) Aligned {
  T e[count];
};

// The powers of two to which the largest |d| of a raw tile and the largest |U| of a filter are brought: then
// |V| < gain^2 2^11 = 53 700 and |U| < 2^14 are halves.
constexpr int input_target_exponent = 10, filter_target_exponent = 13;

}  // namespace fastconv::algos::winograd_megakernel
