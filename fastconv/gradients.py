"""Kernels of the two gradients: functions of the forward operator where that serves, else PyTorch's own."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fastconv import ops, settings
from fastconv.input_gradient import own_input_gradient


def torch_agrees(tensor: Tensor, precision: str) -> bool:
    """Whether PyTorch's own convolution, which follows its global switch, computes in the class asked for."""
    if not tensor.is_cuda or tensor.dtype != torch.float32:
        return True
    return (settings.cuda_precision() == "tf32") == (precision == "tf32")


def input_gradient(
    grad: Tensor, weight: Tensor, input_size: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], groups: int, algorithm: str, precision: str, backend_flags: int,
    max_error: float | None = None,
) -> Tensor:  # fmt: skip
    memory_format = ops.format_of(grad, weight)
    # Of a DTensor grad and weight are this process's parts, and input_size is of the whole.
    input_size = [grad.shape[0], weight.shape[1] * groups, *input_size[2:]]
    if _has_own_input_gradient(grad, weight, stride, padding, dilation, algorithm):

        def convolve(input: Tensor, filters: Tensor, padding: Sequence[int], dilation: Sequence[int]) -> Tensor:
            return ops.call(
                ops.conv2d_op, input, filters, None, None, [1, 1], padding, dilation, groups, "auto", precision, "none",
                0.0, backend_flags, max_error,
            )  # fmt: skip

        grad = grad.contiguous(memory_format=memory_format)
        return own_input_gradient(convolve, grad, weight, input_size, stride, padding, dilation, groups, memory_format)
    if torch_agrees(grad, precision):
        like = torch.empty(input_size, dtype=grad.dtype, device=grad.device, memory_format=memory_format)
        result = torch.ops.aten.convolution_backward(
            grad, like, weight, None, stride, padding, dilation, False, [0, 0], groups, [True, False, False]
        )[0]
    else:
        result = input_gradient_as_convolution(
            grad, weight, input_size, stride, padding, dilation, groups, precision, backend_flags
        )
    return result.contiguous(memory_format=memory_format)


def _has_own_input_gradient(
    grad: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    algorithm: str,
) -> bool:  # fmt: skip
    """Whether the input gradient is computed by our forward convolutions. With a stride these write in turn into what
    must then be woven together: that pays where PyTorch's is slow, on CUDA. Half types stay with PyTorch there, whose
    input gradient is faster than turning the filter and packing it (docs/results.md)."""
    if algorithm == "torch" or math.prod(grad.shape) == 0 or math.prod(weight.shape) == 0:
        return False
    if algorithm == "auto" and weight.shape[1] < 8:  # so few filters leave our convolutions' tiles empty
        return False
    plain = list(stride) == [1, 1] and all(dilation[i] * (weight.shape[i + 2] - 1) >= padding[i] for i in range(2))
    if algorithm != "auto":
        return True
    return grad.dtype == torch.float32 if grad.is_cuda else plain


def input_gradient_as_convolution(
    grad: Tensor, weight: Tensor, input_size: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], groups: int, precision: str, backend_flags: int,
) -> Tensor:  # fmt: skip
    """The input gradient [N, C, H, W] as a transposed convolution, which takes the class as an argument. What the
    stride left over is its output padding."""
    extent = [dilation[i] * (weight.shape[i + 2] - 1) for i in range(2)]
    reached = [(grad.shape[i + 2] - 1) * stride[i] - 2 * padding[i] + extent[i] + 1 for i in range(2)]
    rest = [input_size[i + 2] - reached[i] for i in range(2)]
    return torch.ops.aten._convolution(
        grad, weight, None, stride, padding, dilation, True, rest, groups, *settings.unpack_flags(backend_flags),
        precision == "tf32",
    )  # fmt: skip


def weight_gradient(
    input: Tensor, grad: Tensor, weight_size: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], groups: int, algorithm: str, precision: str, backend_flags: int,
    max_error: float | None = None,
) -> Tensor:  # fmt: skip
    memory_format = ops.format_of(input, grad)
    if math.prod(weight_size) != 0:  # as for the input gradient
        weight_size = [grad.shape[1], input.shape[1] // groups, *weight_size[2:]]
    geometry = (weight_size, stride, padding, dilation, groups, memory_format == torch.channels_last)
    reason = ops.weight_gradient_reason(input, grad, *geometry, algorithm, precision, max_error)
    agrees = torch_agrees(grad, precision) or math.prod(input.shape) == 0 or math.prod(grad.shape) == 0
    if reason and algorithm == "auto" and not agrees:
        # PyTorch's gradient, estimated to be faster, is one in another class; in this one it is far slower.
        algorithm = "implicit_gemm"
        reason = ops.weight_gradient_reason(input, grad, *geometry, algorithm, precision, max_error)
    if settings.log_calls:
        settings.logger.debug("weight gradient %s: %s", list(weight_size), "PyTorch, " + reason if reason else "own")
    if not reason:
        return ops.call(ops.weight_gradient_kernel_op, input, grad, *geometry, algorithm, precision, max_error)
    like_format = memory_format
    if not agrees and precision != "tf32" and groups == input.shape[1]:
        # PyTorch's kernel for depthwise float32 in NCHW is its own, which knows no TF32.
        input, grad, like_format, agrees = input.contiguous(), grad.contiguous(), torch.contiguous_format, True
    if agrees:
        like = torch.empty(weight_size, dtype=grad.dtype, device=grad.device, memory_format=like_format)
        result = torch.ops.aten.convolution_backward(
            grad, input, like, None, stride, padding, dilation, False, [0, 0], groups, [False, True, False]
        )[1]
    else:
        result = weight_gradient_as_convolution(
            input, grad, weight_size, stride, padding, dilation, groups, precision, backend_flags
        )
    return result.contiguous(memory_format=memory_format)


def weight_gradient_as_convolution(
    input: Tensor, grad: Tensor, weight_size: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], groups: int, precision: str, backend_flags: int,
) -> Tensor:  # fmt: skip
    """The weight gradient [K, C/groups, R, S] as a convolution over N, P, Q: channels take the place of the batch,
    stride and dilation change places, and rows that the stride did not reach are cropped."""
    n, c, h, w = input.shape
    x = input.reshape(n, groups, c // groups, h, w).permute(2, 1, 0, 3, 4).reshape(c // groups, groups * n, h, w)
    filters = grad.transpose(0, 1)  # [K, N, P, Q]
    result = torch.ops.aten._convolution(
        x, filters, None, dilation, padding, stride, False, [0, 0], groups, *settings.unpack_flags(backend_flags),
        precision == "tf32",
    )  # fmt: skip
    return result[:, :, : weight_size[2], : weight_size[3]].transpose(0, 1)
