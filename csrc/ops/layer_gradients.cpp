// A layer's call as autograd knows it, and its gradients: those that algorithms of ours compute, and what is left to
// PyTorch in one call of its own operator.
//
// The call is aten::_mps_convolution, PyTorch's for a backend that brings its own convolution. It has no kernels for
// CPU and CUDA, and what no operator of the stable ABI can have: autograd's record of it is C++, and so is the way to
// it from Python, a function of `torch`, which takes half as long as one of `torch.ops`
// (docs/log/100-training-host.md). Its groups are a number that layer_call has returned, which stands for a layer and a
// LayerCall; its lists are empty.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <array>
#include <atomic>
#include <exception>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>

#include "core/names.h"
#include "ops/arguments.h"
#include "ops/aten.h"
#include "ops/compiled_settings.h"
#include "ops/convolution.h"
#include "ops/layer.h"
#include "ops/transposed.h"

namespace fastconv::ops {
namespace {

// How a layer is called, without the layer, which may be gone when the gradients are computed.
struct LayerCall {
  CallMode mode;
  std::int64_t mode_bits;
  LayerSettings settings;
};

// The calls that there have been, by number: few, since layers that are called alike share one. They are never removed,
// and read without a lock. A code has the layer's number, and below it the call's.
class LayerCalls {
 public:
  static constexpr int bits = 14;

  std::int64_t number_of(const LayerCall& call) {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < count_; ++i) {
      const LayerCall& known = *calls_[i].load(std::memory_order_relaxed);
      if (known.mode_bits == call.mode_bits && known.settings == call.settings) {
        return static_cast<std::int64_t>(i);
      }
    }
    FASTCONV_REQUIRE(count_ < calls_.size(), "layers are called in more than ", count_, " ways");
    calls_[count_].store(new LayerCall(call), std::memory_order_release);
    return static_cast<std::int64_t>(count_++);
  }

  const LayerCall& at(std::int64_t code) const {
    const std::size_t number = static_cast<std::size_t>(code) % calls_.size();
    const LayerCall* const found = code >> bits > 0 ? calls_[number].load(std::memory_order_acquire) : nullptr;
    FASTCONV_REQUIRE(found != nullptr, "_mps_convolution is called with groups ", code,
                     "; expected what layer_call returned");
    return *found;
  }

