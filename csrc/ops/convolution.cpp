// The steps of a convolution that operators and layers share.
#include "ops/convolution.h"

#include <array>
#include <memory>
#include <optional>
#include <string>

#include "core/error.h"
#include "core/integers.h"
#include "ops/arguments.h"
#include "ops/aten.h"
#include "ops/debug.h"
#include "ops/kernel_table.h"
#include "ops/max_pool.h"
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

Tensor activate(const Tensor& y, Activation activation, double negative_slope) {
  const auto relu = [](const Tensor& x) { return call_dispatcher("aten::relu", "", x); };
  switch (activation) {
    case Activation::none: return y;
    case Activation::relu: return relu(y);
    case Activation::relu6: return call_dispatcher("aten::relu6", "", y);
    case Activation::silu: return call_dispatcher("aten::silu", "", y);
    case Activation::leaky_relu: return leaky_relu(y, negative_slope);
  }
  return y;
}

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

}  // namespace

Tensor dense(const Tensor& weight) { return is_channels_last(weight) ? weight : in_layout(weight, Layout::nchw); }

Tensor run_torch(const Tensor& input, const Tensor& weight, const ConvProblem& problem, const Arguments& arguments) {
  const auto flag = [&](std::int64_t bit) { return (arguments.backend_flags & bit) != 0; };
  Tensor y =
      call_dispatcher("aten::_convolution", "", input, weight, arguments.bias, arguments.stride, arguments.padding,
                      arguments.dilation, false, IntList{0, 0}, problem.groups, flag(flag_benchmark),
                      flag(flag_deterministic), flag(flag_cudnn_enabled), problem.accuracy == AccuracyClass::tf32);
  if (problem.residual == Residual::before) y = add(y, *arguments.residual);
  y = activate(y, problem.activation, arguments.negative_slope);
  if (problem.residual == Residual::after) y = add(y, *arguments.residual);
  y = torch::stable::contiguous(y, memory_format(problem.layout));
  return problem.max_pool ? pooled(y, problem) : y;
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
  if (given_residual) residual = aligned(in_layout(*given_residual, problem.layout));

  const bool pack_here = weight != nullptr && kernels.pack != nullptr;
  const Tensor filters = weight == nullptr ? *packed
                         : pack_here       ? dense(*weight)
                                           : aligned(in_layout(*weight, Layout::nchw));
  const std::size_t packed_bytes = pack_here ? align_bytes(choice.algorithm->packed_weight(problem, device).bytes) : 0;
  GuardedBytes workspace(packed_bytes + choice.plan.workspace_bytes, input);
  const bool is_direct = around.out && (problem.y_channels != 0 || is_written(*around.out, problem));
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
  const Tensor y = output.finish(choice.algorithm->name);
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
