#include "algos/implicit_gemm/wgrad/launch.cuh"

namespace fastconv::algos::implicit_gemm::wgrad {

void run_bf16(const WeightGradientArgs& args, Runtime& runtime) { run_class<bfloat16_t, 1>(args, runtime); }

}  // namespace fastconv::algos::implicit_gemm::wgrad
