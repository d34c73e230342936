"""Helpers for tests and benchmarks: poisoned memory, and error metrics against float64."""

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
    """Distance of a result from its reference. NaN or infinity anywhere makes every metric NaN or infinite."""

    relative_l2: float  # |y - ref|_2 / |ref|_2
    maximum: float  # max |y - ref| / max |ref|
    bias: float  # mean(y - ref) / mean |ref|: signed; a random error averages out here, a systematic one does not


def errors(result: Tensor, reference: Tensor) -> Errors:
    """The metrics, computed in float64. Raises ValueError for different shapes or an empty result. A zero reference is
    taken as 1."""
    if result.shape != reference.shape or result.numel() == 0:
        raise ValueError(f"result has shape {list(result.shape)}; expected the reference's {list(reference.shape)}")
    reference = reference.detach().double()
    difference = result.detach().double() - reference

    def ratio(numerator: Tensor, denominator: Tensor) -> float:
        return float(numerator) / (float(denominator) or 1.0)

    return Errors(
        ratio(difference.norm(), reference.norm()),
        ratio(difference.abs().max(), reference.abs().max()),
        ratio(difference.mean(), reference.abs().mean()),
    )
