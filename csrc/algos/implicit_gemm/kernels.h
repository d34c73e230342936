// The four kernels of the implicit GEMM on CUDA.
#pragma once

#include <variant>

#include "algos/implicit_gemm/few_channels/plan.h"
#include "algos/implicit_gemm/persistent/plan.h"
#include "algos/implicit_gemm/portable/plan.h"
#include "algos/implicit_gemm/single_tile/plan.h"

namespace fastconv::algos::implicit_gemm {

using Plan = std::variant<portable::Plan, persistent::Plan, single_tile::Plan, few_channels::Plan>;

// The packed weight on CUDA: that of the persistent kernel or of the portable one, then few_channels' where it serves
// the weight.
inline std::size_t few_channels_offset(const ConvProblem& problem, const DeviceInfo& device) {
  if (persistent::is_used(problem, device)) return align_bytes(persistent::make_weights(problem).bytes());
  return portable::make_weights(problem).packed_bytes(problem.k);
}

}  // namespace fastconv::algos::implicit_gemm
