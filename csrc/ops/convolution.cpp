// The steps of a convolution that operators and layers share.
#include "ops/convolution.h"

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "core/error.h"
#include "core/integers.h"
#include "core/names.h"
#include "ops/arguments.h"
#include "ops/aten.h"
#include "ops/debug.h"
#include "ops/kernel_table.h"
#include "ops/strided_copy.h"
#include "plan/registry.h"

namespace fastconv::ops {
namespace {

// Bits of the backend_flags argument: torch.backends.cudnn's switches, which PyTorch's own convolution takes per call.
constexpr std::int64_t flag_benchmark = 1, flag_deterministic = 2, flag_cudnn_enabled = 4;

// Only operators without Scalar arguments: the stable ABI's dispatcher cannot pass one.
Tensor add(const Tensor& a, const Tensor& b) { return torch::stable::subtract(a, b, -1.0); }

// aten::leaky_relu, which takes a Scalar: with one slope aten::prelu is the same. Half types are multiplied in float32,
// by a slope that is not rounded to them.
Tensor leaky_relu(const Tensor& y, double negative_slope) {
  const bool is_half = size_of(dtype_of(y)) == 2;
  const std::optional<ScalarType> dtype = is_half ? std::optional(ScalarType::Float) : std::nullopt;
  const std::int64_t one = 1;
  const Tensor slope = torch::stable::fill_(torch::stable::new_empty(y, {&one, 1}, dtype), negative_slope);
  const Tensor wide = is_half ? torch::stable::to(y, dtype) : y;
  const Tensor result = call_dispatcher("aten::prelu", "", wide, slope);
  return is_half ? torch::stable::to(result, y.scalar_type()) : result;
}

}  // namespace

Tensor activate(const Tensor& y, Activation activation, double negative_slope) {
  const auto relu = [](const Tensor& x) { return call_dispatcher("aten::relu", "", x); };
  switch (activation) {
    case Activation::none: return y;
    case Activation::relu: return relu(y);
    case Activation::relu6: return call_dispatcher("aten::relu6", "", y);
    case Activation::silu: return call_dispatcher("aten::silu", "", y);
    case Activation::leaky_relu: return leaky_relu(y, negative_slope);
    case Activation::gelu: return call_dispatcher("aten::gelu", "", y, std::string("none"));
    case Activation::gelu_tanh: return call_dispatcher("aten::gelu", "", y, std::string("tanh"));
    case Activation::hardswish: return call_dispatcher("aten::hardswish", "", y);
    case Activation::sigmoid: return call_dispatcher("aten::sigmoid", "", y);
  }
  return y;
}

namespace {

// input_activation(x * scale + shift), in float32 and then rounded to the input's type.
Tensor normed(const Tensor& x, const ConvProblem& problem, const Around& around) {
  const auto of_channels = [](const Tensor& values) {
    const std::int64_t shape[] = {values.size(0), 1, 1};
    return torch::stable::reshape(values, shape);
  };
  const Tensor scaled =
      call_dispatcher("aten::mul", "Tensor", torch::stable::to(x, ScalarType::Float), of_channels(*around.scale));
  const Tensor y = activate(add(scaled, of_channels(*around.shift)), problem.input_activation, 0.0);
  return torch::stable::to(y, x.scalar_type());
}

// Whether kernels may write there as they do into a tensor of their own.
bool is_written(const Tensor& out, const ConvProblem& problem) {
  const bool is_dense = problem.layout == Layout::nhwc ? is_channels_last(out) : out.is_contiguous();
  return is_dense && !problem.max_pool && reinterpret_cast<std::uintptr_t>(out.const_data_ptr()) % 16 == 0;
}

// Sets the sizes of the convolution of an input with a weight; whether there is one, and something to compute.
bool set_sizes(ConvProblem& problem, const Sizes4& input, const Sizes4& weight) {
  std::tie(problem.n, problem.c, problem.h, problem.w) = std::tuple_cat(input);
  problem.k = weight[0], problem.r = weight[2], problem.s = weight[3];
  const bool is_geometry = problem.stride_h > 0 && problem.stride_w > 0 && problem.dilation_h > 0 &&
                           problem.dilation_w > 0 && problem.groups > 0 && problem.pad_h >= 0 && problem.pad_w >= 0 &&
                           problem.pad_h < max_extent / 2 && problem.pad_w < max_extent / 2;
  return is_geometry && problem.n > 0 && problem.c > 0 && problem.h > 0 && problem.w > 0 && problem.k > 0 &&
         problem.r > 0 && problem.s > 0 && problem.k % problem.groups == 0 && problem.c == weight[1] * problem.groups &&
         problem.h + 2 * problem.pad_h >= kernel_extent(problem.r, problem.dilation_h) &&
         problem.w + 2 * problem.pad_w >= kernel_extent(problem.s, problem.dilation_w) &&
         (!problem.max_pool || (problem.p() >= 2 && problem.q() >= 2));
}

// What a call's tensors, of which `input` is the one that is read, say beside their sizes. channels_last: of the
// weight.
void set_kind(ConvProblem& problem, const Tensor& input, bool channels_last, const std::optional<Tensor>& bias,
              AccuracyClass accuracy) {
  problem.dtype = dtype_of(input);
  problem.accuracy = effective_accuracy(problem.dtype, accuracy);
  problem.layout = channels_last || suggests_channels_last(input) ? Layout::nhwc : Layout::nchw;
  problem.has_bias = bias.has_value();
}

bool is_bias(const std::optional<Tensor>& bias, std::int64_t size, const Tensor& input) {
  return !bias || (bias->dim() == 1 && bias->size(0) == size && is_alike(input, *bias));
}

}  // namespace

Sizes4 sizes_of(const Tensor& tensor) { return {tensor.size(0), tensor.size(1), tensor.size(2), tensor.size(3)}; }

bool is_alike(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.is_cuda() == b.is_cuda() &&
         a.get_device_index() == b.get_device_index();
}

bool has_shape(const Tensor& tensor, std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t d) {
  return tensor.dim() == 4 && tensor.size(0) == a && tensor.size(1) == b && tensor.size(2) == c && tensor.size(3) == d;
}

std::optional<ConvProblem> problem_of(const ConvProblem& settings, const Tensor& input, const Tensor& weight,
                                      const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
                                      AccuracyClass accuracy) {
  if (weight.dim() != 4 || !is_alike(input, weight)) return std::nullopt;
  return problem_of(settings, input, sizes_of(weight), suggests_channels_last(weight), bias, residual, accuracy);
}

std::optional<ConvProblem> problem_of(const ConvProblem& settings, const Tensor& input, const Sizes4& weight,
                                      bool channels_last, const std::optional<Tensor>& bias,
                                      const std::optional<Tensor>& residual, AccuracyClass accuracy) {
  if (input.dim() != 4) return std::nullopt;
  ConvProblem problem = settings;
  set_kind(problem, input, channels_last, bias, accuracy);
  problem.residual = residual_of(residual.has_value(), settings.residual == Residual::after, problem.activation);
  if (problem.max_pool && residual) return std::nullopt;
  if (!set_sizes(problem, sizes_of(input), weight)) return std::nullopt;
  if (!is_bias(bias, problem.k, input)) return std::nullopt;
  if (residual &&
      !(has_shape(*residual, problem.n, problem.k, problem.p(), problem.q()) && is_alike(input, *residual))) {
    return std::nullopt;
  }
  return problem;
}

std::optional<ConvProblem> input_gradient_problem(const ConvProblem& settings, const Sizes4& input_size,
                                                  const Tensor& grad, const Tensor& weight,
                                                  const std::optional<Tensor>& bias, AccuracyClass accuracy) {
  if (weight.dim() != 4 || !is_alike(grad, weight)) return std::nullopt;
  ConvProblem problem = settings;
  set_kind(problem, grad, suggests_channels_last(weight), std::nullopt, accuracy);  // its bias is not this one
  problem.residual = Residual::none;
  const bool fits = set_sizes(problem, input_size, sizes_of(weight)) &&
                    has_shape(grad, problem.n, problem.k, problem.p(), problem.q()) && is_bias(bias, problem.c, grad);
  return fits ? std::optional(problem) : std::nullopt;
}

std::string set_around(ConvProblem& problem, const Around& around, const std::optional<Tensor>& residual,
                       const Tensor& input) {
  if (const auto& out = around.out) {
    if (!has_shape(*out, problem.n, problem.y_k(), problem.y_p(), problem.y_q())) {
      const IntList expected{problem.n, problem.y_k(), problem.y_p(), problem.y_q()};
      return "out has shape " + to_text(shape_of(*out)) + "; expected " + to_text(expected);
    }
    if (std::string mistake = mistaken_kind(input, *out, "out"); !mistake.empty()) return mistake;
    if (problem.max_pool) return "max_pool is True; expected no out beside it";
    // Kernels read a residual where they write y, and some read it behind their first writes: where it does not lie so,
    // or is what is written, y is a tensor of its own.
    const std::int64_t channels = problem.layout == Layout::nhwc ? channels_around(*out) : 0;
    const bool lies_so = !residual || (channels_around(*residual) == channels && !may_overlap(*residual, *out));
    problem.y_channels = lies_so ? channels : 0;
  }
  if (around.scale.has_value() != around.shift.has_value()) {
    return "one of scale and shift is None; expected both or neither";
  }
  for (const auto& [name, values] : {std::pair{"scale", &around.scale}, std::pair{"shift", &around.shift}}) {
    if (!*values) continue;
    const Tensor& given = **values;
    if (given.dim() != 1 || given.size(0) != problem.c || given.scalar_type() != ScalarType::Float ||
        !given.is_contiguous()) {
      return std::string(name) + " has shape " + to_text(shape_of(given)) + "; expected contiguous float32 " +
             to_text(IntList(1, problem.c));
    }
    if (std::string mistake = mistaken_device(input, given, name); !mistake.empty()) return mistake;
  }
  problem.input_affine = around.scale.has_value();
  if (problem.input_affine && residual) {
    return "residual, scale and shift are given; expected a residual or the other two";
  }
  const std::string& name = around.input_activation;
  if (name != "none" && !(problem.input_affine && (name == "relu" || name == "relu6" || name == "silu"))) {
    return "input_activation is '" + name + "'; expected none, or with scale and shift relu, relu6 or silu";
  }
  problem.input_activation = activation_from_name(name);
  return {};
}

Tensor dense(const Tensor& weight) { return is_channels_last(weight) ? weight : in_layout(weight, Layout::nchw); }

Tensor torch_convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                         const ConvProblem& problem, std::int64_t backend_flags,
                         const std::optional<OutputPadding>& transposed) {
  const auto flag = [&](std::int64_t bit) { return (backend_flags & bit) != 0; };
  const OutputPadding extra = transposed.value_or(OutputPadding{});
  const Tensor y =
      call_dispatcher("aten::_convolution", "", input, weight, bias, IntList{problem.stride_h, problem.stride_w},
                      IntList{problem.pad_h, problem.pad_w}, IntList{problem.dilation_h, problem.dilation_w},
                      transposed.has_value(), IntList{extra.begin(), extra.end()}, problem.groups, flag(flag_benchmark),
                      flag(flag_deterministic), flag(flag_cudnn_enabled), problem.accuracy == AccuracyClass::tf32);
  return in_layout(y, problem.layout);
}

