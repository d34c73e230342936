"""Operators of values alone, which stand for PyTorch's own between convolutions: what is recorded is PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd import forward_ad

from fastconv import ops


def record(operator: OpOverload, pytorchs: Callable[..., Tensor]) -> None:
    """Has a call of the operator that needs a gradient, or a forward one, be `pytorchs` of the same arguments."""

    def recorded(*args: Any) -> Tensor:
        needs_gradient = any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
        if forward_ad._current_level >= 0 or (torch.is_grad_enabled() and needs_gradient):
            return pytorchs(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args)  # type: ignore[no-any-return]

    ops.library.impl(operator, recorded, "Autograd")
