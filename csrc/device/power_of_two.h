// Power-of-two scales (docs/concepts/numerics.md): exact to apply, exact to undo.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "device/numeric.h"

namespace fastconv {

// The larger of `largest` and |value|, for a scale: an infinity or a NaN has no say. value * 0 + value is NaN for both,
// which fmaxf passes over, and `value` for everything else.
FASTCONV_HOST_DEVICE float larger_finite(float largest, float value) {
  return fmaxf(largest, fabsf(fmaf(value, 0.0f, value)));
}

// e such that |largest| * 2^e lies in [2^target, 2^(target+1)); 0 for zero. At most 126, so that 2^e and 2^-e are
// normal numbers; an input of FP32 subnormals then lies lower, with an error still below FP32's own quantum.
FASTCONV_HOST_DEVICE int scale_exponent(float largest, int target) {
  if (largest == 0.0f) return 0;
  std::uint32_t bits;
  memcpy(&bits, &largest, sizeof bits);
  const int exponent = static_cast<int>(bits >> 23 & 255u) - 127;
  return target - exponent < 126 ? target - exponent : 126;
}

FASTCONV_HOST_DEVICE float power_of_two(int exponent) {  // -126 <= exponent <= 127; of -127: zero
  const std::uint32_t bits = static_cast<std::uint32_t>(exponent + 127) << 23;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// Undoes the scales of an input and a filter. Their sum may exceed what one float can hold; two factors never do.
struct Unscale {
  float first, second;

  FASTCONV_HOST_DEVICE Unscale(int input_exponent, int filter_exponent) {
    const int sum = input_exponent + filter_exponent, half = sum / 2;
    first = power_of_two(-half);
    second = power_of_two(half - sum);
  }
  FASTCONV_HOST_DEVICE float operator()(float value) const { return value * first * second; }
};

}  // namespace fastconv