Tensor run_torch(const Tensor& input, const Tensor& weight, const ConvProblem& problem, const Arguments& arguments) {
  Tensor y = torch_convolution(input, weight, arguments.bias, problem, arguments.backend_flags);
  if (problem.residual == Residual::before) y = add(y, *arguments.residual);
  y = activate(y, problem.activation, arguments.negative_slope);
  if (problem.residual == Residual::after) y = add(y, *arguments.residual);
  y = in_layout(y, problem.layout);
  return problem.max_pool ? pooled(y, problem) : y;
}

Tensor shuffled(const Tensor& y, const ConvProblem& problem, const std::optional<Tensor>& out) {
  const std::int64_t channels = problem.y_k();
  const Tensor target = out ? *out : empty({problem.n, channels, problem.y_p(), problem.y_q()}, Layout::nhwc, y);
  const auto strides = [](const Tensor& t) { return std::array{t.stride(0), t.stride(2), t.stride(3), t.stride(1)}; };
  const auto [to_n, to_h, to_w, to_c] = strides(target);
  const auto [n, h, w, c] = strides(y);
  for (const std::int64_t a : {0, 1}) {
    for (const std::int64_t b : {0, 1}) {
      const std::int64_t window = problem.shifts() * (a * h + b * w);
      copy({target, a * to_h + b * to_w, {to_n, 2 * to_h, 2 * to_w, to_c}},
           {y, window + (2 * a + b) * channels * c, {n, h, w, c}}, {problem.n, problem.p(), problem.q(), channels});
    }
  }
  return target;
}

