// The kernel of class `ieee`, behind run_cuda() and pack_cuda() of winograd_megakernel.
#pragma once

#include "core/kernels.h"

namespace fastconv::algos::winograd_megakernel::ffma {

void run_cuda(const ConvArgs& args, Runtime& runtime);  // args.kernel_plan: Plan
void pack_cuda(const PackArgs& args, Runtime& runtime);

}  // namespace fastconv::algos::winograd_megakernel::ffma
