// y = act(accumulator + bias + residual): the end of every algorithm, on the CPU and on the GPU.
#pragma once

#include <cmath>

#include "core/kernels.h"
#include "device/numeric.h"

namespace fastconv {

FASTCONV_HOST_DEVICE float activate(float value, Activation activation, float negative_slope) {
  // Comparisons are written so that NaN passes through, as in PyTorch.
  switch (activation) {
    case Activation::none: return value;
    case Activation::relu: return value < 0.0f ? 0.0f : value;
    case Activation::relu6: return value < 0.0f ? 0.0f : (value > 6.0f ? 6.0f : value);
    case Activation::silu: return value / (1.0f + expf(-value));
    case Activation::leaky_relu: return value < 0.0f ? value * negative_slope : value;
  }
  return value;
}

template <typename T>
struct Epilogue {
  const T* bias;      // [K] or null
  const T* residual;  // like y, or null
  Activation activation;
  float negative_slope;

  // `index`: of the output element in y (and residual); `k`: its output channel.
  FASTCONV_HOST_DEVICE T operator()(float accumulator, std::int64_t index, std::int64_t k) const {
    if (bias != nullptr) accumulator += to_float(bias[k]);
    if (residual != nullptr) accumulator += to_float(residual[index]);
    return from_float<T>(activate(accumulator, activation, negative_slope));
  }
};

template <typename T>
Epilogue<T> make_epilogue(const ConvArgs& args) {
  return {static_cast<const T*>(args.bias), static_cast<const T*>(args.residual), args.problem.activation,
          args.problem.negative_slope};
}

}  // namespace fastconv
