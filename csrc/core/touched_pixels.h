// Of an input in NHWC, what is read where a kernel has fewer taps than its stride.
#pragma once

#include <algorithm>

#include "core/integers.h"
#include "core/problem.h"

namespace fastconv {

// Between 0 and 1. Rows that no tap meets are not read, nor are pixels in the others as far as memory can tell: it is
// asked for pieces of 256 bytes.
inline double touched_share(const ConvProblem& problem) {
  constexpr std::int64_t piece = 256;
  const std::int64_t pixel = std::max<std::int64_t>(problem.c * static_cast<std::int64_t>(size_of(problem.dtype)), 1);
  const double pieces = static_cast<double>(round_up(pixel, piece)) / static_cast<double>(pixel);
  const double rows = static_cast<double>(problem.r) / static_cast<double>(problem.stride_h);
  const double columns = pieces * static_cast<double>(problem.s) / static_cast<double>(problem.stride_w);
  return std::min(rows, 1.0) * std::min(columns, 1.0);
}

}  // namespace fastconv
