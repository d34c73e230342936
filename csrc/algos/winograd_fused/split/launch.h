#pragma once

#include "algos/winograd_fused/plan.h"
#include "core/kernels.h"

namespace fastconv::algos::winograd_fused::split {

void run(const ConvArgs& args, const Config& config, Runtime& runtime);

}  // namespace fastconv::algos::winograd_fused::split
