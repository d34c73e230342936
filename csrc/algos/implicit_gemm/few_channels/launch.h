#pragma once

#include "algos/implicit_gemm/few_channels/plan.h"
#include "core/kernels.h"

namespace fastconv::algos::implicit_gemm::few_channels {

void run(const ConvArgs& args, const Plan& plan, Runtime& runtime);
// `packed`: its own part of the packed weight. Leaves the snapshot as it is.
void pack(const PackArgs& args, const Weights& weights, void* packed, Runtime& runtime);

}  // namespace fastconv::algos::implicit_gemm::few_channels
