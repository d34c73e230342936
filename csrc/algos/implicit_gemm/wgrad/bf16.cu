#include "algos/implicit_gemm/wgrad/launch.cuh"

namespace fastconv::algos::implicit_gemm::wgrad {

template void run_class<Mode::bf16>(const WeightGradientArgs&, const Plan&, Runtime&);

}  // namespace fastconv::algos::implicit_gemm::wgrad
