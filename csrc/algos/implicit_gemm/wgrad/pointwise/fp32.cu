#include "algos/implicit_gemm/wgrad/pointwise/launch.cuh"

namespace fastconv::algos::implicit_gemm::wgrad::pointwise {

void run_split(const WeightGradientArgs& args, const Plan& plan, Runtime& runtime) { run<2>(args, plan, runtime); }

}  // namespace fastconv::algos::implicit_gemm::wgrad::pointwise
