"""Fake implementations of the operators: the kernels' shapes, memory formats and checks, symbolically."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastconv import ops
from fastconv.ops.geometry import Geometry, Options
from fastconv.ops.shuffling import shuffled_shape


def _fake_conv2d(
    input: Tensor, weight_shape: Sequence[int], bias: Tensor | None, residual: Tensor | None, geometry: Geometry,
    max_pool: bool, memory_format: torch.memory_format,
) -> Tensor:  # fmt: skip
    stride, padding, dilation, groups = geometry

    def check(condition: Any, message: str) -> None:
        torch._check(condition, lambda: "fastconv: " + message)

    check(input.dim() == 4, f"input has shape {list(input.shape)}; expected 4 dimensions [N, C, H, W]")
    check(len(weight_shape) == 4, f"weight has shape {list(weight_shape)}; expected 4 dimensions [K, C/groups, R, S]")
    k, c_per_group = weight_shape[0], weight_shape[1]
    for name, pair, least in (("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1)):
        check(len(pair) == 2, f"{name} is {list(pair)}; expected two integers")
        for value in pair:
            check(value >= least, f"{name} is {list(pair)}; expected two integers of at least {least}")
    check(k > 0, f"weight has K = {k} output channels; expected at least 1")
    check(groups > 0, f"groups is {groups}; expected a positive integer")
    check(k % groups == 0, f"weight has K = {k} output channels; expected a multiple of groups = {groups}")
    check(
        input.shape[1] == c_per_group * groups,
        f"input has C = {input.shape[1]} channels; expected weight.shape[1] * groups = {c_per_group * groups}",
    )
    p, q = ops.output_size(input.shape, weight_shape, stride, padding, dilation)
    shape = [input.shape[0], 0 if c_per_group == 0 else k, p, q]  # as PyTorch: no channels in, none out
    if all(type(size) is int for size in input.shape) and math.prod(input.shape[:2]) != 0:  # a symbol is not zero
        check(math.prod(input.shape[2:]) != 0, f"input has shape {list(input.shape)}; expected H and W of at least 1")
    for size in (p, q):
        check(size > 0, f"padded input of shape {list(input.shape)} is smaller than the kernel {list(weight_shape)}")
    for name, tensor, expected in (("bias", bias, [k]), ("residual", residual, shape)):
        if tensor is None:
            continue
        check(tensor.device == input.device, f"{name} is on {tensor.device}; expected input's {input.device}")
        check(tensor.dim() == len(expected), f"{name} has shape {list(tensor.shape)}; expected {expected}")
        for size, wanted in zip(tensor.shape, expected, strict=True):
            check(size == wanted, f"{name} has shape {list(tensor.shape)}; expected {expected}")
        check(tensor.dtype == input.dtype, _mistaken_dtype(name, tensor, input))
    if max_pool:
        check(residual is None, "max_pool is True; expected no residual beside it")
        for size in (p, q):
            check(size >= 2, f"max_pool is True of an output of {[p, q]}; expected at least [2, 2]")
        shape[2:] = p // 2, q // 2
    return torch.empty(shape, dtype=input.dtype, device=input.device, memory_format=memory_format)


def _mistaken_dtype(name: str, tensor: Tensor, input: Tensor) -> str:
    given, expected = (str(value.dtype).removeprefix("torch.") for value in (tensor, input))
    return f"{name} is {given}; expected input's {expected}"


def _read(settings: str) -> tuple[bool, list[int]]:
    """max_pool and sizes in `ops.compiled_settings`."""
    words = settings.split()
    return words[6] == "1", [int(word) for word in words[9:]]


@torch.library.register_fake(ops.conv2d_compiled_op, lib=ops.library)
def _(input, weight, bias, residual, settings):  # type: ignore[no-untyped-def]
    max_pool, geometry = _read(settings)
    return _fake_of_weight(input, weight, bias, residual, _split(geometry), max_pool)


@torch.library.register_fake(ops.conv2d_packed_compiled_op, lib=ops.library)
def _(input, packed, bias, residual, channels_last, settings):  # type: ignore[no-untyped-def]
    memory_format = torch.channels_last if channels_last else ops.format_of(input)
    max_pool, sizes = _read(settings)
    return _fake_conv2d(input, sizes[:4], bias, residual, _split(sizes[4:]), max_pool, memory_format)


@torch.library.register_fake(ops.conv2d_packed_into_op, lib=ops.library)
def _(  # type: ignore[no-untyped-def]
    out, input, packed, bias, residual, scale, shift, geometry, channels_last, algorithm, precision, activation,
    negative_slope, input_activation, residual_after, shuffle="none",
):  # fmt: skip
    memory_format = torch.channels_last if channels_last else ops.format_of(input)
    y = _fake_conv2d(input, geometry[:4], bias, residual, _split(geometry[4:]), False, memory_format)
    wanted = tuple(shuffled_shape(y.shape, shuffle))
    torch._check(out.shape == wanted, lambda: f"fastconv: out has shape {list(out.shape)}; expected {list(wanted)}")
    torch._check(out.dtype == input.dtype, lambda: f"fastconv: {_mistaken_dtype('out', out, input)}")


def _split(values: Sequence[Any]) -> Geometry:
    return Geometry(values[0:2], values[2:4], values[4:6], values[6])


@torch.library.register_fake(ops.conv2d_op, lib=ops.library)
def _(input, weight, bias, residual, *rest):  # type: ignore[no-untyped-def]
    return _fake_of_weight(input, weight, bias, residual, Geometry(*rest[:4]), Options(*rest[4:]).max_pool)


def _fake_of_weight(
    input: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, geometry: Geometry, max_pool: bool
) -> Tensor:
    torch._check(weight.dtype == input.dtype, lambda: f"fastconv: {_mistaken_dtype('weight', weight, input)}")
    torch._check(  # a forgotten weight on the meta device brings a call here whose input has values
        weight.device == input.device,
        lambda: f"fastconv: weight is on {weight.device}; expected input's {input.device}",
    )
    return _fake_conv2d(input, weight.shape, bias, residual, geometry, max_pool, ops.format_of(input, weight))


@torch.library.register_fake(ops.conv2d_packed_op, lib=ops.library)
def _(input, packed, weight_shape, bias, residual, stride, padding, dilation, groups, channels_last, *rest):  # type: ignore[no-untyped-def]
    memory_format = torch.channels_last if channels_last else ops.format_of(input)
    geometry = Geometry(stride, padding, dilation, groups)
    return _fake_conv2d(input, weight_shape, bias, residual, geometry, Options.of_packed(*rest).max_pool, memory_format)


@torch.library.register_fake(ops.pack_weight_op, lib=ops.library)
def _(weight, groups, algorithm, precision):  # type: ignore[no-untyped-def]
    return weight.new_empty([ops.packed_bytes(weight, int(groups), algorithm, precision)], dtype=torch.uint8)


@torch.library.register_fake(ops.refresh_packed_op, lib=ops.library)
def _(packed, snapshot, weight, groups, algorithm, precision):  # type: ignore[no-untyped-def]
    return None


@torch.library.register_fake(ops.input_gradient_op, lib=ops.library)
def _(grad, weight, input_size, *_):  # type: ignore[no-untyped-def]
    return torch.empty(input_size, dtype=grad.dtype, device=grad.device, memory_format=ops.format_of(grad, weight))


@torch.library.register_fake(ops.weight_gradient_op, lib=ops.library)
def _(input, grad, weight_size, *_):  # type: ignore[no-untyped-def]
    return torch.empty(weight_size, dtype=grad.dtype, device=grad.device, memory_format=ops.format_of(input, grad))


@torch.library.register_fake(ops.conv2d_gradients_op, lib=ops.library)
def _(grad, input, weight, settings):  # type: ignore[no-untyped-def]
    return (
        torch.empty(input.shape, dtype=grad.dtype, device=grad.device, memory_format=ops.format_of(grad, weight)),
        torch.empty(weight.shape, dtype=grad.dtype, device=grad.device, memory_format=ops.format_of(input, grad)),
    )


@torch.library.register_fake(ops.weight_gradient_compiled_op, lib=ops.library)
def _(input, grad, settings):  # type: ignore[no-untyped-def]
    shape = _read(settings)[1][:4]
    return torch.empty(shape, dtype=grad.dtype, device=grad.device, memory_format=ops.format_of(input, grad))


@torch.library.register_fake(ops.weight_gradient_kernel_op, lib=ops.library)
def _(input, grad, weight_size, stride, padding, dilation, groups, channels_last, *_):  # type: ignore[no-untyped-def]
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(weight_size, dtype=grad.dtype, device=grad.device, memory_format=memory_format)
