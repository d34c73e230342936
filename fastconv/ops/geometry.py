"""How a filter goes over its input, and what else is asked of a convolution."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_MOST = (1 << 63) - 1  # the operators' integers have 64 bits


class Geometry(NamedTuple):
    """Stride, padding and dilation, each of height and width, and groups: in the order in which operators take them."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int

    @property
    def sizes(self) -> list[int]:
        return [*self.stride, *self.padding, *self.dilation, self.groups]


class Options(NamedTuple):
    """What `conv2d` takes behind the geometry, in its order. PyTorch leaves out last ones that are the default."""

    algorithm: str
    precision: str
    activation: str
    negative_slope: float
    backend_flags: int
    max_error: float | None = None
    max_workspace: int | None = None
    residual_after: bool = False
    max_pool: bool = False

    @classmethod
    def of_packed(
        cls, algorithm: str, precision: str, activation: str, slope: float, *last: bool, **named: bool
    ) -> Options:
        """What `conv2d_packed` takes: neither PyTorch's switches nor limits."""
        return cls(algorithm, precision, activation, slope, 0, None, None, *last, **named)

    @property
    def bare(self) -> Options:
        """Of the convolution alone."""
        return self._replace(activation="none", residual_after=False, max_pool=False)

    @property
    def of_gradients(self) -> tuple[Any, ...]:
        """What its gradients take."""
        return self.algorithm, self.precision, self.backend_flags, self.max_error, self.max_workspace


def from_operator(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function(tensor, tensor, sizes, geometry, ...)` as an operator calls it: the geometry one by one."""

    def flat(first: Tensor, second: Tensor, sizes: Sequence[int], *rest: Any) -> Tensor:
        return function(first, second, sizes, Geometry(*rest[:4]), *rest[4:])

    return flat


def integer(name: str, value: Any) -> Any:
    """The argument as an int, or as the torch.SymInt that it is while a program is traced."""
    if isinstance(value, torch.SymInt):
        return value
    if isinstance(value, bool):
        raise TypeError(f"{name} is {value}; expected an integer")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; expected an integer") from None
    if not -_MOST <= number <= _MOST:
        raise RuntimeError(f"{name} is {number}; expected an integer of 64 bits")
    return number


def pair(name: str, value: Any) -> list[int]:
    """The argument for height and width: one integer, or one in a sequence, is for both."""
    if type(value) is int and -_MOST <= value <= _MOST:
        return [value, value]
    if type(value) is tuple and len(value) == 2 and type(value[0]) is type(value[1]) is int:
        small = -_MOST <= value[0] <= _MOST and -_MOST <= value[1] <= _MOST
        return list(value) if small else [integer(name, size) for size in value]
    if not isinstance(value, (list, tuple)):
        if isinstance(value, str):
            raise TypeError(f"{name} is {value!r}; expected an integer or a pair of integers")
        value = (value,)
    values = [integer(name, element) for element in value]
    if len(values) == 1:
        return [values[0], values[0]]
    if len(values) != 2:
        raise RuntimeError(f"{name} is {value!r}; expected an integer or a pair of integers")
    return values
