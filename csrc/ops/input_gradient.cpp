#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "core/gemm.h"
#include "core/names.h"
#include "ops/arguments.h"
#include "ops/aten.h"
#include "ops/convolution.h"
#include "ops/debug.h"
#include "ops/kernel_table.h"
#include "ops/strided_copy.h"
#include "plan/gradient_parts.h"

namespace fastconv::ops {
namespace {

// [residues * C, K/G, taps, taps], in the weight's own layout.
Tensor flipped_filter(const Tensor& given, const ConvProblem& problem, const FlippedTaps& rows,
                      const FlippedTaps& columns, Runtime& runtime) {
  const bool channels_last = !given.is_contiguous() && is_channels_last(given);
  const Tensor weight = channels_last ? given : in_layout(given, Layout::nchw);
  const Tensor flipped =
      empty({rows.residues * columns.residues * problem.c, problem.k_per_group(), rows.count, columns.count},
            channels_last ? Layout::nhwc : Layout::nchw, weight);
  flip_filter(problem, {problem, rows, columns, channels_last}, weight.const_data_ptr(), flipped.mutable_data_ptr(),
              runtime);
  return flipped;
}

// dX = dY W: the pixels of all images by the filters in NHWC, the filters by the pixels of each in NCHW.
Tensor multiply(const ConvProblem& problem, const Tensor& given_grad, const Tensor& given_weight, Runtime& runtime) {
  const Tensor grad = aligned(given_grad), weight = aligned(in_layout(given_weight, Layout::nchw));
  GuardedOutput output(grad, {problem.n, problem.c, problem.h, problem.w}, problem.layout);
  const std::int64_t pixels = problem.h * problem.w;
  GemmArgs gemm;
  gemm.k = problem.k;
  gemm.in = gemm.out = problem.dtype;
  gemm.tf32 = problem.accuracy == AccuracyClass::tf32;
  gemm.d = output.data();
  gemm.b_is_kn = true;
  if (problem.layout == Layout::nhwc) {
    gemm.m = problem.n * pixels, gemm.n = problem.c;
    gemm.a = grad.const_data_ptr(), gemm.lda = problem.k;
    gemm.b = weight.const_data_ptr(), gemm.ldb = problem.c;
    gemm.ldd = problem.c;
  } else {
    gemm.batch = problem.n, gemm.m = problem.c, gemm.n = pixels;
    gemm.a = weight.const_data_ptr(), gemm.lda = problem.c, gemm.a_is_km = true;
    gemm.b = grad.const_data_ptr(), gemm.ldb = pixels, gemm.stride_b = problem.k * pixels;
    gemm.ldd = pixels, gemm.stride_d = problem.c * pixels;
  }
  runtime.gemm(gemm);
  return output.finish(product_algorithm);
}

Tensor convolve(const std::string& algorithm, const ConvProblem& problem, const GradientParts& parts,
                const Tensor& grad, const Tensor& weight, const std::optional<Tensor>& bias, Runtime& runtime,
                bool admitted) {
  ConvProblem made = gradient_convolution(problem, parts, runtime.device().type);
  made.has_bias = bias.has_value();
  const auto choice = choose_cached<choose>(algorithm, made, runtime.device());
  remember(choice, made.accuracy);
  if (!bias && is_product_with_filter(choice->algorithm->name, problem, runtime.device().type)) {
    return multiply(problem, grad, weight, runtime);
  }
  const Tensor filter = flipped_filter(weight, problem, parts.rows.taps, parts.columns.taps, runtime);
  if (is_own(*choice->algorithm)) return run_own(grad, &filter, nullptr, *choice, made, bias, std::nullopt, runtime);
  const ConvProblem bare = without_shuffle(made);
  const Tensor y = admits_torch(grad, bare.accuracy, admitted)
                       ? in_layout(aten_convolution(grad, filter, bias, bare), bare.layout)
                       : general_convolution(grad, filter, bias, bare, algorithm);
  return made.shuffles() ? shuffled(y, made) : y;
}

// Elements that no tap reaches.
void fill(Tensor& result, const std::optional<Tensor>& bias) {
  if (!bias) {
    torch::stable::zero_(result);
  } else {
    const IntList strides{0, bias->stride(0), 0, 0};
    torch::stable::copy_(result, torch::stable::from_blob(bias->mutable_data_ptr(), result.sizes(), strides,
                                                          bias->device(), bias->scalar_type()));
  }
}

// Rows and columns begin, begin + step, ... of the target become those of the source that is not skipped.
void weave(const Tensor& target, std::array<std::int64_t, 2> begin, std::array<std::int64_t, 2> step,
           const Tensor& source, const GradientPart& rows, const GradientPart& columns) {
  const auto& [s0, s1, s2, s3] = std::array{target.stride(0), target.stride(1), target.stride(2), target.stride(3)};
  copy({target, begin[0] * s2 + begin[1] * s3, {s0, step[0] * s2, step[1] * s3, s1}},
       {source,
        rows.skip * source.stride(2) + columns.skip * source.stride(3),
        {source.stride(0), source.stride(2), source.stride(3), source.stride(1)}},
       {target.size(0), rows.rows, columns.rows, target.size(1)});
}

// One convolution per phase: no products with the zeros that a stride would put between rows.
Tensor by_phases(const std::string& algorithm, const ConvProblem& p, const Tensor& grad, const Tensor& weight,
                 const std::optional<Tensor>& bias, Runtime& runtime, bool admitted) {
  const auto h = GradientDimension::height(p), w = GradientDimension::width(p);
  std::optional<Tensor> result;
  const auto begin = [&](bool has_gaps) {
    result = empty({p.n, p.c, p.h, p.w}, p.layout, grad);
    if (has_gaps) fill(*result, bias);
  };
  const bool may_have_gaps =
      std::min(p.r, p.s) < std::max(p.stride_h, p.stride_w) || p.dilation_h > 1 || p.dilation_w > 1;
  for (std::int64_t y = 0; y < std::min(p.stride_h, p.h); ++y) {
    for (std::int64_t x = 0; x < std::min(p.stride_w, p.w); ++x) {
      const GradientPart rows = h.phase(y), columns = w.phase(x);
      if (rows.rows == 0 || columns.rows == 0) continue;
      const Tensor part = convolve(algorithm, p, {rows, columns}, grad, weight, bias, runtime, admitted);
      if (has_shape(part, p.n, p.c, p.h, p.w) && rows.rows == p.h && columns.rows == p.w) return part;
      if (!result) begin(may_have_gaps);
      weave(*result, {y, x}, {p.stride_h, p.stride_w}, part, rows, columns);
    }
  }
  if (!result) begin(true);  // the filter reaches padding only
  return *result;
}

// Residues with fewer taps than others multiply zeros, but the gradient is read once.
Tensor at_once(const std::string& algorithm, const ConvProblem& p, const Tensor& grad, const Tensor& weight,
               const std::optional<Tensor>& bias, Runtime& runtime, bool admitted) {
  const GradientParts parts = all_phases(p);
  const auto& [rows, columns, shuffle] = parts;
  std::optional<Tensor> biases;
  if (bias) biases = call_dispatcher("aten::repeat", "", *bias, IntList{p.stride_h * p.stride_w});
  const Tensor y = convolve(algorithm, p, parts, grad, weight, biases, runtime, admitted);
  if (shuffle != Shuffle::none) return y;
  const Tensor whole = empty({p.n, p.c, rows.rows * p.stride_h, columns.rows * p.stride_w}, p.layout, grad);
  const auto& [s0, s1, s2, s3] = std::array{whole.stride(0), whole.stride(1), whole.stride(2), whole.stride(3)};
  const std::int64_t channel = y.stride(1);
  copy({whole, 0, {s0, p.stride_h * s2, p.stride_w * s3, s2, s3, s1}},
       {y,
        rows.skip * y.stride(2) + columns.skip * y.stride(3),
        {y.stride(0), y.stride(2), y.stride(3), p.stride_w * p.c * channel, p.c * channel, channel}},
       {p.n, rows.rows, columns.rows, p.stride_h, p.stride_w, p.c});
  if (has_shape(whole, p.n, p.c, p.h, p.w)) return whole;
  const Tensor result = empty({p.n, p.c, p.h, p.w}, p.layout, grad);
  weave(result, {0, 0}, {1, 1}, whole, {{}, 1, 0, 0, p.h}, {{}, 1, 0, 0, p.w});
  return result;
}

}  // namespace

Tensor input_gradient_by_convolutions(InputGradientMethod method, const std::string& algorithm, const ConvProblem& p,
                                      const Tensor& grad, const Tensor& weight, const std::optional<Tensor>& bias,
                                      bool admitted) {
  const auto guard = device_guard(grad);
  const std::unique_ptr<Runtime> runtime = make_runtime(device_of(grad));
  const auto form = method == InputGradientMethod::together ? at_once : by_phases;
  return form(algorithm, p, in_layout(grad, p.layout), weight, bias, *runtime, admitted);
}

namespace {

Sizes4 sizes_of(const IntList& input_size) {
  FASTCONV_REQUIRE(input_size.size() == 4, "input_size is ", to_text(input_size), "; expected [N, C, H, W]");
  return {input_size[0], input_size[1], input_size[2], input_size[3]};
}

// What the planner takes, as plan/gradients.h names it: "torch", or by which of the operator's methods and algorithms.
// own: where PyTorch's would be one in another class.
std::string input_gradient_choice(const Tensor& grad, const Tensor& weight, IntList input_size, IntList stride,
                                  IntList padding, IntList dilation, std::int64_t groups, std::string algorithm,
                                  std::string precision, bool own, std::optional<double> max_error,
                                  std::optional<std::int64_t> max_workspace) {
  const ConvProblem settings = settings_of(stride, padding, dilation, groups, limits_of(max_error, max_workspace));
  const std::optional<ConvProblem> problem =
      input_gradient_problem(settings, sizes_of(input_size), grad, weight, {}, accuracy_from_name(precision));
  if (!problem) return name_of(InputGradientMethod::torch);
  const DeviceInfo& device = device_of(grad);
  return name_of(own ? *choose_cached<choose_own_input_gradient>(algorithm, *problem, device)
                     : *choose_cached<choose_input_gradient>(algorithm, *problem, device));
}

// The operator. input_size: [N, C, H, W].
Tensor input_gradient(const Tensor& grad, const Tensor& weight, std::optional<Tensor> bias, IntList input_size,
                      IntList stride, IntList padding, IntList dilation, std::int64_t groups, bool together,
                      std::string algorithm, std::string precision, std::optional<double> max_error,
                      std::optional<std::int64_t> max_workspace) {
  const ConvProblem settings = settings_of(stride, padding, dilation, groups, limits_of(max_error, max_workspace));
  const std::optional<ConvProblem> problem =
      input_gradient_problem(settings, sizes_of(input_size), grad, weight, bias, accuracy_from_name(precision));
  FASTCONV_REQUIRE(problem, "grad ", to_text(shape_of(grad)), " and weight ", to_text(shape_of(weight)),
                   " do not make an input gradient ", to_text(input_size));
  FASTCONV_REQUIRE(!together || may_be_together(*problem),
                   "together is True; expected one group, no dilation and a stride");
  const auto method = together ? InputGradientMethod::together : InputGradientMethod::phases;
  return input_gradient_by_convolutions(method, algorithm, *problem, grad, weight, bias);
}

}  // namespace
}  // namespace fastconv::ops

STABLE_TORCH_LIBRARY_FRAGMENT(fastconv, library) {
  library.def(
      "input_gradient(Tensor grad, Tensor weight, Tensor? bias, SymInt[] input_size, SymInt[] stride, SymInt[] "
      "padding, "
      "SymInt[] dilation, SymInt groups, bool together, str algorithm, str precision, float? max_error=None, "
      "int? max_workspace=None) -> Tensor");
  library.def(
      "input_gradient_choice(Tensor grad, Tensor weight, SymInt[] input_size, SymInt[] stride, SymInt[] padding, "
      "SymInt[] dilation, SymInt groups, str algorithm, str precision, bool own, float? max_error=None, "
      "int? max_workspace=None) -> str");
}

FASTCONV_IMPLEMENT({
  library.impl("input_gradient", TORCH_BOX(&fastconv::ops::input_gradient));
  library.impl("input_gradient_choice", TORCH_BOX(&fastconv::ops::input_gradient_choice));
})
