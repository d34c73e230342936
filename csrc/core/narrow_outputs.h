// NHWC outputs of a few filters that do not fill whole vectors: kernels with tiles of 64 or more filters store them one
// by one, between idle lanes, and take longer than the models for wider outputs predict.
#pragma once

#include "core/problem.h"

namespace fastconv {

// The factor for such outputs, 1 for all others. slowness: a kernel's, measured on an H200 with 1 and 3 filters
// (docs/log/87-suite-66b4f44.md).
inline double narrow_outputs_factor(const ConvProblem& problem, double slowness) {
  const bool whole = problem.k * static_cast<std::int64_t>(size_of(problem.dtype)) % 16 == 0;
  return problem.layout == Layout::nhwc && problem.k < 8 && !whole ? slowness : 1.0;
}

}  // namespace fastconv
