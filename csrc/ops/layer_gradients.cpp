// The gradients of a layer's call: those that algorithms of ours compute, and what is left to PyTorch in one call of
// its own operator.
#include <array>
#include <utility>

#include "ops/arguments.h"
#include "ops/convolution.h"
#include "ops/kernel_table.h"
#include "ops/layer.h"

namespace fastconv::ops {
namespace {

// [C, K/G, R, S], in the weight's own layout.
Tensor turned_filter(const Tensor& given, const ConvProblem& problem, Runtime& runtime) {
  const bool channels_last = !given.is_contiguous() && is_channels_last(given);
  const Tensor weight = channels_last ? given : in_layout(given, Layout::nchw);
  const std::int64_t shape[] = {problem.c, problem.k_per_group(), problem.r, problem.s};
  Tensor turned = torch::stable::empty({shape, 4}, weight.scalar_type(), std::nullopt, weight.device(), std::nullopt,
                                       channels_last ? MemoryFormat::ChannelsLast : MemoryFormat::Contiguous);
  turn_filter(problem, channels_last, weight.const_data_ptr(), turned.mutable_data_ptr(), runtime);
  return turned;
}

// aten::convolution_backward, whose results are undefined tensors where they are not wanted.
std::array<Tensor, 3> torch_gradients(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                      const ConvProblem& p, const std::array<bool, 3>& wanted) {
  using torch::stable::detail::from;
  const IntList stride{p.stride_h, p.stride_w}, padding{p.pad_h, p.pad_w}, dilation{p.dilation_h, p.dilation_w};
  std::array<StableIValue, 11> stack{from(grad),
                                     from(input),
                                     from(weight),
                                     from(std::optional(IntList{weight.size(0)})),
                                     from(stride),
                                     from(padding),
                                     from(dilation),
                                     from(false),
                                     from(IntList{0, 0}),
                                     from(p.groups),
                                     from(torch::headeronly::HeaderOnlyArrayRef<bool>(wanted.data(), wanted.size()))};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::convolution_backward", "", stack.data(), TORCH_ABI_VERSION));
  using torch::stable::detail::to;
  return {to<Tensor>(stack[0]), to<Tensor>(stack[1]), to<Tensor>(stack[2])};
}

}  // namespace

// The convolution of the gradient with the filter turned round, where the planner says that one of stride 1 makes it.
// by_torch: whether it says that PyTorch does.
std::optional<Tensor> Layer::input_gradient(const Tensor& grad, const Tensor& weight, const ConvProblem& problem,
                                            bool& by_torch) const {
  const DeviceInfo& device = device_of(grad);
  const auto plan = choose_cached<choose_input_gradient>(algorithm_, problem, device);
  by_torch = plan->method == InputGradientMethod::torch;
  const ConvProblem& convolution = plan->convolution;
  const bool is_one = plan->method == InputGradientMethod::phases && plan->convolutions == 1 &&
                      convolution.p() == problem.h && convolution.q() == problem.w;
  if (!is_one) return std::nullopt;
  const auto choice = choose_cached<choose>("auto", convolution, device);
  by_torch = !is_own(*choice->algorithm);
  if (by_torch) return std::nullopt;
  const auto guard = device_guard(grad);
  const std::unique_ptr<Runtime> runtime = make_runtime(device);
  const Tensor turned = turned_filter(weight, problem, *runtime);
  return run_own(grad, &turned, nullptr, *choice, convolution, std::nullopt, std::nullopt, *runtime);
}

Gradients Layer::gradients(const Tensor& grad, const Tensor& input, const Tensor& weight, AccuracyClass accuracy,
                           const GradientRequest& request) {
  Gradients result;
  auto& [of_input, of_weight, of_bias] = result;
  std::optional<ConvProblem> problem = problem_of(settings_, input, weight, {}, {}, accuracy);
  const bool fits =
      problem && is_alike(grad, input) && has_shape(grad, problem->n, problem->k, problem->p(), problem->q());
  if (!fits) return result;
  GradientRequest torch{false, false, request.bias, request.admits_torch};
  if (request.weight) {
    problem->layout = suggests_channels_last(input) || suggests_channels_last(grad) ? Layout::nhwc : Layout::nchw;
    const DeviceInfo& device = device_of(input);
    const auto choice = request.admits_torch ? choose_cached<choose_weight_gradient>(algorithm_, *problem, device)
                                             : choose_cached<choose_own_weight_gradient>(algorithm_, *problem, device);
    torch.weight = choice->algorithm == nullptr;
    if (!torch.weight) of_weight = run_weight_gradient(input, grad, *choice, *problem);
  }
  if (request.input) {
    problem->layout = suggests_channels_last(grad) || suggests_channels_last(weight) ? Layout::nhwc : Layout::nchw;
    of_input = input_gradient(grad, weight, *problem, torch.input);
  }
  if ((torch.input || torch.weight) && torch.admits_torch) {
    auto [dx, dw, db] = torch_gradients(grad, input, weight, settings_, {torch.input, torch.weight, torch.bias});
    if (torch.input) of_input = std::move(dx);
    if (torch.weight) of_weight = std::move(dw);
    if (torch.bias) of_bias = std::move(db);
  } else if (torch.bias) {
    of_bias = call_dispatcher("aten::sum", "dim_IntList", grad, std::optional(IntList{0, 2, 3}), false,
                              std::optional<ScalarType>());
  }
  return result;
}

}  // namespace fastconv::ops
