#include "algos/winograd_fused/single/launch.cuh"

namespace fastconv::algos::winograd_fused::single {

template void run<bfloat16_t>(const ConvArgs& args, const Config& config, Runtime& runtime);

}  // namespace fastconv::algos::winograd_fused::single
