// The gated activations (is_gated) in straight-line code, for outputs of 11 bits and fewer: by 2^x and 1/x as the
// hardware has them, like fast_silu. What they make of NaN and infinities is PyTorch's: -inf times a gate of 0 is NaN.
#pragma once

#include <cfloat>
#include <cmath>

#include "core/problem.h"
#include "device/numeric.h"

namespace fastconv {

// Within 2^-22; on the host, for tests of the formulas below, by its functions.
FASTCONV_HOST_DEVICE float fast_exp2(float value) {
#ifdef __CUDA_ARCH__
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(value));
  return power;
#else
  return std::exp2(value);
#endif
}
FASTCONV_HOST_DEVICE float fast_inverse(float value) {
#ifdef __CUDA_ARCH__
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(value));
  return inverse;
#else
  return 1.0f / value;
#endif
}
// Within [0, 1], NaN being 0.
FASTCONV_HOST_DEVICE float saturate(float value) {
#ifdef __CUDA_ARCH__
  return __saturatef(value);
#else
  return value > 0.0f ? std::fmin(value, 1.0f) : 0.0f;
#endif
}
// The larger of it and 0, NaN being NaN.
FASTCONV_HOST_DEVICE float positive_part(float value) {
#ifdef __CUDA_ARCH__
  asm("max.NaN.f32 %0, %0, 0f00000000;" : "+f"(value));
  return value;
#else
  return value < 0.0f ? 0.0f : value;
#endif
}

// x Phi(x), Phi(x) = (1 + erf(x / sqrt(2))) / 2. With a = |x| it is max(x, 0) - a Phi(-a), and log2 Phi(-a) is a smooth
// function, here a polynomial: the one whose error of a Phi(-a), over a Phi(-a) + 2^-14, is least for all a up to 5.5,
// 2^-13.6. Relative to x it is at most 2^-13.5 and for large x nothing; below 0 it remains relative as far as halves
// are normal. The last coefficient is negative: beyond, the power is 0. x = inf is kept from inf * 0.
FASTCONV_HOST_DEVICE float fast_gelu(float x) {
  const float a = std::fabs(std::fmin(x, FLT_MAX));
  float log2_tail = std::fmaf(a, -3.2345761e-4f, 5.8582276e-3f);
  log2_tail = std::fmaf(a, log2_tail, -4.83449035e-2f);
  log2_tail = std::fmaf(a, log2_tail, -4.63979834e-1f);
  log2_tail = std::fmaf(a, log2_tail, -1.14922863f);
  log2_tail = std::fmaf(a, log2_tail, -1.00012277f);
  return std::fmaf(-a, fast_exp2(log2_tail), positive_part(x));
}

// x / (1 + exp(-2 sqrt(2 / pi) (x + 0.044715 x^3))): PyTorch's approximation of GELU by tanh.
FASTCONV_HOST_DEVICE float fast_gelu_tanh(float x) {
  constexpr float linear = -2.30220820f, cubic = -0.102943240f;  // over log(2)
  return x * fast_inverse(1.0f + fast_exp2(x * std::fmaf(x * x, cubic, linear)));
}

FASTCONV_HOST_DEVICE float fast_hardswish(float x) { return x * saturate(std::fmaf(x, 1.0f / 6.0f, 0.5f)); }

FASTCONV_HOST_DEVICE float fast_sigmoid(float x) { return fast_inverse(1.0f + fast_exp2(x * -1.4426950408889634f)); }

// for_each(apply), with what is to be done to each value, for one of them. It is asked once which one that is.
template <typename ForEach>
FASTCONV_HOST_DEVICE void apply_gated(Activation gated, const ForEach& for_each) {
  switch (gated) {
    case Activation::gelu: return for_each([](float x) { return fast_gelu(x); });
    case Activation::gelu_tanh: return for_each([](float x) { return fast_gelu_tanh(x); });
    case Activation::hardswish: return for_each([](float x) { return fast_hardswish(x); });
    default: return for_each([](float x) { return fast_sigmoid(x); });
  }
}

// Of one value, where they are few.
FASTCONV_HOST_DEVICE float fast_gated(Activation gated, float x) {
  apply_gated(gated, [&](const auto& apply) { x = apply(x); });
  return x;
}

}  // namespace fastconv
