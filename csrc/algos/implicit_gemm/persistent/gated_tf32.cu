#include "algos/implicit_gemm/persistent/launch.cuh"

namespace fastconv::algos::implicit_gemm::persistent {

template void run_gated<Mode::single>(const ConvArgs&, const Plan&, Runtime&);

}  // namespace fastconv::algos::implicit_gemm::persistent
