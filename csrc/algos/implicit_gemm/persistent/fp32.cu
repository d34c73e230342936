#include "algos/implicit_gemm/persistent/launch.cuh"

namespace fastconv::algos::implicit_gemm::persistent {

void run_fp32(const ConvArgs& args, const Plan& plan, Runtime& runtime) {
  run_class<float, Mode::split>(args, plan, runtime);
}

void pack_fp32(const PackArgs& args, Runtime& runtime) { pack_class<float, Mode::split>(args, runtime); }

}  // namespace fastconv::algos::implicit_gemm::persistent
