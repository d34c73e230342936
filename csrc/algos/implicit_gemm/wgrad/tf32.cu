#include "algos/implicit_gemm/wgrad/launch.cuh"

namespace fastconv::algos::implicit_gemm::wgrad {

void run_single(const WeightGradientArgs& args, Runtime& runtime) { run_class<float, 1>(args, runtime); }

}  // namespace fastconv::algos::implicit_gemm::wgrad
