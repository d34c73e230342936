"""Kernels of the two gradients: functions of the forward operator where that serves, else PyTorch's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastconv import ops, settings
from fastconv.ops import plain
from fastconv.ops.geometry import Geometry, Options, from_operator
from fastconv.tensors import is_distributed

_is_transformed = torch._C._are_functorch_transforms_active


def input_gradient(
    grad: Tensor, weight: Tensor, input_size: Sequence[int], geometry: Geometry, algorithm: str, precision: str,
    flags: int, *limits: Any,
) -> Tensor:  # fmt: skip
    """The input gradient [N, C, H, W] from grad [N, K, P, Q] and weight [K, C/groups, R, S]."""
    # Of a DTensor grad and weight are this process's parts, and input_size is of the whole.
    input_size = [grad.shape[0], weight.shape[1] * geometry.groups, *input_size[2:]]
    own = not plain.is_of_class(grad, precision)
    choice = ops.input_gradient_choice(grad, weight, input_size, *geometry, algorithm, precision, own, *limits)
    return input_gradient_by(choice, grad, weight, input_size, geometry, precision, flags, *limits)


def input_gradient_by(
    choice: str, grad: Tensor, weight: Tensor, input_size: Sequence[int], geometry: Geometry, precision: str,
    flags: int, *limits: Any,
) -> Tensor:  # fmt: skip
    """The same by what the planner's choices are called: "torch", or a method and an algorithm."""
    if choice != "torch":
        method, algorithm = choice.split()
        return ops.input_gradient_by_convolutions(
            grad, weight, None, input_size, *geometry, method == "together", algorithm, precision, *limits
        )
    memory_format = ops.format_of(grad, weight)
    if plain.is_of_class(grad, precision):
        stride, padding, dilation, groups = geometry
        like = torch.empty(input_size, dtype=grad.dtype, device=grad.device, memory_format=memory_format)
        result = torch.ops.aten.convolution_backward(
            grad, like, weight, None, stride, padding, dilation, False, [0, 0], groups, [True, False, False]
        )[0]
    else:
        result = plain.input_gradient_as_convolution(grad, weight, input_size, geometry, precision, flags)
    return result.contiguous(memory_format=memory_format)


def weight_gradient(
    input: Tensor, grad: Tensor, weight_size: Sequence[int], geometry: Geometry, algorithm: str, precision: str,
    flags: int, *limits: Any,
) -> Tensor:  # fmt: skip
    """The weight gradient [K, C/groups, R, S] from input [N, C, H, W] and grad [N, K, P, Q]."""
    memory_format = ops.format_of(input, grad)
    if math.prod(weight_size) == 0:  # whose output has shapes of PyTorch's own: no filters where there are no channels
        return grad.new_empty(weight_size)
    weight_size = [grad.shape[1], input.shape[1] // geometry.groups, *weight_size[2:]]
    problem = (weight_size, *geometry, memory_format == torch.channels_last)
    reason = ops.weight_gradient_reason(input, grad, *problem, algorithm, precision, *limits)
    empty = math.prod(input.shape) == 0 or math.prod(grad.shape) == 0
    agrees = empty or plain.is_of_class(grad, precision)
    if reason and algorithm == "auto" and not agrees:
        # PyTorch's gradient, estimated to be faster, is one in another class; in this one it is far slower.
        algorithm = "implicit_gemm"
        reason = ops.weight_gradient_reason(input, grad, *problem, algorithm, precision, *limits)
    if settings.log_calls:
        settings.logger.debug("weight gradient %s: %s", list(weight_size), "PyTorch, " + reason if reason else "own")
    choice = "torch" if reason else algorithm
    return weight_gradient_by(choice, input, grad, weight_size, geometry, precision, flags, *limits)


def weight_gradient_by(
    choice: str, input: Tensor, grad: Tensor, weight_size: Sequence[int], geometry: Geometry, precision: str,
    flags: int, *limits: Any,
) -> Tensor:  # fmt: skip
    """The same by an algorithm of ours, or by PyTorch."""
    stride, padding, dilation, groups = geometry
    memory_format = like_format = ops.format_of(input, grad)
    if choice != "torch":
        problem = (weight_size, *geometry, memory_format == torch.channels_last)
        return ops.call(ops.weight_gradient_kernel_op, input, grad, *problem, choice, precision, *limits)
    empty = math.prod(input.shape) == 0 or math.prod(grad.shape) == 0
    agrees = empty or plain.is_of_class(grad, precision)
    if not agrees and precision != "tf32" and groups == input.shape[1]:
        # PyTorch's kernel for depthwise float32 in NCHW is its own, which knows no TF32.
        input, grad, like_format, agrees = input.contiguous(), grad.contiguous(), torch.contiguous_format, True
    if agrees:
        like = torch.empty(weight_size, dtype=grad.dtype, device=grad.device, memory_format=like_format)
        result = torch.ops.aten.convolution_backward(
            grad, input, like, None, stride, padding, dilation, False, [0, 0], groups, [False, True, False]
        )[1]
    else:
        result = plain.weight_gradient_as_convolution(input, grad, weight_size, geometry, precision, flags)
    return result.contiguous(memory_format=memory_format)


def both(
    grad: Tensor, input: Tensor, weight: Tensor, geometry: Geometry, asked: Options
) -> tuple[Tensor, Tensor] | None:
    """Both gradients of a backward pass that nobody differentiates, by one operator, which compiled code calls without
    any Python of ours; None if it is not for that."""
    if torch.is_grad_enabled() or _is_transformed() or forward_ad._current_level >= 0 or is_distributed(grad):
        return None
    if settings.log_calls or not all(type(size) is int for size in geometry.sizes):
        return None
    text = ops.compiled_settings(geometry.sizes, asked.bare)
    found: tuple[Tensor, Tensor] = ops.call(ops.conv2d_gradients_op, grad, input, weight, text)
    return found


ops.library.impl("conv2d_input_gradient", from_operator(input_gradient), "CompositeExplicitAutograd")
ops.library.impl("conv2d_weight_gradient", from_operator(weight_gradient), "CompositeExplicitAutograd")
