#include "plan/gradient_parts.h"

#include <algorithm>
#include <functional>

#include "core/gemm.h"
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

GradientPart GradientDimension::shuffled() const {
  if (stride != 2 || dilation != 1 || kernel % 2 != 0 || padding != kernel / 2 - 1 || size != 2 * outputs) return {};
  const std::int64_t count = kernel / 2, pad = count / 2;
  return {{count, 2, 2 * pad + padding, 2, count % 2 == 0}, 1, pad, 0, outputs};
}

GradientParts all_phases(const ConvProblem& problem) {
  const auto h = GradientDimension::height(problem), w = GradientDimension::width(problem);
  const GradientPart rows = h.shuffled(), columns = w.shuffled();
  const bool shuffles = problem.layout == Layout::nhwc && problem.groups == 1 && rows.rows > 0 && columns.rows > 0 &&
                        rows.taps.shifted == columns.taps.shifted;
  if (!shuffles) return {h.together(), w.together()};
  return {rows, columns, rows.taps.shifted ? Shuffle::windows : Shuffle::pixels};
}

ConvProblem gradient_convolution(const ConvProblem& problem, const GradientParts& parts, DeviceType device) {
  const auto& [rows, columns, shuffle] = parts;
  ConvProblem made = problem;
  made.shuffle = shuffle;
  made.c = problem.k, made.k = rows.taps.residues * columns.taps.residues * problem.c;
  made.h = problem.p(), made.w = problem.q();
  made.r = rows.taps.count, made.s = columns.taps.count;
  made.stride_h = made.stride_w = 1, made.dilation_h = rows.dilation, made.dilation_w = columns.dilation;
  made.pad_h = rows.padding, made.pad_w = columns.padding;
  made.has_bias = false, made.residual = Residual::none, made.activation = Activation::none, made.max_pool = false;
  made.packs = device == DeviceType::cpu;
  return made;
}

namespace {

// A dimension's phases, of which there are `count`: those whose convolutions differ, the one with the most taps first.
struct Phases {
  std::vector<GradientPart> different;
  int count = 0;

  explicit Phases(const GradientDimension& dimension) {
    for (std::int64_t first = 0; first < std::min(dimension.stride, dimension.size); ++first) {
      const GradientPart part = dimension.phase(first);
      if (part.rows == 0) continue;
      ++count;
      const bool is_known = std::ranges::any_of(different, [&](const GradientPart& other) {
        return other.taps.count == part.taps.count && other.dilation == part.dilation && other.padding == part.padding;
      });
      if (!is_known) different.push_back(part);
    }
    std::ranges::stable_sort(different, std::ranges::greater(),
                             [](const GradientPart& part) { return part.taps.count; });
  }
};

}  // namespace

GradientConvolutions gradient_convolutions(const ConvProblem& problem, bool together, DeviceType device) {
  const auto h = GradientDimension::height(problem), w = GradientDimension::width(problem);
  if (together) return {{gradient_convolution(problem, all_phases(problem), device)}, 1};
  const Phases rows(h), columns(w);
  GradientConvolutions made{{}, rows.count * columns.count};
  for (const GradientPart& row : rows.different) {
    for (const GradientPart& column : columns.different) {
      made.different.push_back(gradient_convolution(problem, {row, column}, device));
    }
  }
  return made;
}

bool is_product_with_filter(const std::string& algorithm, const ConvProblem& problem, DeviceType device) {
  const bool is_offered = device == DeviceType::cuda || problem.dtype == DType::f32;
  return algorithm == product_algorithm && is_matrix_product(problem) && problem.groups == 1 && is_offered;
}

}  // namespace fastconv
