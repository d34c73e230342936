#include "algos/implicit_gemm/wgrad/launch.cuh"

namespace fastconv::algos::implicit_gemm::wgrad {

void run_split(const WeightGradientArgs& args, Runtime& runtime) { run_class<float, 3>(args, runtime); }

}  // namespace fastconv::algos::implicit_gemm::wgrad
