// What is to be computed: plain data, no torch, no CUDA, and no <string> (core/names.h), since kernels include it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fastconv {

// Element type of input, weight, bias, residual and output. `other` (float64, complex, ...) is served by PyTorch alone.
enum class DType : std::uint8_t { f32, f16, bf16, other };

// Accuracy class. For f32 tensors the caller's choice (ieee, fp32, tf32); for f16/bf16 the type itself.
enum class AccuracyClass : std::uint8_t { ieee, fp32, tf32, fp16, bf16, other };

// Memory order of input, residual and output. The operators bring every tensor into one of the two.
enum class Layout : std::uint8_t { nchw, nhwc };

enum class Activation : std::uint8_t { none, relu, relu6, silu, leaky_relu, gelu, gelu_tanh, hardswish, sigmoid };

// A gate, or x times one. On a GPU separate kernels end with these, so that the other kernels have no branch for them;
// elsewhere they are a pass. (SiLU is also a gate, but all kernels can end with it.)
constexpr bool is_gated(Activation activation) { return activation >= Activation::gelu; }

// Where a residual is added: before the activation or after it.
enum class Residual : std::uint8_t { none, before, after };

// Whether the filters are those of 2 x 2 pixels: filter (2 a + b) K/4 + k of pixel (p, q) is channel k of pixel
// (2 p + a, 2 q + b) of y [N, K/4, 2P, 2Q], as behind PyTorch's pixel_shuffle with its channels in another order.
// windows: the window of such a filter begins a rows and b columns further, so that P and Q are one less. It is what an
// upsampling by 2 before a convolution comes to, or a transposed one of stride 2.
enum class Shuffle : std::uint8_t { none, pixels, windows };

// The caller's limits on the choice of an algorithm.
struct Limits {
  // How far `auto` may go: a multiple of PyTorch's own expected error in the class, at least 1. 0: the default limit.
  double max_error = 0.0;
  // Bytes of an algorithm's workspace, a copy of the input in its layout included. Negative: no limit.
  std::int64_t max_workspace = -1;
  bool operator==(const Limits&) const = default;
};

// y[n,k,p,q] = act( sum_{c,r,s} x[n, g*C/G + c, p*stride_h + r*dilation_h - pad_h, q*stride_w + ...] * w[k,c,r,s]
//                   + bias[k] + residual[n,k,p,q] ),   g = k / (K/G);   Residual::after: act(... + bias[k]) + residual
// input_affine: x is read as input_activation(x * scale[c] + shift[c]), zero padding staying zero: a batch norm and
// what follows it, before the convolution.
// max_pool: then the largest of each 2 x 2 of that, [N, K, P/2, Q/2], as PyTorch's max_pool2d with stride 2: an odd
// last row or column is left out, NaN is larger than all else. There is no residual then.
struct ConvProblem {
  std::int64_t n = 0, c = 0, h = 0, w = 0;  // input  [N, C, H, W]
  std::int64_t k = 0, r = 0, s = 0;         // weight [K, C/groups, R, S]
  std::int64_t stride_h = 1, stride_w = 1;
  std::int64_t pad_h = 0, pad_w = 0;
  std::int64_t dilation_h = 1, dilation_w = 1;
  std::int64_t groups = 1;
  DType dtype = DType::f32;
  AccuracyClass accuracy = AccuracyClass::fp32;
  Layout layout = Layout::nchw;
  bool has_bias = false;
  Residual residual = Residual::none;
  Activation activation = Activation::none;
  float negative_slope = 0.01f;
  bool max_pool = false;
  Shuffle shuffle = Shuffle::none;  // then in NHWC, with one group, without a residual and a pool
  bool input_affine = false;
  Activation input_activation = Activation::none;  // none, relu, relu6 or silu; none without input_affine
  // The weight is packed in the call, which is a part of its time; else it was packed before.
  bool packs = false;
  // In NHWC x and y may be ranges of channels of larger tensors: how many channels those have, the elements from one
  // pixel to the next. 0: they are tensors of their own. A residual lies as y does; with a max-pool y is its own.
  std::int64_t x_channels = 0, y_channels = 0;
  Limits limits;

