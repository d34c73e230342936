"""The operator `conv_transpose2d`: a transposed convolution is the input gradient of a convolution, with a bias.

    Y = conv_transpose2d(X, W)  is  input_gradient(X, W), the gradient of  X = conv(Y, W)

so the planner's answer for that gradient is the answer here, and so are the kernels. Its own derivatives are that
convolution and its weight gradient: it joins the closed system of `autograd`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastconv import _C, ops
from fastconv.ops import autograd, plain
from fastconv.ops.geometry import Geometry
from fastconv.tensors import is_without_pixels


def output_size(
    input_size: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    output_padding: Sequence[int], dilation: Sequence[int],
) -> list[int]:  # fmt: skip
    """Height and width of the output from the sizes' last two."""
    return [
        (input_size[i - 2] - 1) * stride[i] - 2 * padding[i] + dilation[i] * (kernel[i - 2] - 1) + output_padding[i] + 1
        for i in range(2)
    ]


def reason_for_torch(stride: Sequence[int], output_padding: Sequence[int], dilation: Sequence[int]) -> str:
    """Why no convolution has this as its input gradient, though PyTorch admits it; else empty."""
    triples = list(zip(output_padding, stride, dilation, strict=True))
    if all(extra < step for extra, step, _ in triples) or any(extra >= max(rest) for extra, *rest in triples):
        return ""
    return f"output_padding is {list(output_padding)}; expected less than the stride {list(stride)}"


def convolutions(
    weight_size: Sequence[int], input_size: Sequence[int], geometry: Geometry, output_padding: Sequence[int],
    common: dict[str, Any],
) -> list[_C.ConvProblem]:  # fmt: skip
    """The forward convolutions, each once, that an algorithm of ours makes of one image [H, W] of the input, those with
    the largest filters first; `common`: what else the planner is told. Raises ValueError for what is none."""
    stride, padding, dilation, groups = geometry
    c, k_per_group = weight_size[:2]
    kernel = weight_size[2:]
    height, width = output_size(input_size, weight_size, stride, padding, output_padding, dilation)
    problem = _C.ConvProblem(
        n=1, c=k_per_group * groups, h=height, w=width, k=c, r=kernel[0], s=kernel[1], stride=tuple(stride),
        padding=tuple(padding), dilation=tuple(dilation), groups=groups, **common,
    )  # fmt: skip
    # Any name of ours asks for our convolutions.
    made: list[_C.ConvProblem] = _C.choose_input_gradient("implicit_gemm", problem, _C.cpu_device(1))["different"]
    return sorted(made, key=lambda one: -one.r * one.s)


