"""Batch norms folded into filters: in float64, by nodes of a graph or at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from fastconv.rewrites.constants import computing, known
from fastconv.rewrites.editor import Obstacle, value_of

aten, prims = torch.ops.aten, torch.ops.prims


def at_once(target: Any, *args: Any, **kwargs: Any) -> Any:
    return target(*args, **kwargs)


def double(emit: Callable[..., Any], value: Any) -> Any:
    return emit(prims.convert_element_type.default, value, torch.float64)


def rounded(emit: Callable[..., Any], values: Iterable[Any], dtype: torch.dtype) -> list[Any]:
    """Filters and biases as a convolution takes them; a bias that is none stays so."""
    return [None if value is None else emit(prims.convert_element_type.default, value, dtype) for value in values]


class Filters(NamedTuple):
    """Of one branch: norm(conv(x)), as `folded` takes it."""

    weight: Any = None  # none: unit filters, the input itself
    bias: Any = None
    gamma: Any = None
    beta: Any = None
    mean: Any = None
    variance: Any = None  # none: there is no norm
    epsilon: float | None = None

    @property
    def is_input(self) -> bool:
        return self.weight is None and self.variance is None


def folded(
    emit: Callable[..., Any], weight: Any, bias: Any, gamma: Any, beta: Any, mean: Any, variance: Any, epsilon: float
) -> tuple[Any, Any]:
    """Filters and biases of norm(conv(x)) in float64: w * s and (b - mean) * s + beta with
    s = gamma / sqrt(variance + epsilon)."""
    s = emit(aten.rsqrt.default, emit(aten.add.Tensor, double(emit, variance), epsilon))
    if gamma is not None:
        s = emit(aten.mul.Tensor, s, double(emit, gamma))
    shift = double(emit, mean)
    shift = emit(aten.neg.default, shift) if bias is None else emit(aten.sub.Tensor, double(emit, bias), shift)
    shift = emit(aten.mul.Tensor, shift, s)
    if beta is not None:
        shift = emit(aten.add.Tensor, shift, double(emit, beta))
    return emit(aten.mul.Tensor, double(emit, weight), emit(aten.reshape.default, s, [-1, 1, 1, 1])), shift


def scale_and_shift(
    emit: Callable[..., Any], gamma: Any, beta: Any, mean: Any, variance: Any, epsilon: float
) -> tuple[Any, Any]:
    """Of a norm, gamma / sqrt(variance + epsilon) and beta - mean * scale, in float64."""
    scale = emit(aten.rsqrt.default, emit(aten.add.Tensor, double(emit, variance), epsilon))
    if gamma is not None:
        scale = emit(aten.mul.Tensor, scale, double(emit, gamma))
    shift = emit(aten.neg.default, emit(aten.mul.Tensor, double(emit, mean), scale))
    return scale, shift if beta is None else emit(aten.add.Tensor, shift, double(emit, beta))


def exact(emit: Callable[..., Any], filters: Filters) -> tuple[Any, Any]:
    """Filters and biases of a branch in float64."""
    if filters.variance is not None:
        return folded(emit, *filters)  # type: ignore[arg-type]
    return double(emit, filters.weight), None if filters.bias is None else double(emit, filters.bias)


# The relative L2 error of the filters that rounding them to their dtype makes is at most half a spacing, unless factors
# push them out of the dtype's range.
_ROUNDING_LIMIT = 0.5


def norm_obstacle(w: torch.Tensor, parameters: Sequence[Any], channels: int | None = None) -> Obstacle | None:
    """What keeps a norm of so many channels, by default those of the output, from being folded into filters like w."""
    tensors = [value_of(p) for p in parameters if p is not None]
    channels = w.shape[0] if channels is None else channels
    if tensors[-1].shape[0] != channels:
        return "norm_features", f"the norm has {tensors[-1].shape[0]} features; the convolution {channels}"
    if any(t.device != w.device for t in tensors):
        return "norm_device", f"the norm is on {tensors[-1].device}; the convolution on {w.device}"
    if any(t.dtype not in (w.dtype, torch.float32) for t in tensors):
        return "norm_dtype", f"the norm is {tensors[-1].dtype}; the convolution {w.dtype}"
    return None


@computing()
def range_obstacle(
    compute: Callable[..., tuple[Any, Any]], arguments: Sequence[Any], dtype: torch.dtype
) -> Obstacle | None:
    """Whether filters and biases that are computed in float64, `compute(emit, *arguments)`, leave the range of a dtype;
    None where inputs of a call decide them."""
    values = known(arguments)
    if values is None:
        return None
    filters, bias = compute(at_once, *values)
    error = (filters.to(dtype).double() - filters).norm() / filters.norm().clamp_min(torch.finfo(torch.float64).tiny)
    is_finite = bias is None or bool(bias.to(dtype).isfinite().all())
    if not (error <= _ROUNDING_LIMIT * torch.finfo(dtype).eps and is_finite):
        return "norm_range", f"the folded filters leave the range of {dtype}"
    return None
