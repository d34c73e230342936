// What an input gradient is made of: convolutions of stride 1 over the output's gradient, with taps of the filter
// flipped. The planner asks here what is to be computed, and csrc/ops what to run.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/device_info.h"
#include "core/flipped_taps.h"
#include "core/problem.h"

namespace fastconv {

// One dimension of what makes rows of the gradient: a convolution with these taps, of whose output the first `skip`
// rows are left out. Of no rows if no tap reaches them, or there are none.
struct GradientPart {
  FlippedTaps taps{};
  std::int64_t dilation = 1, padding = 0, skip = 0, rows = 0;
};

// One dimension of the forward convolution.
struct GradientDimension {
  std::int64_t size, outputs, kernel, stride, padding, dilation;

  static GradientDimension height(const ConvProblem& p) { return {p.h, p.p(), p.r, p.stride_h, p.pad_h, p.dilation_h}; }
  static GradientDimension width(const ConvProblem& p) { return {p.w, p.q(), p.s, p.stride_w, p.pad_w, p.dilation_w}; }

  // Rows first, first + stride, ..., which see the taps r with first + padding - r * dilation divisible by the stride.
  GradientPart phase(std::int64_t first) const;

  // All phases, as filters of one convolution; with dilation 1. Rows first, first + stride, ... see rows `offset`
  // further of the output's gradient by the tap first + padding - offset * stride, with offsets of a range that holds
  // those of every `first`.
  GradientPart together() const;
  // The same where the stride is 2 and both phases have half of the taps, as filters of a shuffle, without zeros: an
  // even kernel, padded by one less than half of it, of twice as many rows as outputs. Else of no rows.
  GradientPart shuffled() const;
};

// Both dimensions of a convolution. shuffle: its outputs are in their places.
struct GradientParts {
  GradientPart rows, columns;
  Shuffle shuffle = Shuffle::none;
};
// Of all phases together.
GradientParts all_phases(const ConvProblem& problem);

// The convolution of two parts. problem: the forward one, whose class, layout and limits it has. On a CPU it packs its
// filter, which is flipped in the call; on a GPU that was measured with the flipping, and is a part of what this takes.
ConvProblem gradient_convolution(const ConvProblem& problem, const GradientParts& parts, DeviceType device);

// The convolutions of a gradient: one for all phases together, or one for each that has taps.
struct GradientConvolutions {
  std::vector<ConvProblem> different;  // the one with the most taps first
  int count = 0;                       // of all
};
GradientConvolutions gradient_convolutions(const ConvProblem& problem, bool together, DeviceType device);

// Whether an algorithm, of the convolution that an input gradient is made of, does not convolve: without a stride and
// taps it multiplies the output's gradient by the filter as it lies. On a CPU in float32.
inline constexpr const char* product_algorithm = "im2col_gemm";
bool is_product_with_filter(const std::string& algorithm, const ConvProblem& problem, DeviceType device);

}  // namespace fastconv
