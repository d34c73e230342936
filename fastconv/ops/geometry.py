"""How a filter goes over its input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor


class Geometry(NamedTuple):
    """Stride, padding and dilation, each of height and width, and groups: in the order in which operators take them."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int

    @property
    def has_unit_stride(self) -> bool:
        return list(self.stride) == [1, 1]


def from_operator(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function(tensor, tensor, sizes, geometry, ...)` as an operator calls it: the geometry one by one."""

    def flat(first: Tensor, second: Tensor, sizes: Sequence[int], *rest: Any) -> Tensor:
        return function(first, second, sizes, Geometry(*rest[:4]), *rest[4:])

    return flat
