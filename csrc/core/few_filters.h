// Which convolutions have a kernel for few filters, the fourth of direct_tiled: its planner asks for those that are to
// be computed, the plan of input gradients for those that a gradient would be.
#pragma once

#include "core/problem.h"

namespace fastconv {

// Square kernels of 3, in NHWC 5 and 7, at stride 1, of up to 4 filters over so many channels that they fill a warp's
// lanes by half. (With 8 filters it was faster than no other algorithm.)
constexpr bool is_for_few_filters(const ConvProblem& problem) {
  const bool nhwc = problem.layout == Layout::nhwc;
  const bool size = problem.r == problem.s && (problem.r == 3 || (nhwc && (problem.r == 5 || problem.r == 7)));
  const bool dense =
      problem.stride_h == 1 && problem.stride_w == 1 && problem.dilation_h == 1 && problem.dilation_w == 1;
  return size && dense && problem.groups == 1 && problem.k <= 4 && problem.c >= 16;
}

}  // namespace fastconv
