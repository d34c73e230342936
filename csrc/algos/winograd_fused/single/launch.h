// Entry points of the one-product classes, a .cu file for each type, so that they compile side by side.
#pragma once

#include "algos/winograd_fused/plan.h"
#include "core/kernels.h"
#include "device/numeric.h"

namespace fastconv::algos::winograd_fused::single {

template <typename T>
void run(const ConvArgs& args, const Config& config, Runtime& runtime);

}  // namespace fastconv::algos::winograd_fused::single