 private:
  std::array<std::atomic<const LayerCall*>, 1 << bits> calls_{};
  std::mutex mutex_;
  std::size_t count_ = 0;
};

LayerCalls& layer_calls() {
  static LayerCalls* const calls = new LayerCalls;  // never destroyed: threads may outlive static objects
  return *calls;
}

// The code of a call of a layer. mode: a CallMode.
std::int64_t layer_call(std::int64_t layer, std::int64_t mode) {
  return (layer << LayerCalls::bits) + layer_calls().number_of({CallMode(mode), mode, layer_at(layer).settings()});
}

// Layer::forward without a residual, which has a value always. A status of `pack` or `stream` says what Python
// should do before the next call: autograd has recorded this one, so that it cannot be repeated.
Tensor recorded_convolution(const Tensor& input, const Tensor& weight, std::optional<Tensor> bias, IntList, IntList,
                            IntList, std::int64_t code) {
  const LayerCall& call = layer_calls().at(code);
  Layer& layer = layer_at(code >> LayerCalls::bits);
  CallMode mode = call.mode;
  std::optional<Tensor> y = layer.forward(input, weight, bias, std::nullopt, mode, last_status);
  if (y) return *y;
  if (last_status == CallStatus::pack || last_status == CallStatus::stream) {
    mode.once = true;
    CallStatus status{};
    y = layer.forward(input, weight, bias, std::nullopt, mode, status);
    if (y) return *y;
  }
  const auto& [algorithm, settings, transposed] = call.settings;
  ConvProblem problem = settings;
  problem.accuracy = mode.accuracy;
  return transposed ? general_transposed(input, weight, bias, problem, *transposed, algorithm)
                    : general_convolution(input, weight, bias, problem, algorithm);
}

// Of input, weight and bias.
using Gradients = std::array<std::optional<Tensor>, 3>;
using Wanted = std::array<bool, 3>;

const std::string any_algorithm = "auto";

// What is wanted and has no value is Python's to compute: PyTorch's in another class than its switch says.
// All tensors are taken in the layout of the call's output.
Gradients gradients_here(const Tensor& grad, const Tensor& input, const Tensor& weight, const LayerSettings& layer,
                         const CallMode& mode, const Wanted& wanted) {
  Gradients result;
  const auto& [name, settings, transposed] = layer;
  if (grad.dim() != 4 || !is_alike(grad, input)) return result;
  // Of the convolution whose derivatives are asked for. A transposed one is the input gradient of such: what goes in
  // here comes out there.
  const Tensor &x = transposed ? grad : input, &y = transposed ? input : grad;
  const std::optional<ConvProblem> problem =
      transposed ? input_gradient_problem(settings, {grad.size(0), grad.size(1), grad.size(2), grad.size(3)}, input,
                                          weight, {}, mode.accuracy)
                 : problem_of(settings, input, weight, {}, {}, mode.accuracy);
  if (!problem || !has_shape(y, problem->n, problem->k, problem->p(), problem->q())) return result;
  // A name says what computes a transposed convolution; its derivatives are others, which that may not fit.
  const std::string& algorithm = transposed && name != "torch" ? any_algorithm : name;
  const DeviceInfo& device = device_of(grad);
  Wanted by_torch{false, false, wanted[2]};
  bool admitted = true;
  const auto admits = [&] { return admitted = admits_torch(grad, mode.accuracy, mode.admits_torch); };
  if (wanted[1]) {
    auto choice = choose_cached<choose_weight_gradient>(algorithm, *problem, device);
    if (choice->algorithm == nullptr && !admits()) {
      choice = choose_cached<choose_own_weight_gradient>(algorithm, *problem, device);
    }
    by_torch[1] = choice->algorithm == nullptr;
    if (!by_torch[1]) result[1] = run_weight_gradient(x, y, *choice, *problem);
  }
  if (wanted[0] && transposed) {
    ConvProblem packing = *problem;
    packing.packs = true;
    const auto choice = choose_cached<choose>(algorithm, packing, device);
    by_torch[0] = !is_own(*choice->algorithm);
    if (by_torch[0]) {
      admits();
    } else {
      const auto guard = device_guard(grad);
      result[0] = run_own(grad, &weight, nullptr, *choice, *problem, {}, {}, *make_runtime(device));
    }
  } else if (wanted[0]) {
    auto plan = choose_cached<choose_input_gradient>(algorithm, *problem, device);
    if (plan->method == InputGradientMethod::torch && !admits()) {
      plan = choose_cached<choose_own_input_gradient>(algorithm, *problem, device);
    }
    by_torch[0] = plan->method == InputGradientMethod::torch;
    if (!by_torch[0]) {
      // Of the plan's algorithm, even where one is named: it was named for the forward.
      result[0] = input_gradient_by_convolutions(plan->method, plan->algorithm, *problem, grad, weight, std::nullopt,
                                                 mode.admits_torch);
    }
  }
  if ((by_torch[0] || by_torch[1]) && admitted) {
    const std::array<Tensor, 3> found = aten_convolution_backward(grad, input, weight, settings, by_torch, transposed);
    for (std::size_t i = 0; i < 3; ++i) {
      if (by_torch[i]) result[i] = found[i];
    }
  } else if (by_torch[2]) {
    result[2] = call_dispatcher("aten::sum", "dim_IntList", grad, std::optional(IntList{0, 2, 3}), false,
                                std::optional<ScalarType>());
  }
  return result;
}

// recorded: a failure is raised at the end of the backward pass (report_failure), and has no gradients; else here.
Gradients gradients_in_python(const Tensor& grad, const Tensor& input, const Tensor& weight,
                              const LayerSettings& settings, AccuracyClass accuracy, const Wanted& wanted,
                              bool recorded) {
  using torch::stable::detail::from;
  const std::int64_t bits = wanted[0] + 2 * wanted[1] + 4 * wanted[2] + 8 * recorded;
  const ConvProblem& p = settings.problem;
  const IntList geometry{p.stride_h, p.stride_w, p.pad_h, p.pad_w, p.dilation_h, p.dilation_w, p.groups};
  std::array<StableIValue, 10> stack{from(grad),
                                     from(input),
                                     from(weight),
                                     from(geometry),
                                     from(settings.transposed.has_value()),
                                     from(settings.algorithm),
                                     from(std::string(name_of(accuracy))),
                                     from(p.limits.max_error),
                                     from(p.limits.max_workspace),
                                     from(bits)};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("fastconv::gradients_in_python", "", stack.data(), TORCH_ABI_VERSION));
  using torch::stable::detail::to;
  return {to<std::optional<Tensor>>(stack[0]), to<std::optional<Tensor>>(stack[1]),
          to<std::optional<Tensor>>(stack[2])};
}

// What has no value yet of what is wanted.
void complete_in_python(Gradients& result, const Tensor& grad, const Tensor& input, const Tensor& weight,
                        const LayerSettings& settings, AccuracyClass accuracy, Wanted wanted, bool recorded) {
  for (std::size_t i = 0; i < 3; ++i) wanted[i] = wanted[i] && !result[i];
  if (!wanted[0] && !wanted[1] && !wanted[2]) return;
  const Gradients rest = gradients_in_python(grad, input, weight, settings, accuracy, wanted, recorded);
  for (std::size_t i = 0; i < 3; ++i) {
    if (wanted[i]) result[i] = rest[i];
  }
}

// An exception that leaves a backward pass from here is a RuntimeError, whatever it was. Python raises it as what it
// was, at the end of the pass, which goes on without these gradients.
void report_failure(const std::string& message, const Tensor& grad) {
  using torch::stable::detail::from;
  std::array<StableIValue, 2> stack{from(message), from(grad)};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("fastconv::backward_failed", "", stack.data(), TORCH_ABI_VERSION));
}

