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

// The tensor cores' kernels are NHWC inside: NCHW input and weight are converted before, output after, in three
// launches; microseconds per million elements. Not so 1x1 kernels whose images are whole pieces of 16 bytes.
double conversions_us(const ConvProblem& problem) {
  const bool product = problem.r * problem.s == 1 && problem.stride_h == 1 && problem.stride_w == 1 &&
                       problem.pad_h + problem.pad_w == 0 &&
                       problem.h * problem.w * static_cast<std::int64_t>(size_of(problem.dtype)) % 16 == 0;
  if (problem.layout == Layout::nhwc || product) return 0.0;
  const double input_and_output =
      static_cast<double>(problem.n * problem.c * problem.h * problem.w + problem.output_numel());
  const double weight = static_cast<double>(problem.k * problem.c_per_group() * problem.r * problem.s);
  return 7.5 + 1e-6 * ((problem.dtype == DType::f32 ? 2.1 : 1.75) * input_and_output + 4.5 * weight);
}

// cuDNN's tensor-core kernels of more than one tap, at any batch that fills the device: whole waves of tiles of 128
// outputs x 128 filters, or of a half or a quarter of one where that leaves fewer processors idle, each a bit slower.
// What of the shorter one of products and memory is not hidden comes on top.
double products_us(const ConvProblem& problem, const DeviceInfo& device) {
  const bool tf32 = problem.accuracy == AccuracyClass::tf32;
  const double filters = static_cast<double>(problem.k), channels = static_cast<double>(problem.c);
  const double pixels = static_cast<double>(problem.n * problem.p() * problem.q());
  const double tiles = std::ceil(pixels / 128.0) * std::max(1.0, filters / 128.0) / device.processors;
  double waves = std::ceil(tiles);
  waves = std::min(waves, 1.15 * std::ceil(2.0 * tiles) / 2.0);
  waves = std::min(waves, 1.30 * std::ceil(4.0 * tiles) / 4.0);
  const double peak = (tf32 ? 0.675 : 1.255) * device.fp16_tensor_flops_per_s;
  const double filling = std::min(1.0, (filters + 16.0) / 128.0);
  const double depth = tf32 ? 1.0 : channels / (channels + 9.5);  // a short reduction of one tap, in half types
  const double products = problem.direct_flops() * (waves / tiles) / (peak * filling * depth);
  const double memory = problem.compulsory_bytes() / device.bandwidth_bytes_per_s;
  return 1e6 * (std::max(products, memory) + (tf32 ? 0.45 : 0.11) * std::min(products, memory));
}

// cuDNN with benchmark=True, fitted to the layer set on an H200 (benchmarks/results). A block walks the whole
// reduction, which small problems wait for: microseconds per term.
double cuda_cost_us(const ConvProblem& problem, const DeviceInfo& device) {
  const double terms = static_cast<double>(problem.c_per_group() * problem.r * problem.s);
  const double bandwidth = device.bandwidth_bytes_per_s;
  const bool few_channels = problem.groups == 1 && problem.c <= 4, nhwc = problem.layout == Layout::nhwc;
  if (problem.groups > 1 && problem.c_per_group() == 1) {  // depthwise, in FP32 arithmetic whatever the class
    const bool half = problem.dtype != DType::f32;
    const double rate = (!nhwc ? 0.17 : half ? 0.24 : 0.145) * device.fp32_flops_per_s;
    const double share = !nhwc ? 0.19 : half ? 0.85 : 0.97;
    return 5.0 + 1e6 * std::max(problem.direct_flops() / rate, problem.compulsory_bytes() / (share * bandwidth));
  }
  if (problem.accuracy == AccuracyClass::ieee || problem.accuracy == AccuracyClass::fp32) {
    if (problem.groups > 1) {  // from one layer
      const double rate = (nhwc ? 0.11 : 0.21) * device.fp32_flops_per_s;
      return 5.0 + 1e6 * std::max(problem.direct_flops() / rate, problem.compulsory_bytes() / bandwidth);
    }
    // 28 to 50 TFLOP/s; where its search finds Winograd, for 3x3 kernels on small maps, 65 to 115.
    const bool winograd = problem.r == 3 && problem.s == 3 && problem.stride_h == 1 && problem.h <= 28;
    // First layers of networks: 12 to 22 TFLOP/s.
    const double filling = few_channels ? std::min(1.0, 0.3 + static_cast<double>(problem.k) / 400.0) : 1.0;
    const double rate = (winograd && !few_channels ? 1.8 : 0.85 * filling) * device.fp32_flops_per_s;
    return 4.0 + (few_channels ? 0.04 : 0.022) * terms +
           1e6 * std::max(problem.direct_flops() / rate, problem.compulsory_bytes() / bandwidth);
  }
  // Tensor cores: tiles of 128 filters. TF32 kernels need long reductions.
  const bool tf32 = problem.accuracy == AccuracyClass::tf32;
  const double peak = (tf32 ? 0.66 : 1.15) * device.fp16_tensor_flops_per_s;
  const double filling = std::min(1.0, (static_cast<double>(problem.k_per_group()) + 16.0) / 128.0);
  const double channels = static_cast<double>(problem.c_per_group());
  const double depth = tf32 ? terms / (terms + 140.0) : channels / (channels + 6.0);
  const double conversions = conversions_us(problem);
  const double terms_us = (tf32 ? 0.00226 : 0.00131) * terms;
  if (problem.n == 1 && problem.groups == 1 && problem.direct_flops() < 8e9) {  // caches are cold: launch and latency
    const double outputs =
        1e-6 * static_cast<double>(problem.output_numel()) * static_cast<double>(size_of(problem.dtype));
    const double gflop = 1e-9 * problem.direct_flops();
    if (few_channels) return (problem.accuracy == AccuracyClass::bf16 ? 15.0 : 8.5) + 0.9 * outputs + conversions;
    return (tf32 ? 10.2 + 1.18 * gflop + 0.92 * outputs : 9.2 + 0.53 * gflop + 1.2 * outputs) + terms_us + conversions;
  }
  if (few_channels && problem.r * problem.s > 9) {  // large kernels of first layers
    // For 64 filters of 7x7 in FP16 cuDNN has a kernel.
    const bool half = problem.accuracy == AccuracyClass::fp16,
               fits = half && problem.k <= 64 && problem.r * problem.s <= 49;
    const double rate = (problem.accuracy == AccuracyClass::bf16 ? 0.045
                         : fits                                  ? 0.137
                                                                 : 0.056) *
                        device.fp16_tensor_flops_per_s;
    return 8.5 + 1e6 * problem.direct_flops() / rate + conversions;
  }
  if (!few_channels && problem.groups == 1 && problem.r * problem.s > 1) {
    return (tf32 ? 13.3 : 11.5) + products_us(problem, device) + conversions;
  }
  // First layers: the number of outputs decides, one in the time of 8.6 bytes.
  const double bytes =
      std::max(problem.compulsory_bytes(), few_channels ? 8.6 * static_cast<double>(problem.output_numel()) : 0.0);
  return (tf32 ? 11.0 + 0.002 * terms : 8.5 + 0.0014 * terms) + conversions +
         1e6 * std::max(problem.direct_flops() / (peak * filling * depth), bytes / bandwidth);
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