@torch.library.register_fake(ops.conv_transpose2d_compiled_op, lib=ops.library)
@torch.library.register_fake(ops.conv_transpose2d_op, lib=ops.library)
def _(input, weight, bias, stride, padding, output_padding, dilation, groups, *_):  # type: ignore[no-untyped-def]
    def check(condition: Any, message: str) -> None:
        torch._check(condition, lambda: "fastconv: " + message)

    for name, tensor, layout in (("input", input, "[N, C, H, W]"), ("weight", weight, "[C, K/groups, R, S]")):
        check(tensor.dim() == 4, f"{name} has shape {list(tensor.shape)}; expected 4 dimensions {layout}")
    check(weight.dtype == input.dtype, f"weight is {weight.dtype}; expected input's {input.dtype}")
    check(weight.device == input.device, f"weight is on {weight.device}; expected input's {input.device}")
    pairs = (("stride", stride, 1), ("padding", padding, 0), ("output_padding", output_padding, 0),
             ("dilation", dilation, 1))  # fmt: skip
    for name, pair, least in pairs:
        check(len(pair) == 2, f"{name} is {list(pair)}; expected two integers")
        for value in pair:
            check(value >= least, f"{name} is {list(pair)}; expected two integers of at least {least}")
    for i in range(2):
        check(
            output_padding[i] < max(stride[i], dilation[i]),
            f"output_padding is {list(output_padding)}; expected less than the stride {list(stride)} or the dilation "
            f"{list(dilation)}",
        )
    c, k_per_group = weight.shape[:2]
    check(groups > 0, f"groups is {groups}; expected a positive integer")
    check(c > 0, f"weight has C = {c} input channels; expected at least 1")
    check(c % groups == 0, f"weight has C = {c} input channels; expected a multiple of groups = {groups}")
    check(input.shape[1] == c, f"input has C = {input.shape[1]} channels; expected weight.shape[0] = {c}")
    if type(input.shape[0]) is int and input.shape[0] != 0:  # a symbol is not zero
        for extent in input.shape[2:]:
            check(extent > 0, f"input has shape {list(input.shape)}; expected H and W of at least 1")
    size = output_size(input.shape, weight.shape, stride, padding, output_padding, dilation)
    shape = [input.shape[0], k_per_group * groups, *size]
    for value in size:
        check(value >= 0, f"input has shape {list(input.shape)}; expected an output of at least 0x0, not {size}")
    if bias is not None:
        check(bias.dim() == 1, f"bias has shape {list(bias.shape)}; expected {shape[1:2]}")
        check(bias.shape[0] == shape[1], f"bias has shape {list(bias.shape)}; expected {shape[1:2]}")
        check(bias.dtype == input.dtype, f"bias is {bias.dtype}; expected input's {input.dtype}")
        check(bias.device == input.device, f"bias is on {bias.device}; expected input's {input.device}")
    return torch.empty(shape, dtype=input.dtype, device=input.device, memory_format=ops.format_of(input, weight))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, weight, _, stride, padding, output_padding, dilation, groups, algorithm, *rest = inputs
    ctx.geometry = stride, padding, dilation, groups
    # Rows and columns that a convolution makes of the output beside the input's own.
    ctx.more = [extra // step for extra, step in zip(output_padding, stride, strict=True)]
    # A name says what computes the transposed convolution; its derivatives are others, which it may not fit.
    ctx.algorithm = "torch" if algorithm == "torch" else "auto"
    ctx.precision, ctx.flags, *ctx.limits = rest
    ctx.sizes, ctx.input_sizes = weight.shape, input.shape
    ctx.save_for_backward(input if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    input, weight = ctx.saved_tensors
    shared = (*ctx.geometry, ctx.algorithm, ctx.precision)
    of_input, of_weight, of_bias = ctx.needs_input_grad[:3]
    dx = dw = None
    if is_without_pixels(grad):
        dx = grad.new_zeros(ctx.input_sizes) if of_input else None
        dw = grad.new_zeros(ctx.sizes) if of_weight else None
        return dx, dw, grad.sum((0, 2, 3)) if of_bias else None, *[None] * 10
    if of_input:
        dx = autograd.conv2d(grad, weight, None, None, *shared, "none", 0.0, ctx.flags, *ctx.limits)
        dx = dx[:, :, : dx.shape[2] - ctx.more[0], : dx.shape[3] - ctx.more[1]] if any(ctx.more) else dx
    if of_weight:
        x = F.pad(input, (0, ctx.more[1], 0, ctx.more[0])) if any(ctx.more) else input
        dw = autograd.weight_gradient(grad, x, ctx.sizes, *shared, ctx.flags, *ctx.limits)
    return dx, dw, grad.sum((0, 2, 3)) if of_bias else None, *[None] * 10


def _vmap(info, in_dims, *args):  # type: ignore[no-untyped-def]
    input, weight, bias, stride, padding, output_padding, dilation, groups, algorithm, *rest = args
    size = info.batch_size
    x = autograd._batched(input, in_dims[0], size)  # [B, N, C, H, W]
    own = bias if in_dims[2] is None and in_dims[1] is None else None
    if in_dims[1] is None:
        y = conv_transpose2d(
            x.flatten(0, 1), weight, own, stride, padding, output_padding, dilation, groups, algorithm, *rest
        ).unflatten(0, (size, x.shape[1]))
    elif algorithm not in ("auto", "torch"):  # asked for by name: more groups may be more than it can do
        return autograd._loop(conv_transpose2d, info, in_dims, args)
    else:
        filters = autograd._batched(weight, in_dims[1], size).flatten(0, 1)
        wide = autograd._into_channels(x)
        y = conv_transpose2d(
            wide, filters, None, stride, padding, output_padding, dilation, size * groups, algorithm, *rest
        )
        y = y.unflatten(1, (size, y.shape[1] // size)).movedim(1, 0)
    if bias is not None and own is None:
        y = y + autograd._batched(bias, in_dims[2], size)[:, None, :, None, None]
    return y, 0


# input [N, C, H, W], weight [C, K/groups, R, S], bias [K], stride, padding, output_padding, dilation, groups,
# algorithm, precision, flags, max_error=None, max_workspace=None -> [N, K, P, Q]
conv_transpose2d = autograd._differentiable(ops.conv_transpose2d_op, _setup, _backward, _vmap, plain.conv_transpose2d)
