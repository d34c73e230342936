// The activations of many outputs, asked for once.
#pragma once

#include "device/activation.cuh"

namespace fastconv::algos::winograd_fused::single {

// By 2^x and 1/x as the hardware has them: within 2^-16 of what is not vanishing, where these classes have 2^-11. What
// is flushed to zero is added to 1, or has been divided by more than 2^126.
__device__ __forceinline__ float fast_silu(float value) {
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(value * -1.4426950408889634f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
  return value * inverse;
}

// for_all(function) applies a function to every output. A slope between 0 and 1 makes the larger of two values.
template <typename ForAll>
__device__ __forceinline__ void activate_all(const ActivationFunction& activation, const ForAll& for_all) {
  const float slope = activation.negative_slope;
  if (__builtin_expect(activation.is_silu, 0)) {
    for_all([](float v) { return fast_silu(v); });
  } else if (activation.clamps) {
    for_all([&](float v) { return min_keeping_nan(max_keeping_nan(v, 0.0f), activation.cap); });
  } else if (slope > 0.0f && slope < 1.0f) {
    for_all([&](float v) { return max_keeping_nan(v, v * slope); });
  } else if (slope != 1.0f) {
    for_all([&](float v) { return activation.piecewise(v); });
  }
}

}  // namespace fastconv::algos::winograd_fused::single
