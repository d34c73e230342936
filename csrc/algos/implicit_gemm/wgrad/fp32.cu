#include "algos/implicit_gemm/wgrad/launch.cuh"

namespace fastconv::algos::implicit_gemm::wgrad {

template void run_class<Mode::split>(const WeightGradientArgs&, const Plan&, Runtime&);

}  // namespace fastconv::algos::implicit_gemm::wgrad
