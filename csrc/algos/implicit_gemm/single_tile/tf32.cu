#include "algos/implicit_gemm/single_tile/launch.cuh"

namespace fastconv::algos::implicit_gemm::single_tile {

void run_tf32(const ConvArgs& args, const Plan& plan, const void* x, const void* weight, const int*, Runtime& runtime) {
  run<float>(args, plan, x, weight, nullptr, runtime);
}

}  // namespace fastconv::algos::implicit_gemm::single_tile
