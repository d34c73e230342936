#include "algos/implicit_gemm/lean_launch.cuh"

namespace fastconv::algos::implicit_gemm::lean {

void run_fp32(const ConvArgs& args, const Plan& plan, const void* x, const void* weight, const int* exponents,
              Runtime& runtime) {
  run<float, true>(args, plan, x, weight, exponents, runtime);
}

}  // namespace fastconv::algos::implicit_gemm::lean
