// No kernel yet: the registry says that there is no CUDA kernel, so nobody gets here.
#include "core/error.h"
#include "core/kernels.h"

namespace fastconv::algos::winograd_megakernel {

void run_cuda(const ConvArgs&, Runtime&) { throw DeviceError("winograd_megakernel has no CUDA kernel"); }
void pack_cuda(const PackArgs&, Runtime&) { throw DeviceError("winograd_megakernel has no CUDA kernel"); }

}  // namespace fastconv::algos::winograd_megakernel
