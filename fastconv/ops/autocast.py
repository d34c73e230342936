"""Autocast, as of torch.nn.functional.conv2d: everything in the lower precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fastconv import ops


def _register_autocast(operator: OpOverload, device: str, key: str) -> None:
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64:
            return value.to(torch.get_autocast_dtype(device))
        return value

    def kernel(*args: Any) -> Tensor:
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return operator(*[cast(arg) for arg in args])

    ops.library.impl(operator, kernel, key)


for _operator in (ops.conv2d_op, ops.conv2d_packed_op, ops.conv_transpose2d_op):
    _register_autocast(_operator, "cuda", "AutocastCUDA")
    _register_autocast(_operator, "cpu", "AutocastCPU")
