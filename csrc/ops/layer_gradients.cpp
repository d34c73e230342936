// A layer's call as autograd knows it, and its gradients: those that algorithms of ours compute, and what is left to
// PyTorch in one call of its own operator.
//
// The call is aten::convolution_overrideable, an operator without kernels for CPU and CUDA that PyTorch has for
// backends that bring their own convolution. Autograd's record of it is C++, which no operator of the stable ABI can
// have otherwise. Its output_padding says nothing of a convolution that is not transposed: it carries a LayerCall.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <array>
#include <bit>
#include <exception>
#include <string>
#include <tuple>
#include <utility>

#include "ops/arguments.h"
#include "ops/convolution.h"
#include "ops/input_gradient.h"
#include "ops/layer.h"

namespace fastconv::ops {
namespace {

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

struct LayerCall {
  std::int64_t layer, mode;
  // What the gradients need of the layer, which may be gone by then.
  std::string algorithm;
  Limits limits;

  IntList encoded() const {
    const auto& known = algorithms();
    const auto found = std::ranges::find_if(known, [&](const Algorithm* entry) { return algorithm == entry->name; });
    const std::int64_t index = found == known.end() ? -1 : found - known.begin();  // -1: auto
    return {layer, mode, index, std::bit_cast<std::int64_t>(limits.max_error), limits.max_workspace};
  }

  explicit LayerCall(const IntList& code) {
    FASTCONV_REQUIRE(code.size() == 5, "convolution_overrideable is called with output_padding " + to_text(code) +
                                           "; expected what layer_call returned");
    layer = code[0], mode = code[1];
    algorithm = code[2] < 0 ? "auto" : algorithms().at(static_cast<std::size_t>(code[2]))->name;
    limits = {std::bit_cast<double>(code[3]), code[4]};
  }

  LayerCall(std::int64_t layer, std::int64_t mode)
      : layer(layer), mode(mode), algorithm(layer_at(layer).algorithm()), limits(layer_at(layer).settings().limits) {}
};

// The code of a call of a layer: its number, and a CallMode.
IntList layer_call(std::int64_t layer, std::int64_t mode) { return LayerCall(layer, mode).encoded(); }

// conv(input [N, C, H, W], weight [K, C/groups, R, S]) + bias [K]. A status of `pack` or `stream` says what Python
// should do before the next call: autograd has recorded this one, so that it cannot be repeated.
Tensor recorded_convolution(const Tensor& input, const Tensor& weight, std::optional<Tensor> bias, IntList stride,
                            IntList padding, IntList dilation, bool, IntList code, std::int64_t groups) {
  const LayerCall call(code);
  Layer& layer = layer_at(call.layer);
  CallMode mode(call.mode);
  std::optional<Tensor> y = layer.forward(input, weight, bias, std::nullopt, mode, last_status);
  if (y) return *y;
  if (last_status == CallStatus::pack || last_status == CallStatus::stream) {
    mode.trained = true;
    CallStatus status{};
    y = layer.forward(input, weight, bias, std::nullopt, mode, status);
    if (y) return *y;
  }
  const Limits& limits = call.limits;
  return conv2d(input, weight, bias, std::nullopt, stride, padding, dilation, groups, call.algorithm,
                name_of(mode.accuracy), "none", 0.0, integer_of_python("fastconv::backend_flags"),
                limits.max_error > 0.0 ? std::optional(limits.max_error) : std::nullopt,
                limits.max_workspace >= 0 ? std::optional(limits.max_workspace) : std::nullopt, false, false);
}

// Whether PyTorch's own convolution, which follows its switch, computes in the class of a call as the switch is now.
bool admits_torch(const Tensor& grad, AccuracyClass accuracy) {
  if (!grad.is_cuda() || grad.scalar_type() != ScalarType::Float) return true;
  const bool is_tf32 = integer_of_python("fastconv::allows_tf32") != 0;
  return is_tf32 == (accuracy == AccuracyClass::tf32);
}

// Of input, weight and bias.
using Gradients = std::array<std::optional<Tensor>, 3>;
using Wanted = std::array<bool, 3>;

// What is wanted and has no value is Python's to compute: PyTorch's in another class than its switch says.
// All tensors are taken in the layout of the call's output.
Gradients gradients_here(const Tensor& grad, const Tensor& input, const Tensor& weight, const ConvProblem& settings,
                         const std::string& algorithm, AccuracyClass accuracy, const Wanted& wanted) {
  Gradients result;
  const std::optional<ConvProblem> problem = problem_of(settings, input, weight, {}, {}, accuracy);
  const bool fits =
      problem && is_alike(grad, input) && has_shape(grad, problem->n, problem->k, problem->p(), problem->q());
  if (!fits) return result;
  Wanted by_torch{false, false, wanted[2]};
  bool admitted = true;
  if (wanted[1]) {
    const DeviceInfo& device = device_of(input);
    auto choice = choose_cached<choose_weight_gradient>(algorithm, *problem, device);
    if (choice->algorithm == nullptr && !(admitted = admits_torch(grad, accuracy))) {
      choice = choose_cached<choose_own_weight_gradient>(algorithm, *problem, device);
    }
    by_torch[1] = choice->algorithm == nullptr;
    if (!by_torch[1]) result[1] = run_weight_gradient(input, grad, *choice, *problem);
  }
  if (wanted[0]) {
    const auto plan = choose_cached<choose_input_gradient>(algorithm, *problem, device_of(grad));
    by_torch[0] = plan->method == InputGradientMethod::torch;
    if (by_torch[0]) {
      admitted = admitted && admits_torch(grad, accuracy);
    } else {
      // Of whatever algorithm is the fastest, even where one is named: it was named for the forward.
      result[0] = input_gradient_by_convolutions(plan->method, "auto", *problem, grad, weight, std::nullopt);
    }
  }
  if ((by_torch[0] || by_torch[1]) && admitted) {
    const std::array<Tensor, 3> found = torch_gradients(grad, input, weight, settings, by_torch);
    for (std::size_t i = 0; i < 3; ++i) {
      if (by_torch[i]) result[i] = found[i];
    }
  } else if (by_torch[2]) {
    result[2] = call_dispatcher("aten::sum", "dim_IntList", grad, std::optional(IntList{0, 2, 3}), false,
                                std::optional<ScalarType>());
  }
  return result;
}

Gradients gradients_in_python(const Tensor& grad, const Tensor& input, const Tensor& weight, const IntList& geometry,
                              const LayerCall& call, AccuracyClass accuracy, const Wanted& wanted) {
  using torch::stable::detail::from;
  const std::int64_t bits = wanted[0] + 2 * wanted[1] + 4 * wanted[2];
  std::array<StableIValue, 9> stack{from(grad),
                                    from(input),
                                    from(weight),
                                    from(geometry),
                                    from(call.algorithm),
                                    from(std::string(name_of(accuracy))),
                                    from(call.limits.max_error),
                                    from(call.limits.max_workspace),
                                    from(bits)};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("fastconv::gradients_in_python", "", stack.data(), TORCH_ABI_VERSION));
  using torch::stable::detail::to;
  return {to<std::optional<Tensor>>(stack[0]), to<std::optional<Tensor>>(stack[1]),
          to<std::optional<Tensor>>(stack[2])};
}

// An exception that leaves a backward pass from here is a RuntimeError, whatever it was. Python raises it as what it
// was, at the end of the pass, which goes on without these gradients.
void report_failure(const std::string& message, const Tensor& grad) {
  using torch::stable::detail::from;
  std::array<StableIValue, 2> stack{from(message), from(grad)};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("fastconv::backward_failed", "", stack.data(), TORCH_ABI_VERSION));
}

