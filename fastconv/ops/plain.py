"""The convolution and its gradients by PyTorch's own operators, in the class asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastconv import settings
from fastconv.ops.geometry import Geometry, Options

aten = torch.ops.aten


def is_of_class(tensor: Tensor, precision: str) -> bool:
    """Whether PyTorch's own convolution, which follows its global switch, computes in the class asked for."""
    if not tensor.is_cuda or tensor.dtype != torch.float32:
        return True
    return (settings.cuda_precision() == "tf32") == (precision == "tf32")


def conv2d(
    input: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], groups: int, *options: Any,
) -> Tensor:  # fmt: skip
    """The operator `conv2d`. An algorithm and limits say nothing here."""
    asked = Options(*options)
    y = aten._convolution(
        input, weight, bias, stride, padding, dilation, False, [0, 0], groups,
        *settings.unpack_flags(asked.backend_flags), asked.precision == "tf32",
    )  # fmt: skip
    y = epilogue(y, residual, asked.activation, asked.negative_slope, asked.residual_after)
    return pooled(y) if asked.max_pool else y


def epilogue(y: Tensor, residual: Tensor | None, activation: str, slope: float, residual_after: bool = False) -> Tensor:
    """activation(y + residual), or activation(y) + residual, by PyTorch."""
    if residual is not None and not residual_after:
        y = y + residual.to(y.dtype)
    if activation != "none":
        y = activate(y, activation, slope)
    return y + residual.to(y.dtype) if residual is not None and residual_after else y


def pooled(y: Tensor) -> Tensor:
    """The largest of each 2 x 2: [N, K, P, Q] -> [N, K, P // 2, Q // 2], by PyTorch."""
    return F.max_pool2d(y, 2)


def activate(y: Tensor, activation: str, slope: float, inplace: bool = False) -> Tensor:
    """activation(y), by PyTorch; not of "none"."""
    if activation == "leaky_relu":
        return F.leaky_relu(y, slope, inplace)
    if activation in ("gelu", "gelu_tanh"):
        return (aten.gelu_ if inplace else aten.gelu)(y, approximate="tanh" if activation == "gelu_tanh" else "none")
    if activation == "sigmoid":
        return y.sigmoid_() if inplace else y.sigmoid()
    return {"relu": F.relu, "relu6": F.relu6, "silu": F.silu, "hardswish": F.hardswish}[activation](y, inplace)


def conv_transpose2d(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    output_padding: Sequence[int], dilation: Sequence[int], groups: int, algorithm: str, precision: str, flags: int,
    *limits: Any,
) -> Tensor:  # fmt: skip
    """The operator `conv_transpose2d`. `algorithm` and `limits` are its, and say nothing here."""
    return aten._convolution(
        input, weight, bias, stride, padding, dilation, True, output_padding, groups, *settings.unpack_flags(flags),
        precision == "tf32",
    )  # fmt: skip


def input_gradient_as_convolution(
    grad: Tensor, weight: Tensor, input_size: Sequence[int], geometry: Geometry, precision: str, flags: int
) -> Tensor:
    """The input gradient [N, C, H, W] as a transposed convolution, which takes the class as an argument. What the
    stride left over is its output padding."""
    stride, padding, dilation, groups = geometry
    extent = [dilation[i] * (weight.shape[i + 2] - 1) for i in range(2)]
    reached = [(grad.shape[i + 2] - 1) * stride[i] - 2 * padding[i] + extent[i] + 1 for i in range(2)]
    rest = [input_size[i + 2] - reached[i] for i in range(2)]
    return conv_transpose2d(grad, weight, None, stride, padding, rest, dilation, groups, "torch", precision, flags)


def weight_gradient_as_convolution(
    input: Tensor, grad: Tensor, weight_size: Sequence[int], geometry: Geometry, precision: str, flags: int
) -> Tensor:
    """The weight gradient [K, C/groups, R, S] as a convolution over N, P, Q: channels take the place of the batch,
    stride and dilation change places, and rows that the stride did not reach are cropped."""
    stride, padding, dilation, groups = geometry
    n, c, h, w = input.shape
    x = input.reshape(n, groups, c // groups, h, w).permute(2, 1, 0, 3, 4).reshape(c // groups, groups * n, h, w)
    filters = grad.transpose(0, 1)  # [K, N, P, Q]
    result = aten._convolution(
        x, filters, None, dilation, padding, stride, False, [0, 0], groups, *settings.unpack_flags(flags),
        precision == "tf32",
    )  # fmt: skip
    return result[:, :, : weight_size[2], : weight_size[3]].transpose(0, 1)
