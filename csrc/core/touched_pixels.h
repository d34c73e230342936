// The share of an NHWC input that is read if a kernel has fewer taps than its stride.
#pragma once

#include <algorithm>

#include "core/integers.h"
#include "core/problem.h"

namespace fastconv {

// Between 0 and 1. Rows without a tap are not read, nor are pixels without one in the other rows, as far as memory's
// granularity of 256 bytes allows.
inline double touched_share(const ConvProblem& problem) {
  constexpr std::int64_t piece = 256;
  const std::int64_t pixel = std::max<std::int64_t>(problem.c * static_cast<std::int64_t>(size_of(problem.dtype)), 1);
  const double pieces = static_cast<double>(round_up(pixel, piece)) / static_cast<double>(pixel);
  const double rows = static_cast<double>(problem.r) / static_cast<double>(problem.stride_h);
  const double columns = pieces * static_cast<double>(problem.s) / static_cast<double>(problem.stride_w);
  return std::min(rows, 1.0) * std::min(columns, 1.0);
}

}  // namespace fastconv
