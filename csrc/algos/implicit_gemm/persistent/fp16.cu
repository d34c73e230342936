#include "algos/implicit_gemm/persistent/launch.cuh"

namespace fastconv::algos::implicit_gemm::persistent {

void run_fp16(const ConvArgs& args, const Plan& plan, Runtime& runtime) {
  run_class<half_t, Mode::fp16>(args, plan, runtime);
}

void pack_fp16(const PackArgs& args, Runtime& runtime) { pack_class<half_t, Mode::fp16>(args, runtime); }

}  // namespace fastconv::algos::implicit_gemm::persistent
