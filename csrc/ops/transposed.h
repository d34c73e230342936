// A transposed convolution is the input gradient of a convolution, with a bias:
//   Y = conv_transpose2d(X, W)  is  input_gradient(X, W), the gradient of  X = conv(Y, W),
// so that the planner's answer for that gradient is the answer here, and the kernels are the same.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "core/problem.h"
#include "ops/aten.h"
#include "ops/stable.h"
#include "plan/gradients.h"

namespace fastconv::ops {

// The problem of that convolution, whose input is the output here. No value if the arguments do not match, there is
// nothing to compute, or no convolution has this as its input gradient.
std::optional<ConvProblem> transposed_problem(const ConvProblem& settings, const OutputPadding& output_padding,
                                              const Tensor& input, const Tensor& weight,
                                              const std::optional<Tensor>& bias, AccuracyClass accuracy);

// Whether PyTorch's own may run where `algorithm` is asked for.
inline bool may_be_torch(const std::string& algorithm) { return algorithm == "auto" || algorithm == "torch"; }

// Of the convolutions, where `asked` is what the transposed one is to be computed by.
inline const std::string& algorithm_of(const InputGradientChoice& choice, const std::string& asked) {
  return asked == "auto" ? choice.algorithm : asked;
}

// Calls the operator conv_transpose2d, as general_convolution calls conv2d.
Tensor general_transposed(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                          const ConvProblem& settings, const OutputPadding& output_padding,
                          const std::string& algorithm);

}  // namespace fastconv::ops
