"""Convolution, residual, activation and max-pool where one operator does not serve them all."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastconv import ops
from fastconv.functional import conv2d, kernel_of
from fastconv.ops.geometry import pair
from fastconv.ops.plain import activate


def explicit_padding(x: Tensor, weight: Tensor, padding: Any, dilation: Any) -> tuple[Tensor, Any]:
    """Padding as two integers; what of "same" is not symmetric is added to the input, at its end, as PyTorch does."""
    if padding == "valid":
        return x, (0, 0)
    if padding != "same":
        return x, tuple(pair("padding", padding))
    total = [d * (size - 1) for d, size in zip(pair("dilation", dilation), kernel_of(weight), strict=True)]
    if any(t % 2 for t in total) and x.dim() in (3, 4):
        x = F.pad(x, [0, total[1] % 2, 0, total[0] % 2])
    return x, (total[0] // 2, total[1] // 2)


def conv2d_with_epilogue(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int,
    residual: Any, activation: str, slope: float, in_place: bool, algorithm: str, precision: str | None,
    max_error: float | None = None, max_workspace: int | None = None, residual_after: bool = False,
    max_pool: bool = False,
) -> Tensor:  # fmt: skip
    """conv2d with an epilogue. What the operator does not take as a residual is added by PyTorch."""
    x, padding = explicit_padding(x, weight, padding, dilation)
    asked: dict[str, Any] = {"algorithm": algorithm, "precision": precision, "max_error": max_error}
    asked["max_workspace"] = max_workspace
    if residual is not None and not max_pool and not is_output_like(residual, x, weight, stride, padding, dilation):
        inside = None if activation == "none" or not residual_after else activation
        y = conv2d(x, weight, bias, stride, padding, dilation, groups, activation=inside, negative_slope=slope, **asked)
        y = y.add_(residual) if in_place else y + residual
        return y if activation == "none" or residual_after else activate(y, activation, slope)
    asked |= {"residual": residual, "activation": None if activation == "none" else activation}
    asked |= {"residual_after": residual_after, "max_pool": max_pool}
    return conv2d(x, weight, bias, stride, padding, dilation, groups, negative_slope=slope, **asked)


def is_output_like(residual: Any, x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any) -> bool:
    """Whether the residual has the shape, dtype and device of the convolution's output."""
    if not isinstance(residual, Tensor) or residual.dim() != x.dim() or residual.device != x.device:
        return False
    autocast = torch.is_autocast_enabled(x.device.type)
    if residual.dtype != (torch.get_autocast_dtype(x.device.type) if autocast else x.dtype):
        return False
    size = ops.output_size(
        x.shape, weight.shape, pair("stride", stride), pair("padding", padding), pair("dilation", dilation)
    )
    return list(residual.shape) == [*x.shape[:-3], weight.shape[0], *size]