  // The convolution's output height and width (the P and Q of the field), floor rounding as in PyTorch.
  constexpr std::int64_t p() const { return (h + 2 * pad_h - dilation_h * (r - 1) - 1) / stride_h + 1 - shifts(); }
  constexpr std::int64_t q() const { return (w + 2 * pad_w - dilation_w * (s - 1) - 1) / stride_w + 1 - shifts(); }
  // Those of the tensor that is written: behind the pool or the shuffle, if there is one.
  constexpr std::int64_t y_k() const { return shuffles() ? k / 4 : k; }
  constexpr std::int64_t y_p() const { return max_pool ? p() / 2 : shuffles() ? 2 * p() : p(); }
  constexpr std::int64_t y_q() const { return max_pool ? q() / 2 : shuffles() ? 2 * q() : q(); }
  constexpr std::int64_t x_pitch() const { return x_channels != 0 ? x_channels : c; }
  constexpr std::int64_t y_pitch() const { return y_channels != 0 ? y_channels : y_k(); }
  constexpr bool shuffles() const { return shuffle != Shuffle::none; }
  constexpr int shifts() const { return shuffle == Shuffle::windows ? 1 : 0; }
  constexpr std::int64_t c_per_group() const { return c / groups; }
  constexpr std::int64_t k_per_group() const { return k / groups; }
  constexpr std::int64_t output_numel() const { return n * k * p() * q(); }  // the convolution's
  constexpr std::int64_t y_numel() const { return n * y_k() * y_p() * y_q(); }
  // Multiply-adds times two of the direct algorithm: the unit of "direct-equivalent" FLOP/s.
  double direct_flops() const {
    return 2.0 * static_cast<double>(output_numel()) * static_cast<double>(c_per_group() * r * s);
  }
  constexpr bool has_residual() const { return residual != Residual::none; }
  // Bias and an activation that is one of comparisons: what kernels with few registers have code of its own for.
  constexpr bool has_plain_epilogue() const {
    return !has_residual() && activation != Activation::silu && !is_gated(activation);
  }
  // Bytes that any algorithm must move: input, weight, residual read once, output written once.
  double compulsory_bytes() const;

  bool operator==(const ConvProblem&) const = default;
};

// Of a residual that is given or not. Without an activation `after` is `before`: one problem, one choice, one key.
constexpr Residual residual_of(bool given, bool after, Activation activation) {
  if (!given) return Residual::none;
  return after && activation != Activation::none ? Residual::after : Residual::before;
}

// The convolution that a pool follows.
ConvProblem without_pool(const ConvProblem& problem);
// That whose outputs are shuffled behind it, into a tensor of their own.
ConvProblem without_shuffle(const ConvProblem& problem);
// That of an input which has been normed before.
ConvProblem without_affine(const ConvProblem& problem);
// That of tensors of their own.
ConvProblem without_ranges(const ConvProblem& problem);

// Of a copy of the input in NHWC, in a workspace (ConvPlan::reads_nhwc).
std::size_t nhwc_input_bytes(const ConvProblem& problem);
// Of both operands of a weight gradient, one behind the other; and where the second one, the gradient, begins.
std::size_t nhwc_operand_bytes(const ConvProblem& problem);
std::size_t nhwc_grad_offset(const ConvProblem& problem);

std::size_t hash_value(const ConvProblem& problem);

std::size_t size_of(DType dtype);  // bytes; 0 for `other`
// The class in which a tensor of `dtype` is computed when the caller asks for `precision` (ieee, fp32 or tf32).
AccuracyClass effective_accuracy(DType dtype, AccuracyClass precision);

}  // namespace fastconv
