#include "ops/arguments.h"

#include <algorithm>
#include <cstdint>

#include "core/integers.h"
#include "core/names.h"

namespace fastconv::ops {

DType dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return DType::f32;
    case ScalarType::Half: return DType::f16;
    case ScalarType::BFloat16: return DType::bf16;
    default: return DType::other;
  }
}

std::string to_text(const std::vector<std::int64_t>& values) {
  std::string text = "[";
  for (std::size_t i = 0; i < values.size(); ++i) text += text_of(i == 0 ? "" : ", ", values[i]);
  return text + "]";
}

std::vector<std::int64_t> shape_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return {sizes.begin(), sizes.end()};
}

// PyTorch's definition (c10/core/MemoryFormat.h, is_channels_last_strides_2d_s4): size-1 dimensions decide nothing, and
// a tensor that is both is contiguous.
bool suggests_channels_last(const Tensor& tensor) {
  if (tensor.dim() != 4 || tensor.stride(1) == 0) return false;
  std::int64_t least = 0;
  for (int d : {1, 3, 2, 0}) {
    if (tensor.size(d) == 0 || tensor.stride(d) < least) return false;
    if (d == 0 && least == tensor.stride(1)) return false;
    least = tensor.stride(d) * (tensor.size(d) > 1 ? tensor.size(d) : 1);
  }
  return true;
}

MemoryFormat memory_format(Layout layout) {
  return layout == Layout::nhwc ? MemoryFormat::ChannelsLast : MemoryFormat::Contiguous;
}

bool is_channels_last(const Tensor& tensor) {
  std::int64_t expected = 1;
  for (int d : {1, 3, 2, 0}) {
    if (tensor.size(d) != 1 && tensor.stride(d) != expected) return false;
    expected *= tensor.size(d);
  }
  return true;
}

Tensor in_layout(const Tensor& tensor, Layout layout) {
  if (layout == Layout::nhwc ? is_channels_last(tensor) : tensor.is_contiguous()) return tensor;
  return torch::stable::contiguous(tensor, memory_format(layout));
}

std::int64_t channels_around(const Tensor& tensor) {
  if (tensor.dim() != 4 || tensor.numel() == 0 || tensor.stride(1) != 1) return 0;
  std::int64_t pitch = tensor.size(1), pixels = 1;  // pixels of a dimension's step
  bool is_known = false;
  for (const int d : {3, 2, 0}) {
    if (tensor.size(d) > 1) {
      if (!is_known) pitch = tensor.stride(d) / pixels, is_known = true;
      if (tensor.stride(d) != pixels * pitch) return 0;
    }
    pixels *= tensor.size(d);
  }
  const auto bytes = static_cast<std::int64_t>(size_of(dtype_of(tensor)));
  const bool is_aligned = !tensor.is_cuda() || (pitch * bytes % 16 == 0 &&
                                                reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % 16 == 0);
  return pitch > tensor.size(1) && is_aligned ? pitch : 0;
}

std::int64_t channels_in_memory(const Tensor& tensor) {
  const bool is_aligned = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
  return is_channels_last(tensor) && is_aligned ? tensor.size(1) : channels_around(tensor);
}

bool may_overlap(const Tensor& a, const Tensor& b) {
  const auto bytes = static_cast<std::int64_t>(size_of(dtype_of(a)));
  const auto begin = [](const Tensor& tensor) {
    return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()));
  };
  const auto end = [&](const Tensor& tensor) {
    std::int64_t last = 0;
    for (std::int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
    return begin(tensor) + (last + 1) * bytes;
  };
  if (a.numel() == 0 || b.numel() == 0 || begin(a) >= end(b) || begin(b) >= end(a)) return false;
  const std::int64_t pitch = channels_around(a) * bytes;
  if (pitch == 0 || channels_around(b) * bytes != pitch) return true;
  const std::int64_t width = a.size(1) * bytes, apart = ((begin(b) - begin(a)) % pitch + pitch) % pitch;
  return apart < width || pitch - apart < width;
}

Tensor aligned(const Tensor& tensor) {
  const bool is_aligned = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
  return is_aligned || !tensor.is_cuda() ? tensor : torch::stable::clone(tensor);
}

