"""What the code of a fused model calls whose concatenations are ranges of one tensor, whose norms are computed by the
convolutions behind them, and whose convolutions have channels of zeros (`fastconv.fuse.lowering`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastconv import ops
from fastconv.epilogue import explicit_padding
from fastconv.fuse.graph import is_altered
from fastconv.nn import Conv2d, Upsample
from fastconv.norm import InputNorm
from fastconv.ops import plain, upsampling
from fastconv.ops.geometry import pair
from fastconv.rewrites.widening import missing_channels

# [], or an InputNorm, the activation's name, and its module if it is one.
Before = Sequence[Any]


def convolve(layer: Any, x: Tensor, residual: Tensor | None, before: Before) -> Tensor:
    """layer(activation(norm(x))), or layer(x, residual)"""
    y = _through(layer, x, residual, before, None)
    return _called(layer, x, residual, before) if y is None else y


def convolve_into(
    layer: Any, x: Tensor, residual: Tensor | None, before: Before, buffer: Tensor | int, begin: int
) -> Tensor:
    """`convolve` into the channels from `begin` on of a tensor in channels_last; of a number, in a new one of so many
    channels. Returns the tensor."""
    if not isinstance(layer, Conv2d):
        return copy_into(_called(layer, x, residual, before), buffer, begin)
    if isinstance(buffer, int):
        _, padding = explicit_padding(x, layer.weight, layer.padding, layer.dilation)
        where = pair("stride", layer.stride), padding, pair("dilation", layer.dilation)
        size = ops.output_size(x.shape, layer.weight.shape, *where)
        if min(size) < 1:
            return convolve(layer, x, residual, before)  # which says so
        buffer = _new(x, buffer, *size)
    out = buffer.narrow(1, begin, layer.out_channels)
    y = _through(layer, x, residual, before, out)
    if y is None and before:
        x, before = _normed(x, before), ()
        y = _through(layer, x, residual, before, out)
    if y is None:
        _copy(out, _called(layer, x, residual, before))
    return buffer


def has_constants(layer: Any) -> bool:
    """Whether it is a layer whose weight can be taken not to change."""
    return isinstance(layer, Conv2d) and layer.frozen and not layer.weight.requires_grad and not is_altered(layer)


def wide(layer: Any, c: int, k: int) -> Callable[..., Tensor]:
    """The layer, from c to k channels, for images with channels of zeros behind these."""
    if has_constants(layer) and (layer.in_channels, layer.out_channels) == (c, k):
        return layer._widened()  # type: ignore[no-any-return]
    return functools.partial(_called_narrow, layer, c, k)


def _called_narrow(layer: Any, c: int, k: int, x: Tensor, residual: Tensor | None = None) -> Tensor:
    x = x.narrow(1, 0, c)
    y = layer(x) if residual is None else layer(x, residual.narrow(1, 0, k))
    return cleared(copy_into(y, k + missing_channels(y), 0), k)


def cleared(tensor: Tensor, begin: int) -> Tensor:
    """The tensor, with zeros in its channels from `begin` on."""
    tensor.narrow(1, begin, tensor.shape[1] - begin).zero_()
    return tensor


def copy_into(value: Tensor, buffer: Tensor | int, begin: int) -> Tensor:
    """Copies the value there, and returns the tensor."""
    if isinstance(buffer, int):
        buffer = _new(value, buffer, *value.shape[2:])
    _copy(buffer.narrow(1, begin, value.shape[1]), value)
    return buffer


def upsample_into(layer: Any, x: Tensor, buffer: Tensor | int, begin: int) -> Tensor:
    """What the layer makes of x, there. Returns the tensor."""
    scales = layer.scales(x) if type(layer) is Upsample and not is_altered(layer) else None
    if scales is None:
        return copy_into(layer(x), buffer, begin)
    if isinstance(buffer, int):
        buffer = _new(x, buffer, x.shape[2] * scales[0], x.shape[3] * scales[1])
    upsampling.upsample_nearest2d_into(buffer.narrow(1, begin, x.shape[1]), x, *scales)
    return buffer


def add_into(a: Tensor, b: Tensor, buffer: Tensor | int, begin: int) -> Tensor:
    """a + b there; returns the tensor."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return copy_into(a + b, buffer, begin)
    if isinstance(buffer, int):
        buffer = _new(a, buffer, *a.shape[2:])
    torch.add(a, b, out=_checked(buffer.narrow(1, begin, a.shape[1]), a))
    return buffer


def _called(layer: Any, x: Tensor, residual: Tensor | None, before: Before) -> Tensor:
    x = _normed(x, before)
    return layer(x) if residual is None else layer(x, residual)  # type: ignore[no-any-return]


def _through(layer: Any, x: Tensor, residual: Tensor | None, before: Before, out: Tensor | None) -> Tensor | None:
    """What the layer's kernels make of activation(norm(x)); None if a norm apart is faster, or modules are not what
    they were when the code was made: replaced, in training mode, altered."""
    if not isinstance(layer, Conv2d) or is_altered(layer):
        return None
    if not before:
        return layer._convolve_around(x, residual, out, None, None, "none")
    norm, name, activation = before
    if type(norm) is not InputNorm or norm.training or is_altered(norm):
        return None
    if activation is not None and is_altered(activation):
        return None
    return layer._convolve_around(x, residual, out, *norm.factors(), name)


def _normed(x: Tensor, before: Before) -> Tensor:
    if not before:
        return x
    norm, name, activation = before
    y = norm(x)
    if activation is not None:
        return activation(y.clone() if y is x else y)  # type: ignore[no-any-return]  # it may work in place
    return y if name == "none" else plain.activate(y, name, 0.0)


def _new(like: Tensor, channels: int, h: int, w: int) -> Tensor:
    size = (like.shape[0], channels, h, w)
    return torch.empty(size, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def _copy(out: Tensor, value: Tensor) -> None:
    if _checked(out, value).is_cuda:
        upsampling.upsample_nearest2d_into(out, value)  # 16 bytes at a time, PyTorch's copy an element
    else:
        out.copy_(value)


def _checked(out: Tensor, value: Tensor) -> Tensor:
    """`out`, if it has room for the value as it is."""
    if out.shape != value.shape or out.dtype != value.dtype:  # which a copy would broadcast, or round
        raise RuntimeError(
            f"values of {list(out.shape)}, {out.dtype} and {list(value.shape)}, {value.dtype} are concatenated along "
            "channels; expected the same dtype, and sizes that differ in channels alone"
        )
    return out
