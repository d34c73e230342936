"""A convolution as a matrix product of cuBLAS: directly for 1x1, after unrolling the input elsewhere.

The product is torch.matmul with the switches of the class: FP32 without or with TF32; in half types PyTorch's defaults.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from fastconv.models.layers import Layer


def is_product(layer: Layer) -> bool:
    """Whether the layer is a matrix product as it stands: 1x1, stride 1, no padding, one group."""
    return (layer.r, layer.s, layer.stride, layer.padding, layer.groups) == (1, 1, 1, 0, 1)


def convolution(
    x: Tensor, weight: Tensor, layer: Layer, tf32: bool, direction: str = "forward", grad: Tensor | None = None
) -> Tensor:
    """The convolution, or its gradient of `direction` for `grad` [N, K, P, Q]; everything is timed, unrolling too."""
    with _tf32(tf32):
        if is_product(layer):
            return _pointwise(x, weight, direction, grad)
        return _unrolled(x, weight, layer, direction, grad)


def pointwise_relu(x: Tensor, weight: Tensor, tf32: bool, bias: Tensor) -> Tensor:
    """ReLU(1x1 convolution + bias [K]) of x in channels_last, in one product whose end has bias and ReLU."""
    n, c, h, w = x.shape
    pixels, filters = x.permute(0, 2, 3, 1).reshape(-1, c), weight.reshape(-1, c)
    with _tf32(tf32):
        return torch._addmm_activation(bias, pixels, filters.t()).view(n, h, w, -1).permute(0, 3, 1, 2)


@contextlib.contextmanager
def _tf32(allow: bool) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allow
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _pointwise(x: Tensor, weight: Tensor, direction: str, grad: Tensor | None) -> Tensor:
    (n, c, h, w), k = x.shape, weight.shape[0]
    filters = weight.reshape(k, c)
    if x.is_contiguous():
        x = x.view(n, c, h * w)
        if grad is None:
            return torch.matmul(filters, x).view(n, k, h, w)
        grad = grad.reshape(n, k, h * w)
        if direction == "backward_input":
            return torch.matmul(filters.t(), grad).view(n, c, h, w)
        return torch.matmul(grad, x.transpose(1, 2)).sum(0).view(k, c, 1, 1)
    pixels = x.permute(0, 2, 3, 1).reshape(-1, c)  # a view of channels_last
    if grad is None:
        return torch.matmul(pixels, filters.t()).view(n, h, w, k).permute(0, 3, 1, 2)
    grad = grad.permute(0, 2, 3, 1).reshape(-1, k)
    if direction == "backward_input":
        return torch.matmul(grad, filters).view(n, h, w, c).permute(0, 3, 1, 2)
    return torch.matmul(grad.t(), pixels).view(k, c, 1, 1)


def _unrolled(x: Tensor, weight: Tensor, layer: Layer, direction: str, grad: Tensor | None) -> Tensor:
    n, groups, depth = x.shape[0], layer.groups, weight[0].numel()
    geometry = {"dilation": layer.dilation, "padding": layer.padding, "stride": layer.stride}
    filters = weight.reshape(groups, -1, depth)  # [groups, K/groups, C/groups R S]
    outputs = x if grad is None else grad.reshape(n, groups, layer.k // groups, -1)  # unread in the forward pass
    if direction == "backward_input":
        columns = torch.matmul(filters.transpose(1, 2), outputs).view(n, groups * depth, -1)
        return functional.fold(columns, (layer.h, layer.w), (layer.r, layer.s), **geometry)
    columns = functional.unfold(x, (layer.r, layer.s), **geometry).view(n, groups, depth, -1)
    if grad is None:
        return torch.matmul(filters, columns).view(n, layer.k, layer.p, layer.q)
    return torch.matmul(outputs, columns.transpose(2, 3)).sum(0).view(weight.shape)