bool is_own(const Algorithm& algorithm) { return find_kernels(algorithm, DeviceType::cpu).run != nullptr; }

Layout layout_of(const Tensor& dense) { return dense.is_contiguous() ? Layout::nchw : Layout::nhwc; }

void pack(const Algorithm& algorithm, const ConvProblem& problem, const Tensor& weight, void* packed, void* snapshot,
          Runtime& runtime) {
  const PackArgs args{problem, weight.const_data_ptr(), layout_of(weight) == Layout::nhwc, packed, snapshot};
  find_kernels(algorithm, runtime.device().type).pack(args, runtime);
}

Tensor run_own(const Tensor& input, const Tensor* weight, const Tensor* packed, const Candidate& choice,
               const ConvProblem& asked, const std::optional<Tensor>& given_bias,
               const std::optional<Tensor>& given_residual, Runtime& runtime, const Around& around) {
  const ConvProblem problem = problem_of_kernels(choice.plan, asked);
  const DeviceInfo& device = runtime.device();
  const Kernels kernels = find_kernels(*choice.algorithm, device.type);
  const Tensor read = choice.plan.norms_apart ? normed(input, asked, around) : input;
  const Tensor x = problem.x_channels != 0 ? read : aligned(in_layout(read, problem.layout));
  std::optional<Tensor> bias, residual;
  if (given_bias) bias = aligned(in_layout(*given_bias, Layout::nchw));
  if (problem.has_residual()) {
    residual = problem.y_channels != 0 ? *given_residual : aligned(in_layout(*given_residual, problem.layout));
  }

  const bool pack_here = weight != nullptr && kernels.pack != nullptr;
  const Tensor filters = weight == nullptr ? *packed
                         : pack_here       ? dense(*weight)
                                           : aligned(in_layout(*weight, Layout::nchw));
  const std::size_t packed_bytes = pack_here ? align_bytes(choice.algorithm->packed_weight(problem, device).bytes) : 0;
  GuardedBytes workspace(packed_bytes + choice.plan.workspace_bytes, input);
  // A residual that lies where y goes may be read behind the first writes.
  const bool is_in_place = residual && around.out && may_overlap(*residual, *around.out);
  const bool is_direct = around.out && !choice.plan.activates_apart && !choice.plan.shuffles_apart &&
                         (problem.y_channels != 0 || (!is_in_place && is_written(*around.out, problem)));
  GuardedOutput output = is_direct ? GuardedOutput(*around.out) : GuardedOutput(input, problem);
  auto* base = static_cast<char*>(workspace.data());
  const void* weight_data = filters.const_data_ptr();
  if (pack_here) {
    pack(*choice.algorithm, problem, filters, base, nullptr, runtime);
    weight_data = base;
  }
  char* workspace_data = base + packed_bytes;
  const PlannedInput planned = bring_into_layout(choice.plan, problem, x.const_data_ptr(), workspace_data, runtime);
  const ConvArgs args{problem,
                      planned.x,
                      weight_data,
                      bias ? bias->const_data_ptr() : nullptr,
                      residual ? residual->const_data_ptr() : nullptr,
                      output.data(),
                      workspace_data,
                      choice.plan.kernel_plan.get(),
                      planned.layout,
                      problem.input_affine ? static_cast<const float*>(around.scale->const_data_ptr()) : nullptr,
                      problem.input_affine ? static_cast<const float*>(around.shift->const_data_ptr()) : nullptr};
  kernels.run(args, runtime);
  workspace.check("workspace", choice.algorithm->name);
  Tensor y = output.finish(choice.algorithm->name);
  if (choice.plan.activates_apart) {
    y = activate(y, asked.activation);
    if (asked.residual == Residual::after) y = in_layout(add(y, *given_residual), problem.layout);
  }
  if (choice.plan.shuffles_apart) return shuffled(y, asked, around.out);
  if (around.out && !is_direct) {
    Tensor target = *around.out;
    torch::stable::copy_(target, y);
    return target;
  }
  return choice.plan.pools_apart ? pooled(y, asked) : y;
}

bool admits_torch(const Tensor& tensor, AccuracyClass accuracy, bool admitted) {
  if (!tensor.is_cuda() || tensor.scalar_type() != ScalarType::Float) return true;
  if (admitted && accuracy == AccuracyClass::tf32) return true;
  const bool is_tf32 = integer_of_python("fastconv::allows_tf32") != 0;
  return is_tf32 == (accuracy == AccuracyClass::tf32);
}

std::int64_t integer_of_python(const char* name) {
  std::array<StableIValue, 1> stack{};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<std::int64_t>(stack[0]);
}

}  // namespace fastconv::ops
