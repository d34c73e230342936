// Entry points of the one-product classes, a .cu file for each type, so that they compile side by side.
#pragma once

#include "algos/winograd_fused/plan.h"
#include "core/kernels.h"
#include "device/numeric.h"

namespace fastconv::algos::winograd_fused::single {

// x: args.x, or the same in another layout.
void run(const ConvArgs& args, const Config& config, const float* x, Layout layout, Runtime& runtime);
void run(const ConvArgs& args, const Config& config, const half_t* x, Layout layout, Runtime& runtime);
void run(const ConvArgs& args, const Config& config, const bfloat16_t* x, Layout layout, Runtime& runtime);

}  // namespace fastconv::algos::winograd_fused::single
