#include "algos/implicit_gemm/persistent/launch.cuh"

namespace fastconv::algos::implicit_gemm::persistent {

template void run_class<Mode::bf16>(const ConvArgs&, const Plan&, Runtime&);
template void pack_class<Mode::bf16>(const PackArgs&, Runtime&);

}  // namespace fastconv::algos::implicit_gemm::persistent
