#include "algos/winograd_megakernel/wgmma/launch.cuh"

namespace fastconv::algos::winograd_megakernel::wgmma {

template void run<half_t>(const ConvArgs& args, Runtime& runtime);
template void pack<half_t>(const PackArgs& args, Runtime& runtime);

}  // namespace fastconv::algos::winograd_megakernel::wgmma
