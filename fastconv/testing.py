"""Helpers for tests and benchmarks: poisoned memory, and error metrics against float64."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fastconv import ops


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Within it every operator fills workspace and output with NaN before its kernels run, and raises RuntimeError if
    they write past the end. Process-wide, and slow: it waits for the device."""
    ops.set_debug(True)
    try:
        yield
    finally:
        ops.set_debug(False)


def nan_surrounded(tensor: Tensor, margin: int = 64) -> Tensor:
    """A copy with the same sizes and strides inside a larger buffer that is NaN everywhere else, so that a read
    outside the tensor shows in the result. `margin`: elements before and after."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    extent = max(extent, 0) if tensor.numel() else 0
    buffer = torch.full((extent + 2 * margin,), float("nan"), dtype=tensor.dtype, device=tensor.device)
    return buffer.as_strided(tensor.shape, tensor.stride(), margin).copy_(tensor)


@dataclass(frozen=True)
class Errors:
    """Errors of a result, relative to its reference; infinite if anything is not finite."""

    relative_l2: float  # |y - ref|_2 / |ref|_2
    maximum: float  # max |y - ref| / rms(ref)
    bias: float  # mean((y - ref) sign(ref)) / mean |ref|: below 0, the result is shrunk; random errors average out

    def __str__(self) -> str:
        return f"L2 {self.relative_l2:.3g}, maximum {self.maximum:.3g}, bias {self.bias:+.3g}"


def errors(result: Tensor, reference: Tensor) -> Errors:
    """The metrics, computed in float64, of tensors of the same shape, any dtypes, one device. Zero for an empty result
    and for an exact one, infinite against a reference of zeros. Raises ValueError for different shapes."""
    if result.shape != reference.shape:
        raise ValueError(f"result has shape {list(result.shape)}; expected the reference's {list(reference.shape)}")
    result, reference = result.detach().double(), reference.detach().double()
    if not bool(result.isfinite().all()):
        return Errors(math.inf, math.inf, math.inf)
    difference = result - reference
    if not bool(difference.any()):
        return Errors(0.0, 0.0, 0.0)
    # Scaled, so that squares of 1e-200 or 1e200 neither vanish nor overflow.
    scale = float(reference.abs().max())
    if scale == 0.0:
        return Errors(math.inf, math.inf, math.inf)
    difference, reference = difference / scale, reference / scale
    return Errors(
        float(difference.norm() / reference.norm()),
        float(difference.abs().max() / reference.square().mean().sqrt()),
        float((difference * reference.sign()).mean() / reference.abs().mean()),
    )
