#include "algos/implicit_gemm/persistent/launch.cuh"

namespace fastconv::algos::implicit_gemm::persistent {

void run_bf16(const ConvArgs& args, const Plan& plan, Runtime& runtime) {
  run_class<bfloat16_t, Mode::bf16>(args, plan, runtime);
}

void pack_bf16(const PackArgs& args, Runtime& runtime) { pack_class<bfloat16_t, Mode::bf16>(args, runtime); }

}  // namespace fastconv::algos::implicit_gemm::persistent
