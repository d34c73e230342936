// The single-tile kernel's entry point.
#pragma once

#include "algos/implicit_gemm/single_tile/plan.h"
#include "core/kernels.h"

namespace fastconv::algos::implicit_gemm::single_tile {

void run(const ConvArgs& args, const Plan& plan, Runtime& runtime);

}  // namespace fastconv::algos::implicit_gemm::single_tile
