#include "algos/implicit_gemm/single_tile/launch.cuh"

namespace fastconv::algos::implicit_gemm::single_tile {

void run_fp32(const ConvArgs& args, const Plan& plan, const void* x, const void* weight, const int* exponents,
              Runtime& runtime) {
  run<float, true>(args, plan, x, weight, exponents, runtime);
}

}  // namespace fastconv::algos::implicit_gemm::single_tile
