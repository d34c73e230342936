"""Autocast, as of torch.nn.functional.conv2d: everything in the lower precision."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fastconv import ops

_is_capturing = torch.cuda.is_current_stream_capturing
_takes_hooks: Callable[[], bool] = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]


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


_probes: dict[torch.device, Tensor] = {}  # leaves
_regions: dict[torch.device, weakref.ref[Tensor]] = {}


def _held(found: Tensor) -> Tensor:
    """A tensor from a weak reference, which C++ alone may have held."""
    found._fix_weakref()  # type: ignore[attr-defined]
    return found


def region(device: torch.device) -> Tensor | None:
    """What lives until the outermost region of autocast, which is on for the device, ends: what PyTorch keeps of a leaf
    that it has cast. None where it keeps nothing."""
    if not torch.is_autocast_cache_enabled():
        return None
    known = _regions.get(device)
    found = None if known is None else known()
    if found is not None:
        return _held(found)
    if not _takes_hooks():
        return None
    seen: list[Tensor] = []
    with torch.inference_mode(False), torch.enable_grad():
        probe = _probes.setdefault(device, torch.zeros(1, device=device, requires_grad=True))
        with torch.autograd.graph.saved_tensors_hooks(seen.append, lambda tensor: tensor):
            torch.prelu(probe, probe)
    found = next((tensor for tensor in seen if tensor.dtype is not torch.float32), None)
    if found is not None:
        _regions[device] = weakref.ref(found)
    return found


# A trained weight as autocast casts it, and what it is of: while autograd keeps it, all calls share it.
KeptCast = tuple[weakref.ref[Tensor], weakref.ref[Tensor], weakref.ref[Tensor], tuple[Any, ...]]


def cast_weight(kept: KeptCast | None, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, KeptCast | None]:
    """What autocast makes of a weight, and what is to be kept of that for the next call: of what is trained, within one
    region of autocast, as PyTorch does. It is kept by autograd alone, until the gradients are computed."""
    is_trained = weight.requires_grad and weight.is_leaf and torch.is_grad_enabled()
    if not is_trained or weight.dtype is not torch.float32 or (weight.is_cuda and _is_capturing()):
        return _cast(weight, dtype), None
    now = region(weight.device)
    if now is None:
        return _cast(weight, dtype), None
    # Another stream would read it too early.
    stream = torch._C._cuda_getCurrentRawStream(weight.device.index) if weight.is_cuda else 0
    source = weight._version, weight.data_ptr(), dtype, stream
    if kept is not None:
        its_cast, its_weight, its_region, its_source = kept
        found = its_cast()
        if found is not None and its_weight() is weight and its_region() is now and its_source == source:
            return _held(found), kept
    made = _cast(weight, dtype)
    return made, (weakref.ref(made), weakref.ref(weight), weakref.ref(now), source)


def _register_autocast(operator: OpOverload, device: str, key: str) -> None:
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def kernel(*args: Any) -> Tensor:
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return operator(*cast(device, *args))

    ops.library.impl(operator, kernel, key)


for _operator in (ops.conv2d_op, ops.conv2d_packed_op, ops.conv_transpose2d_op):
    _register_autocast(_operator, "cuda", "AutocastCUDA")
    _register_autocast(_operator, "cpu", "AutocastCPU")
