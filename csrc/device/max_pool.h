// The maximum of a max-pool, and the pool of what lies in memory: of the operator max_pool2d, and behind convolutions
// whose kernels have none.
#pragma once

#include "core/kernels.h"
#include "core/max_pool.h"
#include "device/numeric.h"

namespace fastconv {

// As in PyTorch NaN is larger than all else.
FASTCONV_HOST_DEVICE float larger_of(float a, float b) { return a > b || a != a ? a : b; }

// x [N, C, H, W] -> y [N, C, P, Q], in the pool's layout, not empty. A range of channels begins at a multiple of 16
// bytes, as its pixels do. On CUDA, which counts with 31 bits: an image of x,
// the rows of y (of all images, and in NCHW of all channels) and its blocks.
void max_pool(const MaxPool& pool, const void* x, void* y, Runtime& runtime);

}  // namespace fastconv
