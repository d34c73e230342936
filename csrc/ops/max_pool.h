// A max-pool that is a pass of its own.
#pragma once

#include "core/problem.h"
#include "ops/stable.h"

namespace fastconv::ops {

// The problem's max-pool of its convolution's y [N, K, P, Q], dense in its layout.
Tensor pooled(const Tensor& y, const ConvProblem& problem);

}  // namespace fastconv::ops
