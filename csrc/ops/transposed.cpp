#include "ops/transposed.h"

#include <algorithm>
#include <utility>

#include "core/integers.h"
#include "core/names.h"
#include "ops/arguments.h"
#include "ops/convolution.h"

namespace fastconv::ops {
namespace {

constexpr std::int64_t most = max_extent / 2;  // of each of its terms, so that an output's size does not overflow

// Rows of the output, if there are any. padding, output_padding: below `most`.
std::int64_t output_size(std::int64_t rows, std::int64_t kernel, std::int64_t stride, std::int64_t padding,
                         std::int64_t output_padding, std::int64_t dilation) {
  return std::min(kernel_extent(rows, stride), most) + std::min(kernel_extent(kernel, dilation) - 1, most) -
         2 * padding + output_padding;
}

// Of a convolution's settings, an input and a weight of 4 dimensions.
Sizes4 output_sizes(const ConvProblem& p, const OutputPadding& extra, const Tensor& input, const Tensor& weight) {
  return {input.size(0), weight.size(1) * p.groups,
          output_size(input.size(2), weight.size(2), p.stride_h, p.pad_h, extra[0], p.dilation_h),
          output_size(input.size(3), weight.size(3), p.stride_w, p.pad_w, extra[1], p.dilation_w)};
}

void require_pair(const char* name, const IntList& values, std::int64_t least) {
  const bool fits = values.size() == 2 &&
                    std::ranges::all_of(values, [&](std::int64_t value) { return value >= least && value < most; });
  FASTCONV_REQUIRE(fits, name, " is ", to_text(values), "; expected two integers of at least ", least, ", below 2^61");
}

// Throws for what is no transposed convolution, as PyTorch does.
void require_transposed(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                        const IntList& stride, const IntList& padding, const IntList& output_padding,
                        const IntList& dilation, std::int64_t groups) {
  const IntList x = shape_of(input), w = shape_of(weight);
  FASTCONV_REQUIRE(x.size() == 4, "input has shape ", to_text(x), "; expected 4 dimensions [N, C, H, W]");
  FASTCONV_REQUIRE(w.size() == 4, "weight has shape ", to_text(w), "; expected 4 dimensions [C, K/groups, R, S]");
  require_same_kind(input, weight, "weight");
  require_pair("stride", stride, 1);
  require_pair("padding", padding, 0);
  require_pair("output_padding", output_padding, 0);
  require_pair("dilation", dilation, 1);
  for (std::size_t i = 0; i < 2; ++i) {
    FASTCONV_REQUIRE(output_padding[i] < std::max(stride[i], dilation[i]), "output_padding is ",
                     to_text(output_padding), "; expected less than the stride ", to_text(stride), " or the dilation ",
                     to_text(dilation));
  }
  FASTCONV_REQUIRE(groups > 0, "groups is ", groups, "; expected a positive integer");
  const std::string channels = text_of("weight has C = ", w[0], " input channels; expected ");
  FASTCONV_REQUIRE(w[0] > 0, channels, "at least 1");
  FASTCONV_REQUIRE(w[0] % groups == 0, channels, "a multiple of groups = ", groups);
  FASTCONV_REQUIRE(x[1] == w[0], "input has C = ", x[1], " channels; expected weight.shape[0] = ", w[0]);
  FASTCONV_REQUIRE(x[0] == 0 || (x[2] > 0 && x[3] > 0), "input has shape ", to_text(x),
                   "; expected H and W of at least 1");
  const Sizes4 y = output_sizes(settings_of(stride, padding, dilation, groups, {}),
                                {output_padding[0], output_padding[1]}, input, weight);
  FASTCONV_REQUIRE(y[2] >= 0 && y[3] >= 0 && std::max(y[2], y[3]) < most, "input has shape ", to_text(x),
                   "; expected an output of at least 0x0, not ", to_text({y[2], y[3]}));
  if (!bias) return;
  FASTCONV_REQUIRE(shape_of(*bias) == IntList(1, y[1]), "bias has shape ", to_text(shape_of(*bias)), "; expected ",
                   to_text(IntList(1, y[1])));
  require_same_kind(input, *bias, "bias");
}

// The operator.
Tensor conv_transpose2d(const Tensor& input, const Tensor& weight, std::optional<Tensor> bias, IntList stride,
                        IntList padding, IntList output_padding, IntList dilation, std::int64_t groups,
                        std::string algorithm, std::string precision, std::int64_t backend_flags,
                        std::optional<double> max_error, std::optional<std::int64_t> max_workspace) {
  require_transposed(input, weight, bias, stride, padding, output_padding, dilation, groups);
  ConvProblem settings = settings_of(stride, padding, dilation, groups, limits_of(max_error, max_workspace));
  const OutputPadding extra{output_padding[0], output_padding[1]};
  const AccuracyClass accuracy = accuracy_from_name(precision);
  std::string reason =
      "output_padding is " + to_text(output_padding) + "; expected less than the stride " + to_text(stride);
  if (const auto problem = transposed_problem(settings, extra, input, weight, bias, accuracy)) {
    const auto choice = choose_cached<choose_input_gradient>(algorithm, *problem, device_of(input));
    if (choice->method != InputGradientMethod::torch) {
      return input_gradient_by_convolutions(choice->method, algorithm_of(*choice, algorithm), *problem, input, weight,
                                            bias);
    }
    reason = choice->support.reason;
  }
  const Sizes4 y = output_sizes(settings, extra, input, weight);
  const bool is_empty = weight.numel() == 0 || std::ranges::find(y, 0) != y.end();
  if (!may_be_torch(algorithm) && !is_empty) {
    throw Unsupported("algorithm '" + algorithm + "' cannot serve conv_transpose2d of " + to_text(shape_of(input)) +
                      " by " + to_text(shape_of(weight)) + ": " + reason);
  }
  settings.dtype = dtype_of(input), settings.accuracy = effective_accuracy(settings.dtype, accuracy);
  settings.layout = suggests_channels_last(input) || suggests_channels_last(weight) ? Layout::nhwc : Layout::nchw;
  const auto guard = device_guard(input);
  remember_torch(settings.accuracy);
  return torch_convolution(input, weight, bias, settings, backend_flags, extra);
}

}  // namespace

std::optional<ConvProblem> transposed_problem(const ConvProblem& settings, const OutputPadding& output_padding,
                                              const Tensor& input, const Tensor& weight,
                                              const std::optional<Tensor>& bias, AccuracyClass accuracy) {
  const auto [extra_h, extra_w] = output_padding;
  const bool fits = input.dim() == 4 && weight.dim() == 4 && settings.pad_h < most && settings.pad_w < most &&
                    extra_h >= 0 && extra_h < settings.stride_h && extra_w >= 0 && extra_w < settings.stride_w &&
                    std::max(extra_h, extra_w) < most;
  if (!fits) return std::nullopt;
  const Sizes4 sizes = output_sizes(settings, output_padding, input, weight);
  if (sizes[2] == 0 || sizes[3] == 0) return std::nullopt;
  return input_gradient_problem(settings, sizes, input, weight, bias, accuracy);
}

Tensor general_transposed(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                          const ConvProblem& p, const OutputPadding& output_padding, const std::string& algorithm) {
  return conv_transpose2d(input, weight, bias, {p.stride_h, p.stride_w}, {p.pad_h, p.pad_w},
                          {output_padding.begin(), output_padding.end()}, {p.dilation_h, p.dilation_w}, p.groups,
                          algorithm, name_of(p.accuracy), integer_of_python("fastconv::backend_flags"),
                          p.limits.max_error > 0.0 ? std::optional(p.limits.max_error) : std::nullopt,
                          p.limits.max_workspace >= 0 ? std::optional(p.limits.max_workspace) : std::nullopt);
}

}  // namespace fastconv::ops

STABLE_TORCH_LIBRARY_FRAGMENT(fastconv, library) {
  // The second is what Inductor's code calls: without the first one's formula for gradients, which is Python's.
  for (const char* name : {"conv_transpose2d", "conv_transpose2d_compiled"}) {
    library.def((std::string(name) +
                 "(Tensor input, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, "
                 "SymInt[] output_padding, SymInt[] dilation, SymInt groups, str algorithm, "
                 "str precision, int backend_flags, float? max_error=None, int? max_workspace=None) -> "
                 "Tensor")
                    .c_str());
  }
}

FASTCONV_IMPLEMENT({
  library.impl("conv_transpose2d", TORCH_BOX(&fastconv::ops::conv_transpose2d));
  library.impl("conv_transpose2d_compiled", TORCH_BOX(&fastconv::ops::conv_transpose2d));
})
