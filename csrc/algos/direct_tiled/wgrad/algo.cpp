// The weight gradient of depthwise convolutions.
#include <memory>
#include <string>

#include "algos/direct_tiled/depthwise/plan.h"
#include "algos/direct_tiled/wgrad/plan.h"
#include "core/cost.h"
#include "core/roundoffs.h"

namespace fastconv::algos::direct_tiled {
namespace {

double gradient_roundoffs(const ConvProblem& problem, const DeviceInfo&) {
  return blocked_sum(gradient_length(problem), 700.0);
}

Support supports(const ConvProblem& problem, const DeviceInfo&) {
  if (problem.output_numel() == 0) return Support::no("empty", "there is nothing to sum");
  if (!depthwise::has_kernel(problem)) {
    return Support::no("kernel_size",
                       "the weight gradient of direct_tiled is for depthwise kernels of 3x3, 5x5, 7x7 with "
                       "stride 1 or 2 and no dilation; the kernel is ",
                       problem.r, "x", problem.s, " in ", problem.groups, " groups");
  }
  // Rows, columns and the elements of an image are numbered with 31 bits; so are strips, and with NCHW their outputs.
  constexpr double limit = 1073741824.0;
  const double padded =
      static_cast<double>(problem.h + 2 * problem.pad_h) * static_cast<double>(problem.w + 2 * problem.pad_w);
  if (padded * static_cast<double>(problem.c) >= limit || padded * static_cast<double>(problem.n) >= limit) {
    return Support::no("size", "an image has ", padded * static_cast<double>(problem.c), " values, the batch ",
                       padded * static_cast<double>(problem.n),
                       " pixels; the weight gradient of direct_tiled needs below 2^30");
  }
  return Support::yes();
}

ConvPlan plan(const ConvProblem& problem, const DeviceInfo& device) {
  ConvPlan result;
  if (device.type == DeviceType::cpu) {
    result.config = "float32, a row of pixels at a time";
    result.cost_us = reference_us(problem, device);
    return result;
  }
  const wgrad::Plan plan = wgrad::make_plan(problem, device);
  const bool nhwc = problem.layout == Layout::nhwc;
  result.config = text_of("depthwise, strips of ", wgrad::strip_rows(problem.r, problem.stride_h), " rows, ",
                          plan.split_k, " splits");
  result.workspace_bytes = wgrad::Plan::workspace_bytes(problem, plan.split_k);
  // The issue of instructions decides; those of half types are more (docs/log/50-depthwise.md).
  const double share = problem.dtype == DType::f32 ? 1.0 : 0.55;
  const double rate = share * (nhwc ? problem.r == 3 ? 0.11 : 0.19 : 0.14);
  const double bytes =
      4.0 * static_cast<double>(problem.n * problem.c * problem.h * problem.w + problem.output_numel());
  result.cost_us =
      12.0 + std::max(fp32_us(problem.direct_flops(), rate, device), memory_us(bytes, 0.54 * share, device));
  result.kernel_plan = keep_plan(plan);
  return result;
}

}  // namespace

extern const WeightGradient weight_gradient;
const WeightGradient weight_gradient{"direct_tiled", gradient_roundoffs, supports, plan};

}  // namespace fastconv::algos::direct_tiled
