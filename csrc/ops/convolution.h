// The steps of a convolution that operators and layers share.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ops/arguments.h"
#include "ops/aten.h"
#include "ops/runtime.h"
#include "ops/stable.h"
#include "plan/gradients.h"
#include "plan/registry.h"

namespace fastconv::ops {

// For last_call(), on this thread. The choice outlives the table that it comes from.
void remember(std::shared_ptr<const Candidate> choice, AccuracyClass accuracy);
void remember_torch(AccuracyClass accuracy);  // whose own convolution ran without a plan
const Algorithm* remembered_algorithm();      // null before the first

// Whether kernels of this library run; false for PyTorch's own convolution alone.
bool is_own(const Algorithm& algorithm);

// Of a dense tensor. One that is both, as any 1x1 filter is, counts as contiguous.
Layout layout_of(const Tensor& dense);

// weight: dense. snapshot: null, or what `packed` was made from (PackArgs).
void pack(const Algorithm& algorithm, const ConvProblem& problem, const Tensor& weight, void* packed, void* snapshot,
          Runtime& runtime);

// What a call may have besides its tensors: an existing output to write to, which may be a range of channels, and an
// affine input: scale and shift, float32 [C] each, contiguous, and the activation behind them.
struct Around {
  std::optional<Tensor> out = {}, scale = {}, shift = {};
  std::string input_activation = "none";
};

// Gives the problem of a call what it has of these. Not empty: why they do not fit it, naming the argument.
std::string set_around(ConvProblem& problem, const Around& around, const std::optional<Tensor>& residual,
                       const Tensor& input);

// activation(y), by PyTorch; negative_slope: of leaky ReLU.
Tensor activate(const Tensor& y, Activation activation, double negative_slope = 0.0);

Tensor dense(const Tensor& weight);  // in channels_last if it is that, else contiguous

// PyTorch's own convolution in the problem's class and layout, with its switches as `backend_flags` has them; without
// an epilogue. transposed: as for aten_convolution.
Tensor torch_convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                         const ConvProblem& problem, std::int64_t backend_flags,
                         const std::optional<OutputPadding>& transposed = {});

// That, with what follows it.
Tensor run_torch(const Tensor& input, const Tensor& weight, const ConvProblem& problem, const Arguments& arguments);

// Runs an algorithm of ours. Exactly one of `weight` (plain) and `packed` is given.
Tensor run_own(const Tensor& input, const Tensor* weight, const Tensor* packed, const Candidate& choice,
               const ConvProblem& problem, const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
               Runtime& runtime, const Around& around = {});

// Whether PyTorch's own convolution, which follows its switch, computes in a class as the switch is now, which Python
// says. admitted: it did when the forward pass ran. In class tf32 that is the answer: PyTorch can only have become more
// accurate since.
bool admits_torch(const Tensor& tensor, AccuracyClass accuracy, bool admitted = false);

// What an operator that is written in Python, without arguments, returns.
std::int64_t integer_of_python(const char* name);

using Sizes4 = std::array<std::int64_t, 4>;

Sizes4 sizes_of(const Tensor& tensor);  // of 4 dimensions

bool is_alike(const Tensor& a, const Tensor& b);  // in dtype and device
bool has_shape(const Tensor& tensor, std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t d);

// The problem of a call; no value if the arguments do not match, or there is nothing to compute.
std::optional<ConvProblem> problem_of(const ConvProblem& settings, const Tensor& input, const Tensor& weight,
                                      const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
                                      AccuracyClass accuracy);

// The same of a weight [K, C/groups, R, S] that is not at hand. channels_last: it is in that format.
std::optional<ConvProblem> problem_of(const ConvProblem& settings, const Tensor& input, const Sizes4& weight,
                                      bool channels_last, const std::optional<Tensor>& bias,
                                      const std::optional<Tensor>& residual, AccuracyClass accuracy);

// That of the convolution whose input gradient of input_size [N, C, H, W] is asked for, with `bias` [C] added to it.
std::optional<ConvProblem> input_gradient_problem(const ConvProblem& settings, const Sizes4& input_size,
                                                  const Tensor& grad, const Tensor& weight,
                                                  const std::optional<Tensor>& bias, AccuracyClass accuracy);

// Calls the operator conv2d, which reports invalid arguments, with a problem's geometry, limits and class, and
// PyTorch's current switches.
Tensor general_convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                           const ConvProblem& problem, const std::string& algorithm);

// dw [K, C/groups, R, S] from input [N, C, H, W] and grad [N, K, P, Q]; tensors in another layout than the problem's
// are copied.
Tensor run_weight_gradient(const Tensor& input, const Tensor& grad, const WeightGradientChoice& choice,
                           const ConvProblem& problem);

// The problem's shuffle of the outputs of its convolution without it, into `out` if that is given: [N, K/4, 2P, 2Q].
Tensor shuffled(const Tensor& y, const ConvProblem& problem, const std::optional<Tensor>& out = {});

// The problem's max-pool of its convolution's y [N, K, P, Q], dense in its layout.
Tensor pooled(const Tensor& y, const ConvProblem& problem);

// By forward convolutions of stride 1 with the filter flipped: dx [N, C, H, W] + bias [C] from grad [N, K, P, Q] and
// weight [K, C/groups, R, S], in the layout of `problem`, which is the forward convolution's. method: not `torch`.
// algorithm: of the convolutions. admitted: as for admits_torch.
Tensor input_gradient_by_convolutions(InputGradientMethod method, const std::string& algorithm,
                                      const ConvProblem& problem, const Tensor& grad, const Tensor& weight,
                                      const std::optional<Tensor>& bias, bool admitted = false);

}  // namespace fastconv::ops
