#include "algos/implicit_gemm/wgrad/pointwise/launch.cuh"

namespace fastconv::algos::implicit_gemm::wgrad::pointwise {

template void run<Mode::single>(const WeightGradientArgs&, const Plan&, Runtime&);

}  // namespace fastconv::algos::implicit_gemm::wgrad::pointwise
