// The operators of the weight gradient: the kernel, and why PyTorch's own is taken instead.
#include <memory>
#include <optional>
#include <string>

#include "ops/arguments.h"
#include "ops/convolution.h"
#include "ops/debug.h"
#include "ops/kernel_table.h"
#include "plan/gradients.h"
#include "plan/registry.h"

namespace fastconv::ops {
namespace {

// What conv2d's arguments are to the forward convolution, these are to its weight gradient.
struct GradientProblem {
  ConvProblem problem;
  std::shared_ptr<const WeightGradientChoice> choice;
};

GradientProblem gradient_problem(const Tensor& input, const Tensor& grad, const IntList& weight_size,
                                 const IntList& stride, const IntList& padding, const IntList& dilation,
                                 std::int64_t groups, Layout layout, const std::string& algorithm,
                                 const std::string& precision, const Limits& limits) {
  const std::string none = "none";
  const Arguments arguments{std::nullopt, std::nullopt, stride, padding, dilation, groups,
                            algorithm,    precision,    none,   0.0,     0,        limits};
  GradientProblem result{make_problem(input, weight_size, layout, arguments), {}};
  const ConvProblem& problem = result.problem;
  const IntList expected{problem.n, problem.k, problem.p(), problem.q()};
  FASTCONV_REQUIRE(shape_of(grad) == expected, "grad has shape ", to_text(shape_of(grad)), "; expected the output's ",
                   to_text(expected));
  require_same_kind(input, grad, "grad");
  result.choice = choose_cached<choose_weight_gradient>(algorithm, problem, device_of(input));
  return result;
}

}  // namespace

Tensor run_weight_gradient(const Tensor& input, const Tensor& grad, const WeightGradientChoice& choice,
                           const ConvProblem& problem) {
  const WeightGradient& chosen = *choice.algorithm;
  const auto guard = device_guard(input);
  const std::unique_ptr<Runtime> runtime = make_runtime(device_of(input));
  const Tensor x = aligned(in_layout(input, problem.layout)), dy = aligned(in_layout(grad, problem.layout));
  GuardedBytes workspace(choice.plan.workspace_bytes, input);
  GuardedOutput output(input, {problem.k, problem.c_per_group(), problem.r, problem.s}, problem.layout);
  const PlannedOperands planned =
      bring_into_layout(choice.plan, problem, x.const_data_ptr(), dy.const_data_ptr(), workspace.data(), *runtime);
  ConvProblem read = problem;
  read.layout = planned.layout;
  const WeightGradientArgs args{read,
                                planned.x,
                                planned.grad,
                                output.data(),
                                problem.layout == Layout::nhwc,
                                workspace.data(),
                                choice.plan.kernel_plan.get()};
  find_weight_gradient(chosen, runtime->device().type)(args, *runtime);
  workspace.check("workspace", chosen.name);
  return output.finish(chosen.name);
}

namespace {

Layout gradient_layout(bool channels_last) { return channels_last ? Layout::nhwc : Layout::nchw; }

// Why PyTorch computes this gradient; empty if an algorithm of ours does.
std::string weight_gradient_reason(const Tensor& input, const Tensor& grad, IntList weight_size, IntList stride,
                                   IntList padding, IntList dilation, std::int64_t groups, bool channels_last,
                                   std::string algorithm, std::string precision, std::optional<double> max_error,
                                   std::optional<std::int64_t> max_workspace) {
  const GradientProblem target =
      gradient_problem(input, grad, weight_size, stride, padding, dilation, groups, gradient_layout(channels_last),
                       algorithm, precision, limits_of(max_error, max_workspace));
  return target.choice->algorithm != nullptr ? "" : target.choice->support.code + ": " + target.choice->support.reason;
}

// dw [K, C/groups, R, S]; channels_last: its memory format, and that in which input and grad are read.
Tensor weight_gradient(const Tensor& input, const Tensor& grad, IntList weight_size, IntList stride, IntList padding,
                       IntList dilation, std::int64_t groups, bool channels_last, std::string algorithm,
                       std::string precision, std::optional<double> max_error,
                       std::optional<std::int64_t> max_workspace) {
  const GradientProblem target =
      gradient_problem(input, grad, weight_size, stride, padding, dilation, groups, gradient_layout(channels_last),
                       algorithm, precision, limits_of(max_error, max_workspace));
  if (target.choice->algorithm == nullptr) throw Unsupported("weight gradient: " + target.choice->support.reason);
  return run_weight_gradient(input, grad, *target.choice, target.problem);
}

}  // namespace
}  // namespace fastconv::ops

STABLE_TORCH_LIBRARY_FRAGMENT(fastconv, library) {
  library.def(
      "weight_gradient(Tensor input, Tensor grad, SymInt[] weight_size, SymInt[] stride, SymInt[] padding, "
      "SymInt[] dilation, SymInt groups, bool channels_last, str algorithm, str precision, float? max_error=None, "
      "int? max_workspace=None) -> "
      "Tensor");
  library.def(
      "weight_gradient_reason(Tensor input, Tensor grad, SymInt[] weight_size, SymInt[] stride, SymInt[] padding, "
      "SymInt[] dilation, SymInt groups, bool channels_last, str algorithm, str precision, float? max_error=None, "
      "int? max_workspace=None) -> "
      "str");
}

FASTCONV_IMPLEMENT({
  library.impl("weight_gradient", TORCH_BOX(&fastconv::ops::weight_gradient));
  library.impl("weight_gradient_reason", TORCH_BOX(&fastconv::ops::weight_gradient_reason));
})
