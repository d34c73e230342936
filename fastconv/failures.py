"""Exceptions that PyTorch raises inside an operator of ours, as Python knows them.

Between PyTorch and the operators lies a C interface, at which an exception ends: of PyTorch's own only the place of the
failing call comes back, since torch 2.13 its message, too, and never its type. Ours cross it as messages with a prefix.
Eager calls get the type back here; a graph that `torch.compile` made calls the operators by itself: RuntimeError.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class UnsupportedError(RuntimeError):
    """A named algorithm cannot serve the problem; the message says why not."""


class UnseenError(RuntimeError):
    """A layer's call that is left to `ops.conv2d_op`: PyTorch's own convolution failed within it, and its message did
    not come back, or PyTorch lacks what records it."""


_UNSUPPORTED = "fastconv.UnsupportedError: "  # csrc/core/error.h
_DEVICE = "fastconv.DeviceError: "
_CALL_FAILED = " API call failed at "  # torch/headeronly/util/shim_utils.h
_MESSAGE_ENDS = " (originally from "  # torch/csrc/stable/macros.h
_ALLOCATIONS = ("aten::empty", "aten::new_empty", "aten::new_zeros", "aten::clone", "aten::contiguous", "aten::to")

_AcceleratorError: type[RuntimeError] = getattr(torch, "AcceleratorError", RuntimeError)


def translated(error: RuntimeError, arguments: Iterable[Any]) -> RuntimeError:
    """The exception that an operator's RuntimeError stands for; `arguments`: of the call that raised it."""
    text = str(error)
    if _UNSUPPORTED in text:
        return UnsupportedError(text.partition(_UNSUPPORTED)[2])
    if _DEVICE in text:
        return _of_message(text.partition(_DEVICE)[2], _AcceleratorError)
    if _CALL_FAILED not in text:
        return error
    message, known, _ = text.partition(_MESSAGE_ENDS)
    if known:
        return _of_message(message, RuntimeError)
    name = (re.findall(r"aten::\w+", text) or [text.partition("(")[0].strip()])[0]
    cuda = [arg.device for arg in arguments if isinstance(arg, Tensor) and arg.is_cuda]
    if cuda and name in _ALLOCATIONS:
        try:
            torch.cuda.synchronize(cuda[0])  # raises if the device has failed; then that is the reason
        except RuntimeError as failure:
            return failure
        return torch.OutOfMemoryError(f"CUDA out of memory in {name}, called by fastconv. {_PRINTED}")
    return RuntimeError(f"{name}, called by fastconv, failed. {_PRINTED}")


_PRINTED = f"PyTorch {torch.__version__} printed the reason to the standard error; from 2.13 on it is told here."


def raise_at_the_end(error: Exception) -> None:
    """Raises `error` where the backward pass was called. From inside of it, only its text would come through."""

    def fail() -> None:
        raise error

    torch.autograd.Variable._execution_engine.queue_callback(fail)


def is_silent(error: RuntimeError) -> bool:
    """Whether a call of PyTorch's failed and its message did not come back: repeating it in Python has it."""
    text = str(error)
    return _CALL_FAILED in text and _MESSAGE_ENDS not in text


def _of_message(message: str, otherwise: type[RuntimeError]) -> RuntimeError:
    if "out of memory" in message and "DefaultCPUAllocator" not in message:
        return torch.OutOfMemoryError(message)
    return (_AcceleratorError if message.startswith("CUDA error") else otherwise)(message)
