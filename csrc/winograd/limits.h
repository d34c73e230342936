// What F(2x2,3x3) and F(4x4,3x3) serve, whatever runs them.
#pragma once

#include "core/algorithm.h"

namespace fastconv {

Support supports_winograd(const ConvProblem& problem, const char* name);

}  // namespace fastconv
