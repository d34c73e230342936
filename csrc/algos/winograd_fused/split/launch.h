#pragma once

#include "algos/winograd_fused/plan.h"
#include "core/kernels.h"

namespace fastconv::algos::winograd_fused::split {

// x: args.x, or the same in another layout.
void run(const ConvArgs& args, const Config& plan, const float* x, Layout layout, Runtime& runtime);

}  // namespace fastconv::algos::winograd_fused::split