Limits limits_of(std::optional<double> max_error, std::optional<std::int64_t> max_workspace) {
  FASTCONV_REQUIRE(!max_error || *max_error >= 1.0, "max_error is ", max_error.value_or(0.0),
                   "; expected a number of at least 1, or None");
  FASTCONV_REQUIRE(!max_workspace || *max_workspace >= 0, "max_workspace is ", max_workspace.value_or(0),
                   "; expected bytes of at least 0, or None");
  return {max_error.value_or(0.0), max_workspace.value_or(-1)};
}

ConvProblem settings_of(const IntList& stride, const IntList& padding, const IntList& dilation, std::int64_t groups,
                        const Limits& limits) {
  ConvProblem settings;
  settings.stride_h = stride.at(0), settings.stride_w = stride.at(1);
  settings.pad_h = padding.at(0), settings.pad_w = padding.at(1);
  settings.dilation_h = dilation.at(0), settings.dilation_w = dilation.at(1);
  settings.groups = groups;
  settings.limits = limits;
  return settings;
}

void require_weight_shape(const IntList& shape) {
  FASTCONV_REQUIRE(shape.size() == 4, "weight has shape ", to_text(shape),
                   "; expected 4 dimensions [K, C/groups, R, S]");
  FASTCONV_REQUIRE(std::ranges::none_of(shape, [](std::int64_t size) { return size < 0; }), "weight has shape ",
                   to_text(shape), "; expected no negative size");
}

ConvProblem make_problem(const Tensor& input, const IntList& weight_shape, Layout layout, const Arguments& arguments) {
  FASTCONV_REQUIRE(input.dim() == 4, "input has shape ", to_text(shape_of(input)),
                   "; expected 4 dimensions [N, C, H, W]");
  require_weight_shape(weight_shape);
  FASTCONV_REQUIRE(arguments.stride.size() == 2 && arguments.stride[0] > 0 && arguments.stride[1] > 0, "stride is ",
                   to_text(arguments.stride), "; expected two positive integers");
  FASTCONV_REQUIRE(arguments.padding.size() == 2 && arguments.padding[0] >= 0 && arguments.padding[1] >= 0,
                   "padding is ", to_text(arguments.padding), "; expected two non-negative integers");
  FASTCONV_REQUIRE(arguments.dilation.size() == 2 && arguments.dilation[0] > 0 && arguments.dilation[1] > 0,
                   "dilation is ", to_text(arguments.dilation), "; expected two positive integers");
  ConvProblem problem =
      settings_of(arguments.stride, arguments.padding, arguments.dilation, arguments.groups, arguments.limits);
  problem.n = input.size(0), problem.c = input.size(1), problem.h = input.size(2), problem.w = input.size(3);
  problem.k = weight_shape[0], problem.r = weight_shape[2], problem.s = weight_shape[3];
  problem.dtype = dtype_of(input);
  problem.accuracy = effective_accuracy(problem.dtype, accuracy_from_name(arguments.precision));
  problem.layout = layout;
  problem.has_bias = arguments.bias.has_value();
  problem.activation = activation_from_name(arguments.activation);
  problem.residual = residual_of(arguments.residual.has_value(), arguments.residual_after, problem.activation);
  problem.negative_slope = static_cast<float>(arguments.negative_slope);
  problem.max_pool = arguments.max_pool;

  // As PyTorch: an empty batch and no input channels are problems, other empty inputs are mistakes.
  FASTCONV_REQUIRE(problem.n == 0 || problem.c == 0 || (problem.h > 0 && problem.w > 0), "input has shape ",
                   to_text(shape_of(input)), "; expected H and W of at least 1");
  FASTCONV_REQUIRE(problem.k > 0, "weight has K = 0 output channels; expected at least 1");
  const std::int64_t g = problem.groups;
  FASTCONV_REQUIRE(g > 0, "groups is ", g, "; expected a positive integer");
  FASTCONV_REQUIRE(problem.k % g == 0, "weight has K = ", problem.k,
                   " output channels; expected a multiple of groups = ", g);
  FASTCONV_REQUIRE(problem.c == weight_shape[1] * g, "input has C = ", problem.c,
                   " channels; expected weight.shape[1] * groups = ", weight_shape[1] * g);
  for (const std::int64_t padding : arguments.padding) {
    FASTCONV_REQUIRE(padding < max_extent / 2, "padding is ", to_text(arguments.padding), "; expected below 2^61");
  }
  FASTCONV_REQUIRE(problem.h + 2 * problem.pad_h >= kernel_extent(problem.r, problem.dilation_h) &&
                       problem.w + 2 * problem.pad_w >= kernel_extent(problem.s, problem.dilation_w),
                   "padded input is ", problem.h + 2 * problem.pad_h, " x ", problem.w + 2 * problem.pad_w,
                   "; expected at least the kernel's extent ", kernel_extent(problem.r, problem.dilation_h), " x ",
                   kernel_extent(problem.s, problem.dilation_w));
  if (arguments.bias) {
    FASTCONV_REQUIRE(shape_of(*arguments.bias) == IntList(1, problem.k), "bias has shape ",
                     to_text(shape_of(*arguments.bias)), "; expected ", to_text(IntList(1, problem.k)));
    require_same_kind(input, *arguments.bias, "bias");
  }
  if (arguments.residual) {
    const std::int64_t k = problem.c == 0 ? 0 : problem.k;  // what PyTorch makes of no input channels
    const IntList expected{problem.n, k, problem.p(), problem.q()};
    FASTCONV_REQUIRE(shape_of(*arguments.residual) == expected, "residual has shape ",
                     to_text(shape_of(*arguments.residual)), "; expected the output's ", to_text(expected));
    require_same_kind(input, *arguments.residual, "residual");
  }
  FASTCONV_REQUIRE(!problem.max_pool || !arguments.residual, "max_pool is True; expected no residual beside it");
  FASTCONV_REQUIRE(!problem.max_pool || (problem.p() >= 2 && problem.q() >= 2), "max_pool is True of an output of ",
                   to_text({problem.p(), problem.q()}), "; expected at least [2, 2]");
  return problem;
}

