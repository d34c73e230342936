#include "algos/implicit_gemm/single_tile/launch.cuh"

namespace fastconv::algos::implicit_gemm::single_tile {

void run_fp32(const ConvArgs& args, const Plan& plan, Runtime& runtime) { run_class<float, true>(args, plan, runtime); }

}  // namespace fastconv::algos::implicit_gemm::single_tile
