// The input gradient of a convolution, made of forward convolutions of stride 1 with the filter flipped.
#pragma once

#include <optional>
#include <string>

#include "ops/stable.h"
#include "plan/gradients.h"

namespace fastconv::ops {

// dx [N, C, H, W] + bias [C] from grad [N, K, P, Q] and weight [K, C/groups, R, S], in the layout of `problem`, which
// is the forward convolution's. method: not `torch`. algorithm: of the convolutions. admitted: as for admits_torch.
Tensor input_gradient_by_convolutions(InputGradientMethod method, const std::string& algorithm,
                                      const ConvProblem& problem, const Tensor& grad, const Tensor& weight,
                                      const std::optional<Tensor>& bias, bool admitted = false);

}  // namespace fastconv::ops
