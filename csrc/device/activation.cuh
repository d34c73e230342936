// Activations of Hopper in one or two instructions, for all of a tile's values: as ActivationFunction has them (NaN,
// infinities).
#pragma once

#include "device/epilogue.h"

namespace fastconv {

__device__ __forceinline__ float max_keeping_nan(float a, float b) {
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
  return a;
}
__device__ __forceinline__ float min_keeping_nan(float a, float b) {
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
  return a;
}

// ReLU, ReLU6 (ActivationFunction::clamps): within [0, cap]; NaN passes.
__device__ __forceinline__ float clamp(float value, float cap) {
  float result;
  asm("max.NaN.f32 %0, %1, 0f00000000;\n\tmin.NaN.f32 %0, %0, %2;" : "=&f"(result) : "f"(value), "f"(cap));
  return result;
}

// leaky_relu that leak() can do: with a slope in (0, 1).
__device__ __forceinline__ bool leaks(const ActivationFunction& activate) {
  return !activate.is_silu && activate.negative_slope > 0.0f && activate.negative_slope < 1.0f;
}
// NaN passes.
__device__ __forceinline__ float leak(float value, float slope) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(value), "f"(value * slope));
  return result;
}

// Any activation (none: the slope is 1), by for_each(apply): one branch selects what is applied to all values.
template <typename ForEach>
__device__ __forceinline__ void apply_activation(const ActivationFunction& activate, const ForEach& for_each) {
  if (activate.clamps) {
    for_each([cap = activate.cap](float value) { return clamp(value, cap); });
  } else if (activate.is_silu) {
    for_each([](float value) { return ActivationFunction::silu(value); });
  } else {
    for_each([slope = activate.negative_slope](float value) { return value <= 0.0f ? value * slope : value; });
  }
}

}  // namespace fastconv
