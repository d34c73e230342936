// PyTorch's own convolution: always fits, so `auto` always answers. Its run function lives in csrc/ops (it needs
// torch).
#include <algorithm>
#include <cmath>

#include "core/algorithm.h"
#include "core/cost.h"
#include "core/roundoffs.h"

namespace fastconv::algos::torch {
namespace {

// The yardstick of all others: cuDNN's direct sum, though its search may take an FFT or a Winograd algorithm, and
// oneDNN's in its worse layout. A 1x1 kernel is a matrix product for oneDNN, which sums in blocks of 256.
double roundoffs(const ConvProblem& problem, const DeviceInfo& device) {
  const double terms = reduction_length(problem);
  if (device.type == DeviceType::cuda) {
    return problem.accuracy == AccuracyClass::tf32 ? tf32_products : serial_sum(terms);
  }
  return problem.r * problem.s == 1 ? blocked_sum(terms, 256.0) : serial_sum(terms);
}

// A sum over all output pixels.
double weight_gradient_roundoffs(const ConvProblem& problem, const DeviceInfo& device) {
  const bool tf32 = device.type == DeviceType::cuda && problem.accuracy == AccuracyClass::tf32;
  return tf32 ? tf32_products : serial_sum(gradient_length(problem));
}

Support supports(const ConvProblem&, const DeviceInfo&) { return Support::yes(); }

// oneDNN, float32: products of 1x1 kernels and of larger ones in either layout, with so many channels at half their
// rate; and passes over input and output, at the memory's rate, that are not hidden.
struct OneDnn {
  double launch, nchw, nhwc, nchw_1x1, nhwc_1x1, half_channels, passes;
};
// AVX-512: fitted to 282 rows of VGG-16, ResNet-50, DenseNet-161 and YOLOv3 (docs/log/71-cpu-avx512.md).
constexpr CpuRates<OneDnn> onednn{{10.0, 2.2, 2.2, 2.2, 2.2, 0.0, 0.0}, {10.0, 1.33, 1.34, 0.6, 1.12, 0.0, 0.0}};

double cpu_cost_us(const ConvProblem& problem, const DeviceInfo& device) {
  const OneDnn& rates = onednn.of(device);
  const bool nhwc = problem.layout == Layout::nhwc, product = problem.r * problem.s == 1;
  const double share = product ? (nhwc ? rates.nhwc_1x1 : rates.nchw_1x1) : (nhwc ? rates.nhwc : rates.nchw);
  const double channels = static_cast<double>(problem.c_per_group());
  const double filling = channels / (channels + rates.half_channels);
  const double bytes = problem.compulsory_bytes();
  return rates.launch + memory_us(rates.passes * bytes, 1.0, device) +
         std::max(fp32_us(problem.direct_flops(), share * filling, device), memory_us(bytes, 1.0, device));
}

// cuDNN with benchmark=True: a launch and what a block waits for, its walk over the reduction; the products, filters
// filled up to a tile's; input and output read and written, conversions to NHWC among them.
struct Cudnn {
  double launch;         // us
  double term;           // us for each 1000 terms of the reduction
  double products;       // times their time at the device's sustained rate
  double input, output;  // times their bytes' time at the memory's
};

// Fitted to an H200's times of the layer sets and of two thirds of a corpus of networks (docs/log/79-regret-h200.md).
namespace cudnn {
// FP32 arithmetic, which class `fp32` gets as well.
constexpr Cudnn plain_1x1[] = {{10.5, 32.0, 1.19, 1.4, 4.0}, {10.5, 24.0, 1.13, 0.2, 1.0}};  // NHWC, NCHW
constexpr Cudnn plain_3x3[] = {{10.5, 25.4, 0.58, 0.0, 19.6},
                               {8.0, 28.0, 0.46, 0.0, 18.5}};  // stride 1: Winograd's too
constexpr Cudnn plain[] = {{12.8, 25.7, 1.06, 5.2, 0.0}, {12.8, 21.6, 0.93, 3.2, 0.0}};
constexpr Cudnn plain_first[] = {{9.6, 54.0, 1.96, 0.5, 2.1}, {10.0, 0.0, 1.96, 1.5, 0.8}};
// Tensor cores. Unaligned: channels that are no whole 16 bytes, which are padded before, or computed otherwise.
constexpr Cudnn tf32_1x1[] = {{8.3, 2.5, 1.39, 0.33, 1.12}, {10.6, 5.0, 2.46, 0.0, 1.0}};
constexpr Cudnn tf32[] = {{10.5, 2.4, 1.50, 0.21, 0.58}, {14.5, 5.0, 1.49, 2.35, 2.95}};
constexpr Cudnn tf32_first[] = {{14.6, 0.0, 8.6, 0.0, 0.82}, {18.0, 0.0, 8.6, 2.0, 2.8}};
constexpr Cudnn half_1x1[] = {{7.8, 0.6, 0.57, 0.26, 1.26}, {6.7, 0.0, 1.05, 0.29, 0.91}};
constexpr Cudnn half[] = {{10.1, 1.15, 0.81, 0.0, 0.58}, {14.0, 3.9, 0.78, 3.05, 4.85}};
constexpr Cudnn half_first[] = {{12.7, 0.0, 0.0, 0.0, 4.4}, {9.8, 0.0, 0.0, 0.0, 8.2}};
constexpr Cudnn unaligned_1x1[] = {{6.4, 9.6, 8.2, 5.1, 1.1}, {7.2, 6.6, 0.91, 2.0, 7.0}};
constexpr Cudnn unaligned[] = {{17.0, 1.15, 0.81, 0.6, 10.0}, {17.0, 3.9, 0.81, 3.0, 10.0}};
// Groups of 4, 8, 16 or 32 channels and filters have kernels; others take their time one after the other.
constexpr Cudnn few_grouped[] = {{8.5, 3.4, 0.95, 0.0, 0.0}, {16.0, 3.4, 1.95, 0.0, 0.0}};
constexpr Cudnn half_grouped[] = {{10.0, 1.0, 5.6, 0.0, 0.0}, {14.0, 1.0, 5.6, 1.0, 1.0}};
constexpr Cudnn tf32_grouped[] = {{10.0, 1.0, 9.0, 0.0, 0.0}, {14.0, 1.0, 9.0, 1.0, 1.0}};
constexpr Cudnn plain_grouped[] = {{10.0, 1.0, 2.0, 0.0, 0.0}, {10.0, 1.0, 1.3, 0.0, 0.0}};
constexpr double group_us = 2.0;
// Depthwise, in FP32 arithmetic whatever the class.
constexpr Cudnn depthwise_3x3[] = {{5.4, 55.0, 6.1, 0.34, 0.0}, {8.0, 100.0, 14.3, 1.1, 1.1}};
constexpr Cudnn depthwise[] = {{5.4, 55.0, 9.0, 0.34, 0.0}, {8.0, 100.0, 14.3, 1.1, 1.1}};
constexpr Cudnn half_depthwise[] = {{8.2, 137.0, 2.9, 0.89, 0.0}, {6.7, 37.0, 14.5, 2.15, 0.0}};
}  // namespace cudnn

bool has_grouped_kernel(const ConvProblem& problem) {
  const std::int64_t channels = problem.c_per_group();
  const bool tensor_cores = problem.dtype != DType::f32 || problem.accuracy == AccuracyClass::tf32;
  return tensor_cores && channels == problem.k_per_group() &&
         (channels == 4 || channels == 8 || channels == 16 || channels == 32);
}

const Cudnn* cudnn_times(const ConvProblem& problem) {
  const bool half = problem.dtype != DType::f32, tf32 = problem.accuracy == AccuracyClass::tf32;
  const bool product = problem.r * problem.s == 1, first = problem.c <= 4;
  if (problem.groups > 1 && problem.c_per_group() == 1) {
    return half ? cudnn::half_depthwise : problem.r * problem.s <= 9 ? cudnn::depthwise_3x3 : cudnn::depthwise;
  }
  if (!half && !tf32) {
    if (problem.groups > 1) return cudnn::plain_grouped;
    if (first) return cudnn::plain_first;
    if (product) return cudnn::plain_1x1;
    const bool winograd = problem.r == 3 && problem.s == 3 && problem.stride_h == 1 && problem.stride_w == 1;
    return winograd ? cudnn::plain_3x3 : cudnn::plain;
  }
  if (problem.groups > 1) {
    return has_grouped_kernel(problem) ? cudnn::few_grouped : half ? cudnn::half_grouped : cudnn::tf32_grouped;
  }
  if (first) return half ? cudnn::half_first : cudnn::tf32_first;
  const auto in_pieces = [&](std::int64_t count) {  // of 16 bytes
    return count * static_cast<std::int64_t>(size_of(problem.dtype)) % 16 == 0;
  };
  const bool padded = !in_pieces(problem.c) || (!product && !in_pieces(problem.k));
  // A product of images as they are, if their rows are whole pieces of 16 bytes.
  const bool converts = problem.layout == Layout::nchw && product &&
                        (problem.stride_h != 1 || problem.stride_w != 1 || problem.pad_h + problem.pad_w != 0 ||
                         !in_pieces(problem.h * problem.w));
  if (padded || converts) return product ? cudnn::unaligned_1x1 : cudnn::unaligned;
  if (half) return product ? cudnn::half_1x1 : cudnn::half;
  return product ? cudnn::tf32_1x1 : cudnn::tf32;
}

double cuda_cost_us(const ConvProblem& problem, const DeviceInfo& device) {
  const bool half = problem.dtype != DType::f32, tf32 = problem.accuracy == AccuracyClass::tf32;
  const bool first = problem.groups == 1 && problem.c <= 4;
  const double terms = static_cast<double>(problem.c_per_group() * problem.r * problem.s);
  if (half && first && problem.r * problem.s > 9) {  // large kernels; for 64 filters of 7x7 in FP16 cuDNN has one
    const bool fits = problem.accuracy == AccuracyClass::fp16 && problem.k <= 64 && problem.r * problem.s <= 49;
    const double share = problem.accuracy == AccuracyClass::bf16 ? 0.045 : fits ? 0.137 : 0.056;
    const double conversions = problem.layout == Layout::nhwc ? 0.0 : 7.5;
    return 8.5 + 0.09 * terms + tensor_us(problem.direct_flops(), share, device) + conversions;
  }
  const Cudnn& times = cudnn_times(problem)[problem.layout == Layout::nhwc ? 0 : 1];
  const bool tensor_cores = half || tf32, depthwise = problem.groups > 1 && problem.c_per_group() == 1;
  const double filters = static_cast<double>(problem.k_per_group());
  const double tile = depthwise ? 1.0 : tensor_cores ? 128.0 : 32.0;
  const double flops = problem.direct_flops() * std::ceil(filters / tile) * tile / filters;
  const double size = static_cast<double>(size_of(problem.dtype));
  const double input = size * static_cast<double>(problem.n * problem.c * problem.h * problem.w);
  const double output = size * static_cast<double>(problem.output_numel());
  const bool in_turn = problem.groups > 1 && !depthwise && !has_grouped_kernel(problem);
  return times.launch + 1e-3 * times.term * terms +
         (in_turn ? cudnn::group_us * static_cast<double>(problem.groups) : 0.0) +
         times.products * (tensor_cores && !depthwise ? tensor_us(flops, 1.0, device) : fp32_us(flops, 1.0, device)) +
         memory_us(times.input * input + times.output * output, 1.0, device);
}

// What follows the convolution takes passes over the output: the bias (on CUDA, where cuDNN is not asked to add it, by
// a kernel far from the bandwidth), the residual, the activation.
double epilogue_us(const ConvProblem& problem, const DeviceInfo& device) {
  const double y_us = 1e6 * static_cast<double>(problem.output_numel()) * static_cast<double>(size_of(problem.dtype)) /
                      device.bandwidth_bytes_per_s;
  const bool bias_pass = problem.has_bias && device.type == DeviceType::cuda;
  return (bias_pass ? 2.0 + (problem.dtype == DType::f32 ? 3.0 : 5.5) * y_us : 0.0) +
         (problem.has_residual() ? 2.0 + 3.0 * y_us : 0.0) +
         (problem.activation != Activation::none ? 2.0 + 2.0 * y_us : 0.0);
}

ConvPlan plan(const ConvProblem& problem, const DeviceInfo& device) {
  ConvProblem bare = problem;
  bare.has_bias = false, bare.residual = Residual::none, bare.activation = Activation::none;
  ConvPlan plan;
  plan.config = "aten::_convolution";
  plan.cost_us = (device.type == DeviceType::cpu ? cpu_cost_us(bare, device) : cuda_cost_us(bare, device)) +
                 epilogue_us(problem, device);
  return plan;
}

// Of depthwise layers' weight gradient: NCHW by PyTorch's own kernel; NHWC by cuDNN's, which in float32 is slow with
// 7x7.
double depthwise_gradient_us(const ConvProblem& problem, const DeviceInfo& device) {
  const bool nhwc = problem.layout == Layout::nhwc, half = problem.dtype != DType::f32;
  const double rate = !nhwc ? 0.025 : half ? 0.25 : problem.r == 3 ? 0.14 : problem.r == 5 ? 0.10 : 0.01;
  return (half ? 10.0 : 5.0) + 1e6 * std::max(problem.direct_flops() / (rate * device.fp32_flops_per_s),
                                              problem.compulsory_bytes() / (0.6 * device.bandwidth_bytes_per_s));
}

// Of the weight gradient, fitted to the layer set likewise. In FP32 it takes about as long as the forward convolution:
// the same products, with up to 64 channels or filters twice as long; but on first layers in NHWC cuDNN's heuristics,
// where nobody asks for a search, take an algorithm of ten times the best one's time. Tensor cores need many filters
// and channels; NCHW tensors are converted before.
ConvPlan weight_gradient_plan(const ConvProblem& problem, const DeviceInfo& device) {
  ConvPlan result = plan(problem, device);
  const bool plain = problem.accuracy == AccuracyClass::ieee || problem.accuracy == AccuracyClass::fp32;
  if (device.type == DeviceType::cpu) return result;
  if (problem.groups > 1) {
    if (problem.c_per_group() == 1) result.cost_us = depthwise_gradient_us(problem, device);
    return result;
  }
  if (plain) {
    const double first_layer = problem.layout == Layout::nhwc ? 10.0 : 1.0;
    result.cost_us *= problem.c <= 4 ? first_layer : std::min(problem.c, problem.k) <= 64 ? 2.0 : 1.0;
    return result;
  }
  const double c = static_cast<double>(problem.c), k = static_cast<double>(problem.k);
  const double conversions =
      problem.layout == Layout::nchw ? 2.0 * problem.compulsory_bytes() / device.bandwidth_bytes_per_s : 0.0;
  if (problem.accuracy == AccuracyClass::tf32) {
    const double filling = std::max(0.09, std::min(1.0, std::min(c, k) / 100.0));
    const double rate = 0.26 * filling * device.fp16_tensor_flops_per_s;
    result.cost_us = 16.0 + 1e6 * (problem.direct_flops() / rate + conversions);
  } else {
    const double filling = std::max(0.055, std::min(1.0, (k - 10.0) / 80.0) * std::min(1.0, c / 75.0));
    const double rate = 1.15 * filling * device.fp16_tensor_flops_per_s;
    const double latency = problem.r * problem.s > 1 ? 18.0 : 11.0;
    result.cost_us = latency + 1e6 * (problem.direct_flops() / rate + conversions);
  }
  return result;
}

}  // namespace

extern const WeightGradient weight_gradient;
const WeightGradient weight_gradient{"torch", weight_gradient_roundoffs, supports, weight_gradient_plan};

extern const Algorithm algorithm;
const Algorithm algorithm{
    "torch", "library",   "PyTorch's own convolution (cuDNN, oneDNN)", 0, true, true, roundoffs, supports,
    plan,    plain_weight};

}  // namespace fastconv::algos::torch
