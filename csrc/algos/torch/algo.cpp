// PyTorch's own convolution: always fits, so `auto` always answers. Its run function lives in csrc/ops (it needs
// torch).
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/algorithm.h"
#include "core/cost.h"
#include "core/fitted.h"
#include "core/library_times.h"
#include "core/roundoffs.h"

namespace fastconv::algos::torch {
namespace {

namespace own = fitted::torch;

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

// oneDNN, float32: the rate of products of 1x1 kernels and of larger ones in either layout, half of it with so many
// pixels of an image; and passes over input and output, at the memory's rate, that are not hidden. Of groups nothing
// was measured: neither is added.
double cpu_cost_us(const ConvProblem& problem, const DeviceInfo& device) {
  const bool nhwc = problem.layout == Layout::nhwc, product = problem.r * problem.s == 1;
  const CpuRates<double>& share = product ? (nhwc ? own::nhwc_1x1 : own::nchw_1x1) : (nhwc ? own::nhwc : own::nchw);
  const double pixels = static_cast<double>(problem.p() * problem.q());
  const bool whole = problem.groups == 1;
  const double filling = whole ? pixels / (pixels + own::half_pixels.of(device)) : 1.0;
  const double passes = whole ? own::passes.of(device) : 0.0;
  const double bytes = problem.compulsory_bytes();
  return 10.0 + memory_us(passes * bytes, 1.0, device) +
         std::max(fp32_us(problem.direct_flops(), share.of(device) * filling, device), memory_us(bytes, 1.0, device));
}

// cuDNN's with benchmark=True. Fitted to an H200's times of the layer sets and of two thirds of a corpus of networks
// (docs/log/79-regret-h200.md, docs/log/90-choices.md).
#define FASTCONV_CUDNN(KIND) (nhwc ? own::KIND##_nhwc : own::KIND##_nchw)

bool has_grouped_kernel(const ConvProblem& problem) {
  const std::int64_t channels = problem.c_per_group();
  const bool tensor_cores = problem.dtype != DType::f32 || problem.accuracy == AccuracyClass::tf32;
  const bool power_of_two = (channels & (channels - 1)) == 0;
  return tensor_cores && channels == problem.k_per_group() && power_of_two && channels >= 4 && channels <= 128;
}

// Maps of one pixel are dense in both orders.
bool is_nhwc(const ConvProblem& problem) {
  return problem.layout == Layout::nhwc || (problem.h * problem.w == 1 && problem.p() * problem.q() == 1);
}

// Whether so many channels or filters of a pixel, or pixels of a channel, are whole pieces of 16 bytes.
bool in_pieces(std::int64_t count, const ConvProblem& problem) {
  return count * static_cast<std::int64_t>(size_of(problem.dtype)) % 16 == 0;
}

// Tensor cores: whether tensors are padded before, or read and written otherwise.
bool is_unaligned(const ConvProblem& problem) {
  const bool product = problem.r * problem.s == 1;
  return !in_pieces(problem.c, problem) || ((is_nhwc(problem) || !product) && !in_pieces(problem.k, problem));
}

// Of float32, which no kernel on tensor cores reads: `tf32` takes what FP32 arithmetic does, forward and backward
// (docs/log/137-one-commit.md: 572x572 and 180x180, 1 to 64).
bool is_single_channel(const ConvProblem& problem) { return problem.groups == 1 && problem.c == 1; }

// For 64 filters of 7x7 in FP16.
bool has_first_kernel(const ConvProblem& problem) {
  return problem.accuracy == AccuracyClass::fp16 && problem.k <= 64 && problem.r * problem.s > 9 &&
         problem.r * problem.s <= 49;
}

// Its times of a kind of problem. Unaligned: channels that are no whole 16 bytes, which are padded before, or computed
// otherwise. Groups of 4, 8, 16, ..., 128 channels and filters have kernels; others take their time one after the
// other.
LibraryTimes cudnn_times(const ConvProblem& problem) {
  const bool half = problem.dtype != DType::f32, tf32 = problem.accuracy == AccuracyClass::tf32;
  const bool product = problem.r * problem.s == 1, first = problem.c <= 4, nhwc = is_nhwc(problem);
  if (problem.groups > 1 && problem.c_per_group() == 1) {  // in FP32 arithmetic whatever the class
    const bool unrolled = !nhwc && problem.r * problem.s <= 25 && problem.stride_h * problem.stride_w == 1;
    if (half) return unrolled ? own::half_depthwise_5x5_nchw : FASTCONV_CUDNN(half_depthwise);
    return problem.r * problem.s <= 9 ? FASTCONV_CUDNN(depthwise_3x3) : FASTCONV_CUDNN(depthwise);
  }
  // FP32 arithmetic, which class `fp32` gets as well; 3x3 with stride 1: Winograd's too.
  if (!half && (!tf32 || is_single_channel(problem))) {
    if (problem.groups > 1) return FASTCONV_CUDNN(plain_grouped);
    if (first) return FASTCONV_CUDNN(plain_first);
    if (product) return FASTCONV_CUDNN(plain_1x1);
    const bool winograd = problem.r == 3 && problem.s == 3 &&
                          problem.stride_h * problem.stride_w * problem.dilation_h * problem.dilation_w == 1;
    return winograd ? FASTCONV_CUDNN(plain_3x3) : FASTCONV_CUDNN(plain);
  }
  if (problem.groups > 1) {
    if (has_grouped_kernel(problem)) return FASTCONV_CUDNN(few_grouped);
    return half ? FASTCONV_CUDNN(half_grouped) : FASTCONV_CUDNN(tf32_grouped);
  }
  if (first) return half ? FASTCONV_CUDNN(half_first) : FASTCONV_CUDNN(tf32_first);
  if (product && !nhwc) {  // of images as they are, if their rows are whole pieces of 16 bytes, or of 8
    const bool as_it_is = problem.stride_h * problem.stride_w == 1 && problem.pad_h + problem.pad_w == 0;
    if (half && as_it_is && in_pieces(problem.c, problem) && !in_pieces(problem.h * problem.w, problem) &&
        in_pieces(2 * problem.h * problem.w, problem)) {
      return own::half_pieces_1x1_nchw;
    }
    if (problem.stride_h * problem.stride_w != 1) return own::strided_1x1_nchw;  // another launch, to convert
    if (!as_it_is || !in_pieces(problem.h * problem.w, problem)) return own::unaligned_1x1_nchw;
  }
  if (product && nhwc && in_pieces(problem.c, problem) && !in_pieces(problem.k, problem)) {
    return own::unaligned_filters_1x1_nhwc;
  }
  if (is_unaligned(problem)) return product ? FASTCONV_CUDNN(unaligned_1x1) : FASTCONV_CUDNN(unaligned);
  if (product && problem.stride_h * problem.stride_w != 1) {  // no product of matrices, in NHWC
    return half ? own::half_strided_1x1_nhwc : own::tf32_strided_1x1_nhwc;
  }
  if (half) return product ? FASTCONV_CUDNN(half_1x1) : FASTCONV_CUDNN(half);
  return product ? FASTCONV_CUDNN(tf32_1x1) : FASTCONV_CUDNN(tf32);
}
#undef FASTCONV_CUDNN

double input_bytes(const ConvProblem& problem) {
  return static_cast<double>(size_of(problem.dtype)) *
         static_cast<double>(problem.n * problem.c * problem.h * problem.w);
}

double weight_bytes(const ConvProblem& problem) {
  return static_cast<double>(size_of(problem.dtype)) *
         static_cast<double>(problem.k * problem.c_per_group() * problem.r * problem.s);
}

double output_bytes(const ConvProblem& problem) {
  return static_cast<double>(size_of(problem.dtype)) * static_cast<double>(problem.output_numel());
}

// Depthwise layers that a launch bounds: cuDNN has kernels for them of half and of twice the time, and PyTorch's search
// cannot tell which is which by timing each once. Of 22 that would take less than 6.5 us, 14 took 8.8 to 13.7
// (docs/log/139-h200-one-commit.md), of four at 6.5 to 7 two took 14 (docs/log/151-single-kinds.md): the mean.
double with_luck_us(double us) { return us < 7.0 ? us + 3.0 : us; }

// Single pixels of half types: from 0.9 to 1.3 times the model's 8 us.
constexpr double single_pixel_us = 0.7;

// Dilated taps of tensor cores' kernels: known of two layers, dilations 2 and 36 (docs/log/139-h200-one-commit.md).
double dilated_factor(const ConvProblem& problem) {
  const std::int64_t dilation = std::max(problem.dilation_h, problem.dilation_w);
  return problem.r * problem.s == 1 || problem.groups > 1 || dilation == 1 ? 1.0 : dilation < 8 ? 1.15 : 1.9;
}

double cuda_cost_us(const ConvProblem& problem, const DeviceInfo& device) {
  const bool half = problem.dtype != DType::f32, tf32 = problem.accuracy == AccuracyClass::tf32;
  const bool first = problem.groups == 1 && problem.c <= 4;
  const double terms = static_cast<double>(problem.c_per_group() * problem.r * problem.s);
  if (half && first && problem.r * problem.s > 9) {  // large kernels
    const double share = problem.accuracy == AccuracyClass::bf16 ? 0.045 : has_first_kernel(problem) ? 0.137 : 0.056;
    const double conversions = problem.layout == Layout::nhwc ? 0.0 : 7.5;
    const double filters = static_cast<double>(std::max<std::int64_t>(problem.k, 1));  // in tiles of 64
    const double flops = problem.direct_flops() * std::max(1.0, 64.0 / filters);
    return 8.5 + 0.09 * terms + tensor_us(flops, share, device) + conversions;
  }
  const LibraryTimes times = cudnn_times(problem);
  const bool tensor_cores = half || tf32, depthwise = problem.groups > 1 && problem.c_per_group() == 1;
  const double filters = static_cast<double>(problem.k_per_group());
  const double tile = depthwise                                                                ? 1.0
                      : tensor_cores && !(problem.r * problem.s == 1 && is_unaligned(problem)) ? 128.0
                                                                                               : 32.0;
  const bool in_turn = problem.groups > 1 && !depthwise && !has_grouped_kernel(problem);
  const bool strided = problem.stride_h * problem.stride_w != 1, product = problem.r * problem.s == 1;
  // FP32 arithmetic in NHWC: a group's tiles are as wide as it has filters, from 32 to 256; a block of a wide one walks
  // its reduction for longer, and multiplies faster.
  const bool plain_groups = in_turn && !tensor_cores && is_nhwc(problem);
  const bool whole_tiles = problem.k_per_group() % 32 == 0;
  const double width = !plain_groups ? 1.0 : whole_tiles ? std::clamp(filters, 32.0, 256.0) / 128.0 : own::odd_groups;
  const double slowness = in_turn && tensor_cores && strided                      ? own::strided_groups
                          : problem.groups > 1 && !depthwise && !in_turn && !half ? own::few_grouped_tf32
                          : plain_groups && filters > tile                        ? own::plain_wide_groups
                                                                                  : 1.0;
  const double flops = slowness * (product ? image_tiles_factor(problem) : 1.0) * problem.direct_flops() *
                       std::ceil(filters / tile) * tile / filters;
  const bool skips = product && strided && tensor_cores && is_nhwc(problem) && !is_unaligned(problem);
  const double input = (skips ? touched_share(problem) : 1.0) * input_bytes(problem), output = output_bytes(problem);
  const double products = tensor_cores && !depthwise ? dilated_factor(problem) * tensor_us(flops, 1.0, device)
                                                     : fp32_us(flops, 1.0, device);
  const double group_us = plain_groups                     ? own::plain_group_nhwc
                          : !tensor_cores                  ? own::plain_group
                          : problem.layout == Layout::nhwc ? own::group_nhwc
                                                           : own::group_nchw;
  const double turns = in_turn && !tensor_cores ? static_cast<double>(problem.groups) : 1.0;
  // NCHW: filters that are no whole pieces of 16 bytes, of images that are, take longer than both together; a few do
  // not.
  const bool odd_filters = tensor_cores && problem.groups == 1 && !is_nhwc(problem) && !product && !first &&
                           in_pieces(problem.c, problem) && !in_pieces(problem.k, problem) && problem.k > 16;
  // NCHW: a single filter of tensor cores, known of one layer in two classes (docs/log/151-single-kinds.md).
  const bool single_filter =
      tensor_cores && problem.groups == 1 && !is_nhwc(problem) && !product && !first && problem.k == 1;
  const double whole_us = times.us(turns * width * terms, products, input, output, device);
  const double us = (odd_filters     ? own::odd_filters_nchw * whole_us
                     : single_filter ? times.launch + own::single_filter_nchw * (whole_us - times.launch)
                                     : whole_us) +
                    (in_turn ? group_us * static_cast<double>(problem.groups) : 0.0);
  // Of 9x9, known of one layer in three classes (docs/log/141-choices-of-the-other-passes.md).
  const double large = depthwise && is_nhwc(problem) && problem.r * problem.s > 49 ? 2.5 : 1.0;
  // Weights that are padded for tensor cores, in every call.
  const bool pads_weight = tensor_cores && problem.groups == 1 && !product && is_nhwc(problem) && is_unaligned(problem);
  const double weight_us = pads_weight ? memory_us(7.0 * weight_bytes(problem), 1.0, device) : 0.0;
  const bool single_pixel = half && problem.groups == 1 && product && problem.h * problem.w == 1;
  return (depthwise && !half && is_nhwc(problem) ? with_luck_us(us) : us) * large + weight_us +
         (single_pixel ? single_pixel_us : 0.0);
}

// What follows the convolution takes passes over the output: the bias (on CUDA, where cuDNN is not asked to add it, by
// a kernel far from the bandwidth), the residual, the activation.
double epilogue_us(const ConvProblem& problem, const DeviceInfo& device) {
  const double y = static_cast<double>(problem.output_numel()) * static_cast<double>(size_of(problem.dtype));
  const bool bias_pass = problem.has_bias && device.type == DeviceType::cuda;
  return (bias_pass ? elementwise_us((problem.dtype == DType::f32 ? 3.0 : 5.5) * y, device) : 0.0) +
         (problem.has_residual() ? elementwise_us(3.0 * y, device) : 0.0) +
         (problem.activation != Activation::none ? elementwise_us(2.0 * y, device) : 0.0);
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
  const double rate = !nhwc            ? own::wgrad_depthwise_nchw
                      : half           ? own::wgrad_depthwise_half
                      : problem.r == 3 ? own::wgrad_depthwise_3
                      : problem.r == 5 ? own::wgrad_depthwise_5
                                       : own::wgrad_depthwise_7;
  return (half ? own::wgrad_depthwise_half_launch : own::wgrad_depthwise_f32_launch) +
         std::max(fp32_us(problem.direct_flops(), rate, device),
                  memory_us(problem.compulsory_bytes(), own::wgrad_depthwise_memory, device));
}

// Gradients in FP32 arithmetic with stride 1, by an FFT, which the times of 3x3 kernels hold already: tiles of 32 x 32
// pixels, that the kernel's size is lost of, have 32 x 17 complex products for each channel and filter, whatever the
// kernel; and so many values of each filter are written and read.
double fft_us(const ConvProblem& problem, const DeviceInfo& device) {
  constexpr std::int64_t tile = 32, values = tile * (tile / 2 + 1);
  if (problem.groups > 1 || problem.r * problem.s <= 9 || problem.r >= tile || problem.s >= tile ||
      problem.stride_h * problem.stride_w * problem.dilation_h * problem.dilation_w != 1) {
    return std::numeric_limits<double>::infinity();
  }
  const std::int64_t tiles =
      problem.n * ceil_div(problem.h, tile - problem.r + 1) * ceil_div(problem.w, tile - problem.s + 1);
  const double filter_values = static_cast<double>(values * problem.c * problem.k);
  return own::gradient_fft.us(0.0, fp32_us(8.0 * static_cast<double>(tiles) * filter_values, 1.0, device),
                              input_bytes(problem), output_bytes(problem), device) +
         memory_us(2.0 * 8.0 * filter_values, 1.0, device);
}

// A first layer's weight gradient in NHWC on the FP32 units, which class `tf32` gets as well: the products of tiles of
// 32 filters, and the gradient of the output read.
double first_weight_gradient_us(const ConvProblem& problem, const DeviceInfo& device) {
  const double flops = problem.direct_flops() * static_cast<double>(round_up(problem.k, 32)) /
                       static_cast<double>(std::max<std::int64_t>(problem.k, 1));
  return own::wgrad_first.us(0.0, fp32_us(flops, 1.0, device), 0.0, output_bytes(problem), device);
}

// Steps by which the sums of so many pixels, parted among blocks, come together.
double gradient_steps(const ConvProblem& problem) {
  return std::log2(std::max(1.0, static_cast<double>(problem.n * problem.p() * problem.q())));
}

// Of a weight gradient in FP32 arithmetic: 1x1 in tiles of 128 filters and 64 channels; 3x3 by Winograd's transforms,
// which are passes over memory; others by the direct sum or an FFT.
double plain_weight_gradient_us(const ConvProblem& problem, const DeviceInfo& device) {
  const bool product = problem.r * problem.s == 1;
  const bool winograd = problem.r == 3 && problem.s == 3 &&
                        problem.stride_h * problem.stride_w * problem.dilation_h * problem.dilation_w == 1;
  const LibraryTimes& times = product ? own::wgrad_plain_1x1 : winograd ? own::wgrad_plain_3x3 : own::wgrad_plain;
  const auto whole = [](std::int64_t count, std::int64_t tile) {
    return static_cast<double>(round_up(count, tile)) / static_cast<double>(std::max<std::int64_t>(count, 1));
  };
  const double flops = problem.direct_flops() * (product ? whole(problem.k, 128) * whole(problem.c, 64) : 1.0);
  const double us = times.us(1e3 * gradient_steps(problem), fp32_us(flops, 1.0, device), input_bytes(problem),
                             output_bytes(problem), device);
  return std::min(us, fft_us(problem, device));
}

// Of one on tensor cores in NHWC, of more than 4 channels: these need many filters and channels; 1x1 kernels' bytes are
// the bound where those are few.
double tensor_weight_gradient_us(const ConvProblem& problem, const DeviceInfo& device) {
  const bool product = problem.r * problem.s == 1, tf32 = problem.accuracy == AccuracyClass::tf32;
  const double c = static_cast<double>(problem.c), k = static_cast<double>(problem.k);
  const double filling = tf32 ? std::max(own::wgrad_tf32_least, std::min(1.0, std::min(c, k) / own::wgrad_tf32_full))
                              : std::max(own::wgrad_half_least, std::min(1.0, (k - 10.0) / own::wgrad_half_filters) *
                                                                    std::min(1.0, c / own::wgrad_half_channels));
  const LibraryTimes& times =
      tf32 ? (product ? own::wgrad_tf32_1x1 : own::wgrad_tf32) : (product ? own::wgrad_half_1x1 : own::wgrad_half);
  const double steps_us = times.launch + times.term * gradient_steps(problem);
  const double bytes = times.input * input_bytes(problem) + times.output * output_bytes(problem);
  return steps_us + std::max(times.products * tensor_us(problem.direct_flops() / filling, 1.0, device),
                             memory_us(bytes, 1.0, device));
}

// Of the weight gradient, fitted to the layer sets and a corpus likewise, where PyTorch may search (cudnn.benchmark);
// docs/log/141-choices-of-the-other-passes.md. On tensor cores NCHW tensors are converted before.
ConvPlan weight_gradient_plan(const ConvProblem& problem, const DeviceInfo& device) {
  ConvPlan result = plan(problem, device);
  const bool plain = problem.accuracy == AccuracyClass::ieee || problem.accuracy == AccuracyClass::fp32;
  if (device.type == DeviceType::cpu) {
    result.cost_us = 10.0 + std::max(fp32_us(problem.direct_flops(), own::wgrad.of(device), device),
                                     memory_us(problem.compulsory_bytes(), 1.0, device));
    return result;
  }
  if (problem.groups > 1) {
    if (problem.c_per_group() == 1) result.cost_us = depthwise_gradient_us(problem, device);
    return result;
  }
  if (problem.c == 1) {  // by a kernel that is slow in every class (1 to 64 at 572x572)
    result.cost_us = own::wgrad_first_launch + fp32_us(problem.direct_flops(), own::wgrad_single, device);
    return result;
  }
  if (plain) {
    if (problem.c > 4) {
      result.cost_us = plain_weight_gradient_us(problem, device);
    } else if (problem.layout == Layout::nhwc) {
      result.cost_us = std::min(first_weight_gradient_us(problem, device), fft_us(problem, device));
    } else {
      result.cost_us = std::min(result.cost_us, fft_us(problem, device));
    }
    return result;
  }
  const double conversions_us =
      problem.layout == Layout::nchw ? memory_us(own::wgrad_convert * problem.compulsory_bytes(), 1.0, device) : 0.0;
  if (problem.c > 4) {
    result.cost_us = tensor_weight_gradient_us(problem, device) + conversions_us;
    return result;
  }
  // First layers: the products of few channels, and the gradient of the output read.
  const bool tf32 = problem.accuracy == AccuracyClass::tf32;
  const double share = tf32                        ? own::wgrad_tf32_first
                       : has_first_kernel(problem) ? own::wgrad_half_first_kernel
                                                   : own::wgrad_half_first;
  const double passes = tf32 ? own::wgrad_tf32_first_output : own::wgrad_half_first_output;
  result.cost_us = own::wgrad_first_launch + tensor_us(problem.direct_flops(), share, device) +
                   memory_us(passes * output_bytes(problem), 1.0, device) + conversions_us;
  if (tf32) result.cost_us = std::min(result.cost_us, first_weight_gradient_us(problem, device));
  return result;
}

// Half types in NHWC, on tensor cores: tiles of 128 channels, or of 64, and 64 filters at a time.
double half_input_gradient_us(const ConvProblem& problem, const DeviceInfo& device) {
  const bool narrow = problem.c <= 64;
  const LibraryTimes& times = narrow ? own::half_narrow_gradient : own::half_gradient;
  const auto filling = [](std::int64_t count, std::int64_t tile) {
    return static_cast<double>(count) / static_cast<double>(round_up(count, tile));
  };
  const double flops = problem.direct_flops() / (filling(problem.c, narrow ? 64 : 128) * filling(problem.k, 64));
  return times.us(static_cast<double>(problem.k * problem.r * problem.s), tensor_us(flops, 1.0, device),
                  input_bytes(problem), output_bytes(problem), device);
}

// Half types in NHWC, a stride as large as the kernel, so that no two taps meet: transposed layers of 2x2. As slow as
// six passes over its bytes, of eight shapes on an H200 (docs/log/155-shuffles.md).
double apart_input_gradient_us(const ConvProblem& problem, const DeviceInfo& device) {
  const bool apart = problem.r == problem.stride_h && problem.s == problem.stride_w && problem.r * problem.s > 1;
  if (!apart || !is_nhwc(problem) || problem.groups > 1) return 0.0;
  return 15.0 + memory_us(6.0 * (input_bytes(problem) + output_bytes(problem)), 1.0, device);
}

// First layers in float32, on the FP32 units: a kernel that writes 3 channels, or tiles that are nearly empty.
double first_input_gradient_us(const ConvProblem& problem, const DeviceInfo& device) {
  const bool nhwc = is_nhwc(problem), tf32 = problem.accuracy == AccuracyClass::tf32 && problem.c > 1;
  const LibraryTimes& times = tf32 ? (nhwc ? own::tf32_first_gradient_nhwc : own::tf32_first_gradient_nchw)
                                   : (nhwc ? own::first_gradient_nhwc : own::first_gradient_nchw);
  return times.us(static_cast<double>(problem.k * problem.r * problem.s), fp32_us(problem.direct_flops(), 1.0, device),
                  input_bytes(problem), output_bytes(problem), device);
}

// Class `tf32` with a stride, and 1x1 without: on tensor cores, tiles of 128 channels, and the forward convolution's
// products alone; the filter stays as it is, and no phases are woven. NCHW: after conversions.
double tf32_input_gradient_us(const ConvProblem& problem, const DeviceInfo& device) {
  const double flops = problem.direct_flops() * static_cast<double>(round_up(problem.c, 128)) /
                       static_cast<double>(std::max<std::int64_t>(problem.c, 1));
  const bool strided = problem.stride_h * problem.stride_w != 1;
  const LibraryTimes& times = !strided           ? own::tf32_product_gradient
                              : is_nhwc(problem) ? own::tf32_strided_gradient_nhwc
                                                 : own::tf32_strided_gradient_nchw;
  return times.us(static_cast<double>(problem.k * problem.r * problem.s), tensor_us(flops, 1.0, device),
                  input_bytes(problem), output_bytes(problem), device);
}

// FP32 arithmetic in NHWC, kernels larger than 1x1: few blocks walk a long reduction in less than half the time that
// they take forward. Known of up to 784 pixels and from 2048 terms on (four problems, docs/log/137-one-commit.md).
double short_walk_us(const ConvProblem& problem, const DeviceInfo& device) {
  constexpr std::int64_t max_pixels = 1024, min_terms = 2048;
  const bool few = problem.n * problem.h * problem.w <= max_pixels && problem.k * problem.r * problem.s >= min_terms;
  if (!few || !is_nhwc(problem) || problem.groups > 1 || problem.r * problem.s == 1) {
    return std::numeric_limits<double>::infinity();
  }
  const double zeros = static_cast<double>(problem.stride_h * problem.stride_w);
  return own::plain_gradient.us(static_cast<double>(problem.k * problem.r * problem.s),
                                fp32_us(zeros * problem.direct_flops(), 1.0, device), 0.0, 0.0, device);
}

}  // namespace

// Kinds without a model of their own take up to a third more than the convolutions, and put phases in their places
// likewise; of larger kernels than one tap nothing tells which of two ways of PyTorch's is the better one.
double input_gradient_us(const ConvProblem& problem, const SameConvolutions& same, const DeviceInfo& device) {
  const bool half = problem.dtype != DType::f32, product = problem.r * problem.s == 1;
  const bool depthwise = problem.groups > 1 && problem.c_per_group() == 1;
  if (depthwise && half && problem.r * problem.s > 25) {  // no kernels of their own: those of float32
    ConvProblem plain = problem;
    plain.dtype = DType::f32, plain.accuracy = AccuracyClass::fp32;
    return std::max(same.us, cuda_cost_us(plain, device));
  }
  if (depthwise || (half && (product || problem.groups > 1))) return same.us + same.weaving_us;
  if (problem.groups == 1 && problem.c <= 4 && !product && (!half || problem.c == 1)) {
    return first_input_gradient_us(problem, device);
  }
  if (half) return std::max(half_input_gradient_us(problem, device), apart_input_gradient_us(problem, device));
  const bool strided = problem.stride_h * problem.stride_w != 1;
  const bool known = strided || (product && is_nhwc(problem));
  if (problem.accuracy == AccuracyClass::tf32 && known && problem.groups == 1 && !is_unaligned(problem)) {
    return tf32_input_gradient_us(problem, device);
  }
  const double us = (same.are_torch && !product ? 1.0 : 1.33) * same.us + same.weaving_us;
  if (problem.accuracy == AccuracyClass::tf32) return us;
  // FP32 arithmetic multiplies the zeros that a stride puts between rows.
  const double zeros = static_cast<double>(problem.stride_h * problem.stride_w);
  const double strided_us = !strided ? 0.0 : fp32_us(zeros * problem.direct_flops(), 1.8, device);
  return std::min({std::max(us, strided_us), fft_us(problem, device), short_walk_us(problem, device)});
}

double weight_gradient_us(const ConvProblem& problem, const DeviceInfo& device) {
  return weight_gradient_plan(problem, device).cost_us;
}

extern const WeightGradient weight_gradient;
const WeightGradient weight_gradient{"torch", weight_gradient_roundoffs, supports, weight_gradient_plan};

extern const Algorithm algorithm;
const Algorithm algorithm{
    .name = "torch",
    .family = "library",
    .summary = "PyTorch's own convolution (cuDNN, oneDNN)",
    .roundoffs = roundoffs,
    .supports = supports,
    .plan = plan,
};

}  // namespace fastconv::algos::torch
