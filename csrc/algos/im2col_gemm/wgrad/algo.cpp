// The gradients of a 1x1 convolution as one matrix product of the library's: what they cost beside PyTorch's, which are
// the library's, too, but by cuDNN's choice (docs/log/147-gradients-as-products.md).
#include <algorithm>

#include "algos/im2col_gemm/products.h"
#include "algos/im2col_gemm/wgrad/plan.h"
#include "core/algorithm.h"
#include "core/cost.h"
#include "core/fitted.h"
#include "core/gemm.h"
#include "core/library_times.h"
#include "core/roundoffs.h"

namespace fastconv::algos::im2col_gemm {
namespace {

double gradient_roundoffs(const ConvProblem& problem, const DeviceInfo& device) {
  const double pixels = gradient_length(problem);
  if (device.type == DeviceType::cpu) return blocked_sum(pixels, 384.0);
  return problem.accuracy == AccuracyClass::tf32 ? tf32_products : serial_sum(pixels);
}

Support supports(const ConvProblem& problem, const DeviceInfo&) {
  if (problem.output_numel() == 0) return Support::no("empty", "there is nothing to sum");
  if (!is_matrix_product(problem)) {
    return Support::no("kernel_size",
                       "the weight gradient of im2col_gemm is for 1x1 kernels with stride 1 and no padding; the "
                       "kernel is ",
                       problem.r, "x", problem.s);
  }
  if (problem.groups != 1) {
    return Support::no("groups", "groups is ", problem.groups, "; the weight gradient of im2col_gemm needs 1");
  }
  return Support::yes();
}

// In FP32 arithmetic: whole tiles of 128 filters by 128 channels.
double plain_us(const ConvProblem& problem, const DeviceInfo& device) {
  const double flops = 2.0 * gradient_length(problem) * static_cast<double>(round_up(problem.k, 128)) *
                       static_cast<double>(round_up(problem.c, 128));
  return 10.0 + fp32_us(flops, 1.0, device);
}

double cpu_cost_us(const wgrad::Plan& plan, const ConvProblem& problem, const DeviceInfo& device) {
  // The product was not measured: PyTorch's stays the choice.
  return plan.multiplies ? 1.1 * torch::weight_gradient_us(problem, device) : reference_us(problem, device);
}

double nhwc_us(const ConvProblem& problem, const DeviceInfo& device) {
  if (!on_tensor_cores(problem)) return plain_us(problem, device);
  const double torch_us = torch::weight_gradient_us(problem, device);
  // Of few pixels, which are less than a tensor core's instruction sums, cuDNN is ahead: known of one and eight.
  return gradient_length(problem) < 16.0 ? 1.1 * torch_us : torch_us - 0.9;
}

double cuda_cost_us(const ConvProblem& problem, const DeviceInfo& device) {
  if (problem.layout == Layout::nhwc) return nhwc_us(problem, device);
  ConvProblem read = problem;
  read.layout = Layout::nhwc;
  return nhwc_us(read, device) + launch_us + transposition_us(static_cast<double>(nhwc_operand_bytes(problem)), device);
}

ConvPlan plan(const ConvProblem& problem, const DeviceInfo& device) {
  const wgrad::Plan kept = wgrad::make_plan(problem, device.type);
  ConvPlan result;
  result.kernel_plan = keep_plan(kept);
  result.config = kept.multiplies ? "in place" : "float32, a row of pixels at a time";
  if (device.type == DeviceType::cpu) {
    result.cost_us = cpu_cost_us(kept, problem, device);
    return result;
  }
  result.cost_us = cuda_cost_us(problem, device);
  result.reads_nhwc = true;
  if (problem.layout == Layout::nchw) result.workspace_bytes = nhwc_operand_bytes(problem);
  return result;
}

}  // namespace

double input_product_us(const ConvProblem& problem, double torch_us, double convolution_us, const DeviceInfo& device) {
  if (!on_tensor_cores(problem)) return convolution_us;
  if (problem.accuracy != AccuracyClass::tf32) return (is_single_pixel(problem) ? 1.15 : 0.91) * torch_us;
  if (problem.layout != Layout::nhwc || !is_aligned_tf32(problem)) return std::max(torch_us, convolution_us);
  const double pixels = static_cast<double>(sizeof(float)) * gradient_length(problem);
  const double flops = problem.direct_flops() * static_cast<double>(round_up(problem.c, 128)) /
                       static_cast<double>(std::max<std::int64_t>(problem.c, 1));
  return fitted::im2col_gemm::tf32_gradient.us(static_cast<double>(problem.k), tensor_us(flops, 1.0, device),
                                               pixels * static_cast<double>(problem.c),
                                               pixels * static_cast<double>(problem.k), device);
}

extern const WeightGradient weight_gradient;
const WeightGradient weight_gradient{"im2col_gemm", gradient_roundoffs, supports, plan};

}  // namespace fastconv::algos::im2col_gemm
