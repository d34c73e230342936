// The weight gradient of F(4x4, 3x3): as in the forward convolution, a quarter of the direct products.
#include <cmath>
#include <memory>
#include <string>

#include "algos/winograd_staged/wgrad/plan.h"
#include "core/algorithm.h"
#include "core/cost.h"
#include "core/roundoffs.h"
#include "winograd/limits.h"

namespace fastconv {
namespace algos::winograd_staged::wgrad {
namespace {

// The forward's noise gain; sums over tiles of 16 pixels, on CUDA of split halves, 64 tiles at a time.
double roundoffs(const ConvProblem& problem, const DeviceInfo& device) {
  const double pixels = gradient_length(problem);
  if (device.type == DeviceType::cpu)
    return winograd_in_fp32(f4_noise.gain, problem.n * problem.p() * problem.q() / 16, 64.0);
  return f4_noise.gain * std::sqrt(3.6 + 5.5e-6 * pixels);
}

Support supports(const ConvProblem& problem, const DeviceInfo& device) {
  if (problem.output_numel() == 0) return Support::no("empty", "there is nothing to sum");
  if (problem.accuracy != AccuracyClass::fp32) {
    return Support::no("precision", "the weight gradient of winograd_f4 offers class fp32 alone");
  }
  if (Support support = supports_winograd(problem, "winograd_f4"); !support.ok) return support;
  if (device.type == DeviceType::cpu) return Support::yes();
  if (device.compute_capability != 90) {
    return Support::no("device", "compute capability is ", device.compute_capability,
                       "; the weight gradient of winograd_f4 needs 90");
  }
  const Plan plan = make_plan(problem, device.processors);
  const std::int64_t limit = std::int64_t{1} << 31;
  const std::int64_t image = std::max(problem.c, problem.k) * (problem.h + 4) * (problem.w + 4);
  if (problem.n > 65535 || image >= limit || plan.workspace_bytes(problem) > workspace_limit) {
    return Support::no("size", "the batch has ", problem.n, " images of ", image,
                       " values; the weight gradient of winograd_f4 needs ", plan.workspace_bytes(problem) >> 20,
                       " MiB");
  }
  return Support::yes();
}

ConvPlan cpu_plan(const ConvProblem& problem, const DeviceInfo& device) {
  const Plan plan = make_plan(problem, 1);
  ConvPlan result;
  result.kernel_plan = keep_plan(plan);
  result.config = "float64 sums";
  result.workspace_bytes = align_bytes(points * plan.tiles * problem.c * 4);
  result.cost_us = reference_us(problem, device);
  return result;
}

ConvPlan plan(const ConvProblem& problem, const DeviceInfo& device) {
  if (device.type == DeviceType::cpu) return cpu_plan(problem, device);
  const Plan plan = make_plan(problem, device.processors);
  const double read = 4.0 * static_cast<double>(problem.n * problem.c * problem.h * problem.w + problem.output_numel());
  const double written = static_cast<double>(plan.x_bytes() + plan.grad_bytes());
  const double transposed = problem.layout == Layout::nchw ? memory_us(2.0 * read, 0.95, device) : 0.0;
  const double products =
      std::max(clocks_us(detail::product_clocks(plan, device.processors), device), memory_us(written, 0.9, device));
  ConvPlan result;
  result.config = text_of("F(4x4), 3 x float16, 36 x ", plan.rows, "x", plan.columns, "x", plan.tiles, ", ",
                          (plan.rows_are_filters ? "filters" : "channels"), " by ", plan.column_blocks * block_channels,
                          " of ", plan.row_blocks * block_channels, ", ", plan.split_k, " splits");
  result.workspace_bytes = plan.workspace_bytes(problem);
  result.cost_us = 16.0 + transposed + memory_us(read + written, 0.8, device) + products;
  result.kernel_plan = keep_plan(plan);
  result.reads_nhwc = true;
  return result;
}

}  // namespace
}  // namespace algos::winograd_staged::wgrad

namespace algos::winograd_f4 {

extern const WeightGradient weight_gradient;
const WeightGradient weight_gradient{"winograd_f4", winograd_staged::wgrad::roundoffs, winograd_staged::wgrad::supports,
                                     winograd_staged::wgrad::plan};

}  // namespace algos::winograd_f4
}  // namespace fastconv