// dx, dw and db; undefined tensors where they are not wanted.
std::tuple<Tensor, Tensor, Tensor> recorded_gradients(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                                      IntList stride, IntList padding, IntList dilation, bool,
                                                      IntList code, std::int64_t groups, std::vector<bool> mask) {
  const LayerCall call(code);
  const AccuracyClass accuracy = CallMode(call.mode).accuracy;
  Wanted wanted{mask.at(0), mask.at(1), mask.at(2)};
  Gradients result;
  try {
    // Gradients that are differentiated again are made of operators that autograd knows.
    if (!aoti_torch_grad_mode_is_enabled()) {
      ConvProblem settings;
      settings.stride_h = stride[0], settings.stride_w = stride[1];
      settings.pad_h = padding[0], settings.pad_w = padding[1];
      settings.dilation_h = dilation[0], settings.dilation_w = dilation[1];
      settings.groups = groups;
      settings.limits = call.limits;
      result = gradients_here(grad, input, weight, settings, call.algorithm, accuracy, wanted);
      for (std::size_t i = 0; i < 3; ++i) wanted[i] = wanted[i] && !result[i];
    }
    if (wanted[0] || wanted[1] || wanted[2]) {
      const IntList geometry{stride[0], stride[1], padding[0], padding[1], dilation[0], dilation[1], groups};
      const Gradients rest = gradients_in_python(grad, input, weight, geometry, call, accuracy, wanted);
      for (std::size_t i = 0; i < 3; ++i) {
        if (wanted[i]) result[i] = rest[i];
      }
    }
  } catch (const std::exception& error) {
    report_failure(error.what(), grad);
    result = {};
  }
  return {result[0].value_or(Tensor()), result[1].value_or(Tensor()), result[2].value_or(Tensor())};
}

}  // namespace
}  // namespace fastconv::ops

STABLE_TORCH_LIBRARY_FRAGMENT(fastconv, library) { library.def("layer_call(int layer, int mode) -> int[]"); }

STABLE_TORCH_LIBRARY_IMPL(fastconv, CompositeExplicitAutograd, library) {
  library.impl("layer_call", TORCH_BOX(&fastconv::ops::layer_call));
}

// The gradients take autograd's place, too, for which PyTorch's formula would take output_padding at its word.
#define FASTCONV_IMPLEMENT(DEVICE)                                                                    \
  STABLE_TORCH_LIBRARY_IMPL(aten, DEVICE, library) {                                                  \
    library.impl("convolution_overrideable", TORCH_BOX(&fastconv::ops::recorded_convolution));        \
    library.impl("convolution_backward_overrideable", TORCH_BOX(&fastconv::ops::recorded_gradients)); \
  }                                                                                                   \
  STABLE_TORCH_LIBRARY_IMPL(aten, Autograd##DEVICE, library) {                                        \
    library.impl("convolution_backward_overrideable", TORCH_BOX(&fastconv::ops::recorded_gradients)); \
  }
FASTCONV_IMPLEMENT(CPU)
FASTCONV_IMPLEMENT(CUDA)