const DeviceInfo& device_of(const Tensor& tensor) {
  return query_device(tensor.is_cuda() ? DeviceType::cuda : DeviceType::cpu, tensor.get_device_index());
}

namespace {

std::string name_of_dtype(const Tensor& tensor) {
  if (tensor.scalar_type() == ScalarType::Double) return "float64";
  const DType dtype = dtype_of(tensor);
  return dtype == DType::other ? torch::headeronly::toString(tensor.scalar_type()) : name_of(dtype);
}

std::string name_of_device(const Tensor& tensor) {
  return tensor.is_cuda() ? "cuda:" + std::to_string(tensor.get_device_index()) : "cpu";
}

}  // namespace

std::string mistaken_device(const Tensor& input, const Tensor& other, const std::string& name,
                            const std::string& input_name) {
  if (other.is_cuda() == input.is_cuda() && other.get_device_index() == input.get_device_index()) return {};
  return name + " is on " + name_of_device(other) + "; expected " + input_name + "'s " + name_of_device(input);
}

std::string mistaken_kind(const Tensor& input, const Tensor& other, const std::string& name,
                          const std::string& input_name) {
  if (other.scalar_type() == input.scalar_type()) return mistaken_device(input, other, name, input_name);
  return name + " is " + name_of_dtype(other) + "; expected " + input_name + "'s " + name_of_dtype(input);
}

void require_same_device(const Tensor& input, const Tensor& other, const char* name) {
  const std::string mistake = mistaken_device(input, other, name);
  FASTCONV_REQUIRE(mistake.empty(), mistake);
}

void require_same_kind(const Tensor& input, const Tensor& other, const char* name, const char* input_name) {
  const std::string mistake = mistaken_kind(input, other, name, input_name);
  FASTCONV_REQUIRE(mistake.empty(), mistake);
}

std::optional<torch::stable::accelerator::DeviceGuard> device_guard(const Tensor& tensor) {
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
  if (tensor.is_cuda()) guard.emplace(tensor.get_device_index());
  return guard;
}

}  // namespace fastconv::ops
