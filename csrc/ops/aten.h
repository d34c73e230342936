// PyTorch's operators that are called on every convolution, through the C functions that Inductor's code uses: about a
// microsecond each. A call by name through the dispatcher, which boxes every argument and copies every list twice,
// takes five to fifteen.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "core/problem.h"
#include "ops/stable.h"

namespace fastconv::ops {

// Uninitialised, of the dtype and on the device of `like`.
Tensor empty(const std::array<std::int64_t, 4>& shape, Layout layout, const Tensor& like);
Tensor empty_bytes(std::size_t bytes, const Tensor& like);

using OutputPadding = std::array<std::int64_t, 2>;  // of height and width: what the stride leaves open

// aten::convolution, as PyTorch's switches have it; the problem's epilogue and layout say nothing. transposed: of a
// transposed convolution, where the problem is that of the convolution whose input gradient it is.
Tensor aten_convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                        const ConvProblem& problem, const std::optional<OutputPadding>& transposed = {});

// aten::convolution_backward of input, weight and bias; undefined tensors where they are not wanted.
std::array<Tensor, 3> aten_convolution_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                                const ConvProblem& problem, const std::array<bool, 3>& wanted,
                                                const std::optional<OutputPadding>& transposed = {});

}  // namespace fastconv::ops
