#include "algos/implicit_gemm/wgrad/launch.cuh"

namespace fastconv::algos::implicit_gemm::wgrad {

void run_fp16(const WeightGradientArgs& args, Runtime& runtime) { run_class<half_t, 1>(args, runtime); }

}  // namespace fastconv::algos::implicit_gemm::wgrad
