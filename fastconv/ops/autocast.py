"""Autocast, as of torch.nn.functional.conv2d: everything in the lower precision."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fastconv import ops


def cast(device: str, *arguments: Any) -> list[Any]:
    """What autocast makes of the arguments of a convolution."""
    dtype = torch.get_autocast_dtype(device)
    return [_cast(value, dtype) for value in arguments]


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if not isinstance(value, Tensor) or value.dtype is dtype or not value.is_floating_point():
        return value
    if value.dtype is torch.float64:
        return value
    return value.to(dtype=dtype)  # by name: found without trying the other forms of `to`


def _register_autocast(operator: OpOverload, device: str, key: str) -> None:
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def kernel(*args: Any) -> Tensor:
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return operator(*cast(device, *args))

    ops.library.impl(operator, kernel, key)


for _operator in (ops.conv2d_op, ops.conv2d_packed_op, ops.conv_transpose2d_op):
    _register_autocast(_operator, "cuda", "AutocastCUDA")
    _register_autocast(_operator, "cpu", "AutocastCPU")


@contextlib.contextmanager
def noting_off(note: Callable[[str], Any]) -> Iterator[None]:
    """note(device) where this thread switches autocast off, whether or not it is on."""
    entered, thread = torch.autocast.__enter__, threading.get_ident()

    def enter(self: torch.autocast) -> Any:
        if threading.get_ident() == thread and not self._enabled:
            note(self.device)
        return entered(self)

    torch.autocast.__enter__ = enter  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__enter__ = entered  # type: ignore[method-assign]
