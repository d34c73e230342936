// Which convolutions direct_tiled's fourth kernel, for few filters, serves: direct_tiled's planner asks for the problem
// itself, the planner of input gradients for the convolution that a gradient would be.
#pragma once

#include "core/problem.h"

namespace fastconv {

// Square kernels of 3, in NHWC also 5 and 7, at stride 1, with up to 4 filters and enough channels to fill half of a
// warp's lanes. (With 8 filters it was never the fastest.)
constexpr bool is_for_few_filters(const ConvProblem& problem) {
  const bool nhwc = problem.layout == Layout::nhwc;
  const bool size = problem.r == problem.s && (problem.r == 3 || (nhwc && (problem.r == 5 || problem.r == 7)));
  const bool dense =
      problem.stride_h == 1 && problem.stride_w == 1 && problem.dilation_h == 1 && problem.dilation_w == 1;
  return size && dense && problem.groups == 1 && problem.k <= 4 && problem.c >= 16;
}

}  // namespace fastconv
