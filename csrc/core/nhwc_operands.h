// Room for a weight gradient's operands in NHWC, one behind the other, at the end of its workspace.
#pragma once

#include <cstddef>

#include "core/integers.h"
#include "core/problem.h"

namespace fastconv {

inline std::size_t nhwc_operand_bytes(const ConvProblem& problem) {
  const std::int64_t input = problem.n * problem.c * problem.h * problem.w;
  return align_bytes(static_cast<std::size_t>(input + problem.output_numel()) * size_of(problem.dtype));
}

}  // namespace fastconv
