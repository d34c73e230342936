// y = act(accumulator + bias + residual), or act(accumulator + bias) + residual: the end of every algorithm, on the CPU
// and on the GPU.
#pragma once

#include <cmath>

#include "core/kernels.h"
#include "device/numeric.h"

namespace fastconv {

// Every activation but SiLU and the gated ones (fast_gates.cuh) is piecewise linear: slope below zero, cap above. As in
// PyTorch NaN passes through, and ReLU makes zero of -inf, where a leaky one multiplies, whatever its slope: -inf * 0
// is NaN.
struct ActivationFunction {
  float negative_slope = 1.0f;
  float cap = INFINITY;
  bool clamps = false;  // ReLU, ReLU6: zero below zero; the slope is 0, too
  bool is_silu = false;
  Activation gated = Activation::none;  // one that is_gated(): of kernels that end with these, and read nothing else

  ActivationFunction() = default;
  explicit ActivationFunction(Activation activation, float leaky_slope)
      : negative_slope(activation == Activation::none         ? 1.0f
                       : activation == Activation::leaky_relu ? leaky_slope
                                                              : 0.0f),
        cap(activation == Activation::relu6 ? 6.0f : INFINITY),
        clamps(activation == Activation::relu || activation == Activation::relu6),
        is_silu(activation == Activation::silu),
        gated(is_gated(activation) ? activation : Activation::none) {}

  FASTCONV_HOST_DEVICE float operator()(float value) const { return is_silu ? silu(value) : piecewise(value); }

  static FASTCONV_HOST_DEVICE float silu(float value) {
#ifdef __CUDA_ARCH__
    return __fdividef(value, 1.0f + expf(-value));  // 2 units in the last place, and no slow path
#else
    return value / (1.0f + expf(-value));
#endif
  }

  // None, that is.
  FASTCONV_HOST_DEVICE bool is_linear() const { return !is_silu && negative_slope == 1.0f && cap == INFINITY; }
  // Of all but SiLU and the gated ones, for kernels that ask once and not for each value.
  FASTCONV_HOST_DEVICE float piecewise(float value) const {
    const float negative = clamps ? 0.0f : value * negative_slope;
    const float positive = value > cap ? cap : value;
    return value <= 0.0f ? negative : positive;
  }
};

static_assert(sizeof(ActivationFunction) == 12);  // it lies in every kernel's parameters

template <typename T>
struct Epilogue {
  const T* bias;      // [K] or null
  const T* residual;  // like y, or null
  ActivationFunction activate;
  bool residual_after;  // of the activation

  // When to add the residual, if there is one.
  FASTCONV_HOST_DEVICE bool adds_before() const { return residual != nullptr && !residual_after; }
  FASTCONV_HOST_DEVICE bool adds_after() const { return residual != nullptr && residual_after; }

  // `index`: of the output element in y (and residual); `k`: its output channel.
  FASTCONV_HOST_DEVICE T operator()(float accumulator, std::int64_t index, std::int64_t k) const {
    return finish(accumulator + bias_of(k), index);
  }

  // The two halves, for kernels that read the bias once for many outputs.
  FASTCONV_HOST_DEVICE float bias_of(std::int64_t k) const { return bias != nullptr ? to_float(bias[k]) : 0.0f; }
  FASTCONV_HOST_DEVICE T finish(float accumulator, std::int64_t index) const {
    float after = -0.0f;  // what is added to -0 stays as it is, were it -0, too
    if (residual != nullptr) {
      const float other = to_float(residual[index]);
      residual_after ? after = other : accumulator += other;
    }
    return from_float<T>(activate(accumulator) + after);
  }
  // The same where the residual has been read for many outputs: its value, -0 for none.
  FASTCONV_HOST_DEVICE float finish_value(float accumulator, float other) const {
    return activate(accumulator + (residual_after ? -0.0f : other)) + (residual_after ? other : -0.0f);
  }

  // For kernels with many values in registers: add() to all of them, if there is a residual, and apply() the
  // activation, in their order. A loop, so that the code of each stands there once: twice it costs registers and
  // instruction cache.
  template <typename Add, typename Apply>
  FASTCONV_HOST_DEVICE void in_order(const Add& add, const Apply& apply) const {
    bool adds = adds_before();
#pragma unroll 1
    for (bool applied = false;; applied = true) {
      if (adds) add();
      if (applied) return;
      apply();
      adds = adds_after();
      if (!adds) return;
    }
  }
};

template <typename T>
Epilogue<T> make_epilogue(const ConvArgs& args) {
  return {static_cast<const T*>(args.bias), static_cast<const T*>(args.residual),
          ActivationFunction(args.problem.activation, args.problem.negative_slope),
          args.problem.residual == Residual::after};
}

}  // namespace fastconv
