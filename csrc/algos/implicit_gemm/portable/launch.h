#pragma once

#include "algos/implicit_gemm/portable/plan.h"
#include "core/kernels.h"

namespace fastconv::algos::implicit_gemm::portable {

void run(const ConvArgs& args, const Plan& plan, Runtime& runtime);
void pack(const PackArgs& args, Runtime& runtime);

}  // namespace fastconv::algos::implicit_gemm::portable
