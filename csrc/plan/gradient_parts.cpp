#include "plan/gradient_parts.h"

#include <algorithm>

#include "core/integers.h"

namespace fastconv {

GradientPart GradientDimension::phase(std::int64_t first) const {
  std::int64_t count = 0, lowest = 0, step = 1;
  for (std::int64_t r = 0; r < kernel; ++r) {
    if ((first + padding - r * dilation) % stride != 0) continue;
    if (count == 0) lowest = r;
    if (count == 1) step = r - lowest;
    ++count;
  }
  if (count == 0 || first >= size) return {};
  const std::int64_t rows = ceil_div(size - first, stride);
  const std::int64_t apart = count > 1 ? step * dilation / stride : 1;
  const std::int64_t reach = apart * (count - 1);
  const std::int64_t before = reach - (first + padding - lowest * dilation) / stride;  // negative: rows to skip
  const std::int64_t after = rows + reach - before - outputs;
  const std::int64_t pad = std::max<std::int64_t>({before, after, 0});
  return {{count, 1, lowest + step * (count - 1), step}, apart, pad, pad - before, rows};
}

GradientPart GradientDimension::together() const {
  const std::int64_t reach = kernel - 1 - padding;
  const std::int64_t first = reach >= 0 ? -(reach / stride) : ceil_div(-reach, stride);
  const std::int64_t last = (padding + stride - 1) / stride;
  const std::int64_t rows = ceil_div(size, stride);
  const std::int64_t pad = std::max<std::int64_t>({-first, rows - 1 + last - (outputs - 1), 0});
  return {{last - first + 1, stride, padding - first * stride, stride}, 1, pad, pad + first, rows};
}

ConvProblem gradient_convolution(const ConvProblem& problem, const GradientPart& rows, const GradientPart& columns) {
  ConvProblem made = problem;
  made.c = problem.k, made.k = rows.taps.residues * columns.taps.residues * problem.c;
  made.h = problem.p(), made.w = problem.q();
  made.r = rows.taps.count, made.s = columns.taps.count;
  made.stride_h = made.stride_w = 1, made.dilation_h = rows.dilation, made.dilation_w = columns.dilation;
  made.pad_h = rows.padding, made.pad_w = columns.padding;
  made.has_bias = false, made.residual = Residual::none, made.activation = Activation::none, made.max_pool = false;
  return made;
}

}  // namespace fastconv
