// The maximum of a 2x2 max-pool, and the pool of what lies in memory: for convolutions whose kernels have none.
#pragma once

#include "core/kernels.h"
#include "device/numeric.h"

namespace fastconv {

// As in PyTorch NaN is larger than all else.
FASTCONV_HOST_DEVICE float larger_of(float a, float b) { return a > b || a != a ? a : b; }

// y [N, K, P, Q] of the problem's convolution, in its layout -> pooled [N, K, P/2, Q/2]. On CUDA. Takes rows, Q K
// elements, below 2^30.
void max_pool(const ConvProblem& problem, const void* y, void* pooled, Runtime& runtime);

}  // namespace fastconv
