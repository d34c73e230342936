#include "algos/winograd_megakernel/wgmma/launch.cuh"

namespace fastconv::algos::winograd_megakernel::wgmma {

template void run<float>(const ConvArgs& args, Runtime& runtime);
template void pack<float>(const PackArgs& args, Runtime& runtime);

}  // namespace fastconv::algos::winograd_megakernel::wgmma
