// Entry points of the wgmma kernel, a .cu file for each type, so that they compile side by side.
#pragma once

#include "core/kernels.h"
#include "device/numeric.h"

namespace fastconv::algos::winograd_megakernel::wgmma {

// args.kernel_plan: CudaPlan. The type is that of the tensors.
template <typename T>
void run(const ConvArgs& args, Runtime& runtime);
template <typename T>
void pack(const PackArgs& args, Runtime& runtime);

}  // namespace fastconv::algos::winograd_megakernel::wgmma
