// What is no tensor of a call from compiled code, as one text: an argument of an operator, and each element of a list,
// takes longer from Python than all that is done here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "core/problem.h"
#include "ops/arguments.h"
#include "ops/stable.h"

namespace fastconv::ops {

struct CompiledSettings {
  std::string algorithm, precision, activation;
  double negative_slope = 0.0;
  std::int64_t backend_flags = 0;
  bool residual_after = false, max_pool = false;
  std::optional<double> max_error;
  std::optional<std::int64_t> max_workspace;
  // Of a packed weight its shape; stride, padding and dilation, each for height and width, and groups.
  IntList sizes;
  AccuracyClass accuracy{};  // of these the parts of a problem
  ConvProblem problem;

  // What is read of them behind the problem.
  Arguments arguments(const std::optional<Tensor>& bias, const std::optional<Tensor>& residual) const {
    return {bias, residual, {}, {}, {}, 1, algorithm, precision, activation, negative_slope, backend_flags, {}};
  }
};

// text: the members up to `sizes` in their order, with spaces between them, flags as 0 or 1, what is missing as "None".
// count: of sizes, 7 or 11.
const CompiledSettings& settings_of_text(const std::string& text, std::size_t count);

}  // namespace fastconv::ops
