// The three kernels of the implicit GEMM on CUDA.
#pragma once

#include <variant>

#include "algos/implicit_gemm/persistent/plan.h"
#include "algos/implicit_gemm/portable/plan.h"
#include "algos/implicit_gemm/single_tile/plan.h"

namespace fastconv::algos::implicit_gemm {

using Plan = std::variant<portable::Plan, persistent::Plan, single_tile::Plan>;

}  // namespace fastconv::algos::implicit_gemm
