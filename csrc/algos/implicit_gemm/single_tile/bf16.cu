#include "algos/implicit_gemm/single_tile/launch.cuh"

namespace fastconv::algos::implicit_gemm::single_tile {

void run_bf16(const ConvArgs& args, const Plan& plan, Runtime& runtime) { run_class<bfloat16_t>(args, plan, runtime); }

}  // namespace fastconv::algos::implicit_gemm::single_tile
