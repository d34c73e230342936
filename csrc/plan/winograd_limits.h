// What F(2x2,3x3) and F(4x4,3x3) serve, whatever runs them.
#pragma once

#include "core/algorithm.h"

namespace fastconv {

Support supports_winograd(const ConvProblem& problem, const char* name);

// Algorithm::error_multiple of F(4x4,3x3).
double winograd_f4_error_multiple(AccuracyClass accuracy);

}  // namespace fastconv
