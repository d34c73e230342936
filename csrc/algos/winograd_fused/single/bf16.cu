#include "algos/winograd_fused/single/launch.cuh"

namespace fastconv::algos::winograd_fused::single {

void run(const ConvArgs& args, const Config& config, const bfloat16_t* x, Layout layout, Runtime& runtime) {
  run_class(args, config, x, layout, runtime);
}

}  // namespace fastconv::algos::winograd_fused::single
