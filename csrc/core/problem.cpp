#include "core/problem.h"

#include <functional>

#include "core/integers.h"

namespace fastconv {

ConvProblem without_pool(const ConvProblem& problem) {
  ConvProblem bare = problem;
  bare.max_pool = false;
  return bare;
}

ConvProblem without_shuffle(const ConvProblem& problem) {
  ConvProblem bare = problem;
  if (bare.shuffles()) bare.shuffle = Shuffle::none, bare.y_channels = 0;
  return bare;
}

ConvProblem without_affine(const ConvProblem& problem) {
  ConvProblem bare = problem;
  bare.input_affine = false, bare.input_activation = Activation::none;
  return bare;
}

ConvProblem without_ranges(const ConvProblem& problem) {
  ConvProblem bare = problem;
  bare.x_channels = bare.y_channels = 0;
  return bare;
}

std::size_t nhwc_input_bytes(const ConvProblem& problem) {
  if (problem.c == 1 || problem.h * problem.w == 1) return 0;  // dense in both orders
  return align_bytes(static_cast<std::size_t>(problem.n * problem.c * problem.h * problem.w) * size_of(problem.dtype));
}

std::size_t nhwc_grad_offset(const ConvProblem& problem) {
  return align_bytes(static_cast<std::size_t>(problem.n * problem.c * problem.h * problem.w) * size_of(problem.dtype));
}

std::size_t nhwc_operand_bytes(const ConvProblem& problem) {
  return nhwc_grad_offset(problem) +
         align_bytes(static_cast<std::size_t>(problem.output_numel()) * size_of(problem.dtype));
}

std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f32: return 4;
    case DType::f16:
    case DType::bf16: return 2;
    case DType::other: return 0;
  }
  return 0;
}

AccuracyClass effective_accuracy(DType dtype, AccuracyClass precision) {
  switch (dtype) {
    case DType::f32: return precision;
    case DType::f16: return AccuracyClass::fp16;
    case DType::bf16: return AccuracyClass::bf16;
    case DType::other: return AccuracyClass::other;
  }
  return AccuracyClass::other;
}

double ConvProblem::compulsory_bytes() const {
  const double elements = static_cast<double>(n) * c * h * w + static_cast<double>(k) * c_per_group() * r * s +
                          static_cast<double>(y_numel()) * (has_residual() ? 2.0 : 1.0);
  return elements * static_cast<double>(size_of(dtype));
}

std::size_t hash_value(const ConvProblem& problem) {
  std::size_t seed = 0;
  const auto mix = [&seed](std::int64_t value) {
    seed ^= std::hash<std::int64_t>{}(value) + 0x9e3779b97f4a7c15ull + (seed << 6) + (seed >> 2);
  };
  for (std::int64_t value : {problem.n, problem.c, problem.h, problem.w, problem.k, problem.r, problem.s,
                             problem.stride_h, problem.stride_w, problem.pad_h, problem.pad_w, problem.dilation_h,
                             problem.dilation_w, problem.groups, problem.x_channels, problem.y_channels}) {
    mix(value);
  }
  mix(static_cast<std::int64_t>(problem.dtype) | static_cast<std::int64_t>(problem.accuracy) << 8 |
      static_cast<std::int64_t>(problem.layout) << 16 | static_cast<std::int64_t>(problem.activation) << 24 |
      static_cast<std::int64_t>(problem.has_bias) << 32 | static_cast<std::int64_t>(problem.residual) << 33 |
      static_cast<std::int64_t>(problem.max_pool) << 35 | static_cast<std::int64_t>(problem.input_affine) << 36 |
      static_cast<std::int64_t>(problem.input_activation) << 37 | static_cast<std::int64_t>(problem.packs) << 41 |
      static_cast<std::int64_t>(problem.shuffle) << 42);
  mix(static_cast<std::int64_t>(std::hash<double>{}(problem.limits.max_error)));
  mix(problem.limits.max_workspace);
  return seed;
}

}  // namespace fastconv
