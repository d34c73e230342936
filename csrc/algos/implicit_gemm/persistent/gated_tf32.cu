#include "algos/implicit_gemm/persistent/launch.cuh"

namespace fastconv::algos::implicit_gemm::persistent {

void run_gated_tf32(const ConvArgs& args, const Plan& plan, Runtime& runtime) {
  run_gated<float, Mode::single>(args, plan, runtime);
}

}  // namespace fastconv::algos::implicit_gemm::persistent
