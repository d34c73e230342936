#include "algos/implicit_gemm/persistent/launch.cuh"

namespace fastconv::algos::implicit_gemm::persistent {

void run_gated_bf16(const ConvArgs& args, const Plan& plan, Runtime& runtime) {
  run_gated<bfloat16_t, Mode::bf16>(args, plan, runtime);
}

}  // namespace fastconv::algos::implicit_gemm::persistent
