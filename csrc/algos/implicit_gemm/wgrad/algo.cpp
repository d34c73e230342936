// The weight gradient as a matrix product on tensor cores, whose reduction runs over the pixels.
#include <algorithm>
#include <cmath>
#include <memory>
#include <string>

#include "algos/implicit_gemm/wgrad/plan.h"
#include "algos/implicit_gemm/wgrad/pointwise/plan.h"
#include "core/algorithm.h"
#include "core/cost.h"
#include "core/roundoffs.h"

namespace fastconv::algos::implicit_gemm {
namespace {

// On CUDA sums of a chunk of pixels, which are added up, of split halves or of operands of 11 bits.
double gradient_roundoffs(const ConvProblem& problem, const DeviceInfo& device) {
  const double pixels = gradient_length(problem);
  if (device.type == DeviceType::cpu) return blocked_sum(pixels, 700.0);
  if (problem.accuracy == AccuracyClass::tf32) return tf32_products;
  return std::sqrt(2.6 + 0.007 * std::min(pixels, 2048.0) + 2.2e-5 * pixels);
}

Support supports(const ConvProblem& problem, const DeviceInfo& device) {
  const auto pair = [](std::int64_t a, std::int64_t b) { return text_of(a, "x", b); };
  if (problem.output_numel() == 0) return Support::no("empty", "there is nothing to sum");
  if (problem.groups != 1) {
    return Support::no("groups", "groups is ", problem.groups, "; the weight gradient needs 1");
  }
  if (device.type == DeviceType::cpu) return Support::yes();
  if (device.compute_capability != 90) {
    return Support::no("device", "compute capability is ", device.compute_capability, "; the weight gradient needs 90");
  }
  if (std::max(problem.stride_h, problem.stride_w) > wgrad::max_stride) {
    return Support::no("stride", "stride is ", pair(problem.stride_h, problem.stride_w),
                       "; the weight gradient needs at most ", wgrad::max_stride);
  }
  // Images are a dimension of the grid; pixels of an image, taps and weights are numbered with 31 bits.
  constexpr double limit = 2147483648.0 - 1024;
  const double padded =
      static_cast<double>(problem.h + 2 * problem.pad_h) * static_cast<double>(problem.w + 2 * problem.pad_w);
  const double taps = static_cast<double>(problem.r * problem.s);
  const double image = padded * static_cast<double>(std::max(problem.c + 8, problem.k + 8));
  const double unrolled = wgrad::is_unrolled(problem) ? image * taps : image;
  const double weights = static_cast<double>(problem.k) * static_cast<double>(problem.c + 8) * taps;
  if (problem.n > 65535 || std::max({unrolled, weights, padded * static_cast<double>(problem.n)}) >= limit) {
    return Support::no("size", "the batch has ", problem.n, " images of ", image,
                       " values; the weight gradient needs below 2^16 of below 2^31");
  }
  if (const double bytes = wgrad::unrolled_bytes(problem); bytes > wgrad::max_unrolled_bytes) {
    const auto mib = [](double size) { return text_of(static_cast<std::int64_t>(size) >> 20, " MiB"); };
    return Support::no("workspace", "the unrolled input has ", mib(bytes), "; the weight gradient allows ",
                       mib(wgrad::max_unrolled_bytes));
  }
  return Support::yes();
}

ConvPlan cpu_plan(const ConvProblem& problem, const DeviceInfo& device) {
  ConvPlan plan;
  plan.config = "float32, a row of pixels at a time";
  plan.cost_us = reference_us(problem, device);
  return plan;
}

// What the products take of the planned clocks, which are those of float32, by kind of problem, as measured: half types
// that are read where they lie take less, unrolled channels more.
double clocks_factor(const wgrad::Plan& plan, const ConvProblem& problem) {
  if (!plan.unrolled) return plan.scaled() ? 1.0 : plan.rows_by_warps ? 0.86 : 0.72;
  const bool large = problem.r * problem.s > 9;
  if (problem.accuracy == AccuracyClass::fp32) return large ? 1.6 : 1.12;
  if (plan.scaled()) return large ? 3.3 : 1.8;
  return large ? 2.5 : 1.6;
}

// A weight's partial sums are added one after the other, however few weights there are: what that takes beyond the
// time of their bytes, which the clocks count.
double summing_us(std::int64_t splits, std::size_t partial_bytes, const DeviceInfo& device) {
  return std::max(
      0.0, 0.05 * static_cast<double>(splits) - memory_us(2.0 * static_cast<double>(partial_bytes), 1.0, device));
}

ConvPlan converting_plan(const ConvProblem& problem, const DeviceInfo& device) {
  const wgrad::Plan plan = wgrad::make_plan(problem, device.processors);
  const double clocks = clocks_factor(plan, problem) * wgrad::detail::plan_clocks(plan, problem, device.processors);
  const double elements = static_cast<double>(problem.n * problem.c * problem.h * problem.w);
  const double outputs = static_cast<double>(problem.output_numel());
  const double size = static_cast<double>(size_of(problem.dtype));
  const double read = size * ((plan.convert_x == wgrad::Conversion::none ? 0.0 : elements) +
                              (plan.convert_grad == wgrad::Conversion::none ? 0.0 : outputs));
  const double converted = read + static_cast<double>(plan.x_bytes(problem) + plan.grad_bytes(problem));
  const double conversion_us = converted == 0 ? 0 : 12.0 + memory_us(converted, 0.85, device);
  // Of half types that are read where they lie, the bytes may be the bound.
  const double bytes_us = converted == 0 ? memory_us(size * (elements + outputs), 0.65, device) : 0.0;
  const double product_us =
      std::max(clocks_us(clocks, device), bytes_us) + summing_us(plan.splits(), plan.partial_bytes(problem), device);
  return {
      text_of("wgmma, ", describe(plan.mode), ", chunk ", plan.tile_n, "x", plan.tile_p, "x", plan.tile_q, " pixels, ",
              plan.blocks_m() * wgrad::block_channels, " filters, ", plan.blocks_n, " x ", wgrad::block_channels,
              (plan.window     ? " taps x channels"
               : plan.unrolled ? " unrolled channels"
                               : " channels"),
              ", ", plan.splits(), " splits"),
      plan.workspace_bytes(problem), 6.0 + conversion_us + product_us, keep_plan(plan)};
}

// Four launches, of which two hide behind others. One product takes fewer clocks than planned for three, as measured on
// an H100 (docs/log/133-choices-again.md).
double pointwise_us(const wgrad::pointwise::Plan& plan, const DeviceInfo& device) {
  const double bytes = 4.0 * static_cast<double>(plan.pixels * (plan.rows + plan.columns));
  const double clocks =
      (plan.mode == Mode::single ? 0.78 : 1.0) * wgrad::pointwise::detail::plan_clocks(plan, device.processors);
  return 12.0 + std::max(memory_us(bytes, 0.9, device), clocks_us(clocks, device));
}

ConvPlan pointwise_plan(const ConvProblem& problem, const DeviceInfo& device) {
  const wgrad::pointwise::Plan plan = wgrad::pointwise::make_plan(problem, device.processors);
  return {text_of("wgmma, ", describe(plan.mode), ", converted on chip, chunk ", wgrad::pointwise::chunk_pixels,
                  " pixels, ", plan.tile.rows(), (plan.transposed ? " channels, " : " filters, "), plan.tile.columns(),
                  (plan.transposed ? " filters, " : " channels, "), plan.splits(), " splits"),
          plan.workspace_bytes(), pointwise_us(plan, device), keep_plan(plan)};
}

ConvPlan plan(const ConvProblem& problem, const DeviceInfo& device) {
  if (device.type == DeviceType::cpu) return cpu_plan(problem, device);
  ConvPlan converting = converting_plan(problem, device);
  if (!wgrad::pointwise::serves(problem)) return converting;
  ConvPlan pointwise = pointwise_plan(problem, device);
  return pointwise.cost_us < converting.cost_us ? pointwise : converting;
}

}  // namespace

extern const WeightGradient weight_gradient;
const WeightGradient weight_gradient{"implicit_gemm", gradient_roundoffs, supports, plan};

}  // namespace fastconv::algos::implicit_gemm
