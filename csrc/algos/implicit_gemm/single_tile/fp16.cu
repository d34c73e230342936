#include "algos/implicit_gemm/single_tile/launch.cuh"

namespace fastconv::algos::implicit_gemm::single_tile {

void run_fp16(const ConvArgs& args, const Plan& plan, const void* x, const void* weight, const int*, Runtime& runtime) {
  run<half_t>(args, plan, x, weight, nullptr, runtime);
}

}  // namespace fastconv::algos::implicit_gemm::single_tile
