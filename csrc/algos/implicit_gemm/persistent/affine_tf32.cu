#include "algos/implicit_gemm/persistent/launch.cuh"

namespace fastconv::algos::implicit_gemm::persistent {

template void run_affine<Mode::single>(const ConvArgs&, const Plan&, Runtime&);

}  // namespace fastconv::algos::implicit_gemm::persistent
