#include "algos/implicit_gemm/persistent/launch.cuh"

namespace fastconv::algos::implicit_gemm::persistent {

void run_gated_fp16(const ConvArgs& args, const Plan& plan, Runtime& runtime) {
  run_gated<half_t, Mode::fp16>(args, plan, runtime);
}

}  // namespace fastconv::algos::implicit_gemm::persistent
