// Activations of many outputs, with one branch for all.
#pragma once

#include "device/activation.cuh"
#include "device/fast_silu.cuh"

namespace fastconv::algos::winograd_fused::single {

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
