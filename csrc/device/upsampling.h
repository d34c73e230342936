// The upsampling of what lies in memory: of the operators upsample_nearest2d and upsample_nearest2d_into.
#pragma once

#include "core/kernels.h"
#include "core/upsampling.h"

namespace fastconv {

// x [N, C, H, W] -> y [N, C, H scale_h, W scale_w], not empty, both at multiples of 16 bytes.
void upsample(const Upsampling& upsampling, const void* x, void* y, Runtime& runtime);

}  // namespace fastconv
