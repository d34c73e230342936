// SiLU in few instructions: in five for outputs of 11 bits and fewer.
#pragma once

#include "device/activation.cuh"
#include "device/numeric.h"

namespace fastconv {

// By 2^x and 1/x as the hardware has them: within 2^-16 of what is not vanishing, where these classes have 2^-11. What
// is flushed to zero is added to 1, or has been divided by more than 2^126.
__device__ __forceinline__ float fast_silu(float value) {
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(value * -1.4426950408889634f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
  return value * inverse;
}

// As precise as the type is: of float32 within some 2^-22, without a division. Infinite, and NaN, where PyTorch's is.
template <typename T>
__device__ __forceinline__ float quick_silu(float value) {
  if constexpr (!std::is_same_v<T, float>) return fast_silu(value);
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + expf(-value)));
  return value * inverse;
}

// apply_activation() of a pass over memory, which that must not be slower than.
template <typename T, typename ForEach>
__device__ __forceinline__ void apply_quickly(const ActivationFunction& activate, const ForEach& for_each) {
  if (activate.is_silu) {
    for_each([](float value) { return quick_silu<T>(value); });
  } else {
    apply_activation(activate, for_each);
  }
}

}  // namespace fastconv