// Not of a fake tensor, with which torch.compile traces a backward pass (compiled autograd). Where its sizes are
// symbols, asking throws.
bool has_memory(const Tensor& tensor) {
  try {
    return tensor.const_data_ptr() != nullptr;
  } catch (const std::exception&) {
    return false;
  }
}

// dx, dw and db; undefined tensors where they are not wanted.
std::tuple<Tensor, Tensor, Tensor> recorded_gradients(const Tensor& input, const Tensor& grad, const Tensor& weight,
                                                      IntList, IntList, IntList, std::int64_t code,
                                                      std::vector<bool> mask) {
  const LayerCall& call = layer_calls().at(code);
  const Wanted wanted{mask.at(0), mask.at(1), mask.at(2)};
  Gradients result;
  try {
    // Gradients that are differentiated again, or traced, are made of operators that autograd knows.
    if (!aoti_torch_grad_mode_is_enabled() && has_memory(grad)) {
      result = gradients_here(grad, input, weight, call.settings, call.mode, wanted);
    }
    complete_in_python(result, grad, input, weight, call.settings, call.mode.accuracy, wanted, true);
  } catch (const std::exception& error) {
    report_failure(error.what(), grad);
    result = {};
  }
  return {result[0].value_or(Tensor()), result[1].value_or(Tensor()), result[2].value_or(Tensor())};
}

// Of a backward pass that nobody differentiates.
Gradients gradients_of(const Tensor& grad, const Tensor& input, const Tensor& weight, const CompiledSettings& settings,
                       const Wanted& wanted) {
  const LayerSettings layer{settings.algorithm, settings.problem, std::nullopt};
  CallMode mode(0);  // what PyTorch's gradient computes in is its switch's to say
  mode.accuracy = settings.accuracy;
  Gradients result = gradients_here(grad, input, weight, layer, mode, wanted);
  complete_in_python(result, grad, input, weight, layer, mode.accuracy, wanted, false);
  return result;
}

Layout layout_beside(const Tensor& grad, const Tensor& other) {
  return suggests_channels_last(grad) || suggests_channels_last(other) ? Layout::nhwc : Layout::nchw;
}

// dx [N, C, H, W] and dw [K, C/groups, R, S] of grad [N, K, P, Q]: in compiled code the only call of a layer's backward
// pass. settings: as conv2d_compiled's.
std::tuple<Tensor, Tensor> conv2d_gradients(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                            std::string settings) {
  const Gradients found = gradients_of(grad, input, weight, settings_of_text(settings, 7), {true, true, false});
  return {in_layout(*found[0], layout_beside(grad, weight)), in_layout(*found[1], layout_beside(grad, input))};
}

// dw alone. settings: as conv2d_packed_compiled's, with the weight's shape.
Tensor conv2d_weight_gradient_compiled(const Tensor& input, const Tensor& grad, std::string settings) {
  const CompiledSettings& s = settings_of_text(settings, 11);
  const Layout layout = layout_beside(grad, input);
  const Tensor like = empty({s.sizes[0], s.sizes[1], s.sizes[2], s.sizes[3]}, layout, grad);
  return in_layout(*gradients_of(grad, input, like, s, {false, true, false})[1], layout);
}

}  // namespace
}  // namespace fastconv::ops

STABLE_TORCH_LIBRARY_FRAGMENT(fastconv, library) {
  library.def("layer_call(int layer, int mode) -> int");
  library.def("conv2d_gradients(Tensor grad, Tensor input, Tensor weight, str settings) -> (Tensor, Tensor)");
  library.def("conv2d_weight_gradient_compiled(Tensor input, Tensor grad, str settings) -> Tensor");
}

FASTCONV_IMPLEMENT({
  library.impl("conv2d_gradients", TORCH_BOX(&fastconv::ops::conv2d_gradients));
  library.impl("conv2d_weight_gradient_compiled", TORCH_BOX(&fastconv::ops::conv2d_weight_gradient_compiled));
})

STABLE_TORCH_LIBRARY_IMPL(fastconv, CompositeExplicitAutograd, library) {
  library.impl("layer_call", TORCH_BOX(&fastconv::ops::layer_call));
}

// The gradients take autograd's place, too, for which PyTorch's formula would take the lists at their word.
#define FASTCONV_RECORD(DEVICE)                                                              \
  STABLE_TORCH_LIBRARY_IMPL(aten, DEVICE, library) {                                         \
    library.impl("_mps_convolution", TORCH_BOX(&fastconv::ops::recorded_convolution));       \
    library.impl("mps_convolution_backward", TORCH_BOX(&fastconv::ops::recorded_gradients)); \
  }                                                                                          \
  STABLE_TORCH_LIBRARY_IMPL(aten, Autograd##DEVICE, library) {                               \
    library.impl("mps_convolution_backward", TORCH_BOX(&fastconv::ops::recorded_gradients)); \
  }
FASTCONV_RECORD(CPU)
FASTCONV_RECORD(CUDA)
