// The expected rounding error of an algorithm: the relative L2 error of its result, in roundoffs of float32 (2^-24), on
// data whose neighbours are of similar size. docs/concepts/numerics.md derives and measures the numbers.
#pragma once

#include <algorithm>
#include <cmath>

#include "core/algorithm.h"
#include "core/device_info.h"
#include "core/problem.h"

namespace fastconv {

inline constexpr double half_roundoffs = 8192.0;  // one roundoff of float16 or TF32, 2^-11, in those of float32

inline double reduction_length(const ConvProblem& problem) {
  return static_cast<double>(problem.c_per_group() * problem.r * problem.s);
}

// Of the weight gradient's sums, over the output's pixels.
inline double gradient_length(const ConvProblem& problem) {
  return static_cast<double>(problem.n * problem.p() * problem.q());
}

// FP32 products, added one after the other: what PyTorch's convolutions do.
inline double serial_sum(double terms) { return std::sqrt(0.15 + 0.044 * terms); }

// The same, where the sum starts anew after `run` terms: what exceeds that adds next to nothing.
inline double blocked_sum(double terms, double run) { return serial_sum(std::min(terms, run)); }

// Products of operands that are rounded to 11 bits, both of them.
inline constexpr double tf32_products = 0.6 * half_roundoffs;

// Rounding a result to its type.
inline double output_rounding(AccuracyClass accuracy) {
  switch (accuracy) {
    case AccuracyClass::fp16: return 0.425 * half_roundoffs;
    case AccuracyClass::bf16: return 8.0 * 0.425 * half_roundoffs;
    default: return 0.0;
  }
}

// Of the transforms' matrices (tools/winograd_norms.py).
inline constexpr TransformNoise f2_noise{1.67, 1.0, 1.2}, f4_noise{5.02, 1.42, 1.29}, f4_row_noise{2.24, 1.19, 1.13};

// FP32 arithmetic: the transforms, and sums over at most `run` channels.
inline double winograd_in_fp32(double noise_gain, std::int64_t channels, double run) {
  return noise_gain * std::sqrt(1.0 + 0.0675 * std::min(static_cast<double>(channels), run));
}

// Split halves with promoted sums; product: the error of one of them.
inline double winograd_in_split_fp16(double noise_gain, double product, std::int64_t channels) {
  return noise_gain * std::sqrt(product * product + 0.003 * static_cast<double>(channels));
}

// Products of halves: V and U are rounded once each, `roundings` times in all. `roundoffs`: 1 for float16, 8 for
// bfloat16.
inline double winograd_in_fp16(double noise_gain, double roundings, double roundoffs = 1.0) {
  return noise_gain * 0.36 * std::sqrt(roundings) * roundoffs * half_roundoffs;
}

}  // namespace fastconv
