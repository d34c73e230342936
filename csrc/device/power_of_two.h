// Power-of-two scales (docs/numerics.md): exact to apply, exact to undo. Device code.
#pragma once

namespace fastconv {

// e such that |largest| * 2^e lies in [2^target, 2^(target+1)); 0 for zero. At most 126, so that 2^e and 2^-e are
// normal numbers; an input of FP32 subnormals then lies lower, with an error still below FP32's own quantum.
__device__ __forceinline__ int scale_exponent(float largest, int target) {
  if (largest == 0.0f) return 0;
  const int exponent = static_cast<int>((__float_as_uint(largest) >> 23) & 255u) - 127;
  return min(target - exponent, 126);
}

__device__ __forceinline__ float power_of_two(int exponent) {  // -126 <= exponent <= 127
  return __uint_as_float(static_cast<unsigned>(exponent + 127) << 23);
}

// Undoes the scales of an input and a filter. Their sum may exceed what one float can hold; two factors never do.
struct Unscale {
  float first, second;

  __device__ __forceinline__ Unscale(int input_exponent, int filter_exponent) {
    const int sum = input_exponent + filter_exponent, half = sum / 2;
    first = power_of_two(-half);
    second = power_of_two(half - sum);
  }
  __device__ __forceinline__ float operator()(float value) const { return value * first * second; }
};

}  // namespace fastconv
