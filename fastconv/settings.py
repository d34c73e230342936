"""What a call follows besides its arguments: environment variables, read once, and PyTorch's own switches, read at
every call and never written.

| variable                  | effect                                                              |
|---------------------------|---------------------------------------------------------------------|
| ``FASTCONV_DISABLE=1``    | every convolution runs through PyTorch                              |
| ``FASTCONV_ALGORITHM=x``  | ``algorithm="auto"`` means ``x``, whether it fits or not            |
| ``FASTCONV_MAX_ERROR=x``  | ``max_error`` of every ``algorithm="auto"`` that is given none      |
| ``FASTCONV_MAX_WORKSPACE=x`` | ``max_workspace`` likewise, in bytes                             |
| ``FASTCONV_LOG=debug``    | the logger ``fastconv`` names every eager call before it runs       |
| ``FASTCONV_MEASURE=1``    | every CPU measures, at its first call, what `auto` takes; 0: none   |
| ``FASTCONV_CACHE_DIR=x``  | where `fastconv.measured` keeps what was measured; empty: nowhere   |
"""

import logging
import math
import operator
import os
from operator import attrgetter
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from fastconv import _C

ALGORITHMS = ("auto", *(row["name"] for row in _C.algorithms()))
PRECISIONS = ("ieee", "fp32", "tf32")
ACTIVATIONS = ("relu", "relu6", "silu", "leaky_relu", "gelu", "gelu_tanh", "hardswish", "sigmoid")


def _of_environment(name: str, *values: str) -> str:
    """One of the values, or "" for none."""
    text = os.environ.get(name, "").lower()
    if text not in ("", *values):
        raise ValueError(f"{name} is {text!r}; expected {' or '.join(values)}")
    return text


disabled: bool = _of_environment("FASTCONV_DISABLE", "0", "1") == "1"
cache_dir: str | None = os.environ.get("FASTCONV_CACHE_DIR")  # None: the user's cache folder
log_calls: bool = _of_environment("FASTCONV_LOG", "debug") == "debug"
logger = logging.getLogger("fastconv")
if log_calls:
    logger.setLevel(logging.DEBUG)
    if not logging.getLogger().handlers and not logger.handlers:
        logger.addHandler(logging.StreamHandler())


def check_algorithm(algorithm: Any, name: str = "algorithm") -> None:
    """TypeError or ValueError unless it is a name of the registry, or "auto"."""
    if not isinstance(algorithm, str):
        raise TypeError(f"{name} is {algorithm!r}; expected a string")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"{name} is {algorithm!r}; expected one of {', '.join(ALGORITHMS)}")


def _algorithm_of_environment() -> str:
    asked = os.environ.get("FASTCONV_ALGORITHM") or "auto"
    check_algorithm(asked, "FASTCONV_ALGORITHM")
    return "torch" if disabled else asked


auto_algorithm: str = _algorithm_of_environment()


def _check_compute_capability() -> None:
    """The variable is read where devices are asked (csrc/ops/runtime_cuda.cpp)."""
    text = os.environ.get("FASTCONV_MAX_COMPUTE_CAPABILITY", "")
    if text and not (text.isascii() and text.isdigit()):
        raise ValueError(f"FASTCONV_MAX_COMPUTE_CAPABILITY is {text!r}; expected an integer, as 80")


_check_compute_capability()


# None: `fastconv.once` says.
measure: bool | None = {"": None, "0": False, "1": True}[_of_environment("FASTCONV_MEASURE", "0", "1")]


def is_number(value: Any) -> bool:
    """Whether `float` takes it for one; text is none."""
    if isinstance(value, (float, torch.SymFloat)):
        return True
    try:
        return not isinstance(value, (str, bytes)) and float(value) is not None
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False


def check_flag(name: str, value: Any) -> None:
    """TypeError unless it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; expected a bool")


def check_slope(negative_slope: Any) -> None:
    """TypeError unless it is a number."""
    if not is_number(negative_slope):
        raise TypeError(f"negative_slope is {negative_slope!r}; expected a number")


def check_max_error(max_error: Any, name: str = "max_error") -> None:
    """TypeError or ValueError unless it is None or a number of at least 1."""
    if max_error is None:
        return
    if isinstance(max_error, bool) or not is_number(max_error):
        raise TypeError(f"{name} is {max_error!r}; expected None or a number of at least 1")
    if not max_error >= 1.0:
        raise ValueError(f"{name} is {max_error!r}; expected None or a number of at least 1")


def _max_error_of_environment() -> float | None:
    text = os.environ.get("FASTCONV_MAX_ERROR")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value >= 1.0:
        raise ValueError(f"FASTCONV_MAX_ERROR is {text!r}; expected a number of at least 1")
    return value


max_error: float | None = _max_error_of_environment()


_ANY_WORKSPACE = (1 << 63) - 1  # what the operators take for more bytes than there are


def check_max_workspace(max_workspace: Any, name: str = "max_workspace") -> None:
    """TypeError or ValueError unless it is None or an integer of at least 0."""
    if max_workspace is None or isinstance(max_workspace, torch.SymInt):
        return
    try:
        size = operator.index(max_workspace)
    except TypeError:
        size = None
    if size is None or isinstance(max_workspace, bool):
        raise TypeError(f"{name} is {max_workspace!r}; expected None or an integer of at least 0, in bytes")
    if size < 0:
        raise ValueError(f"{name} is {max_workspace!r}; expected None or an integer of at least 0, in bytes")


def _max_workspace_of_environment() -> int | None:
    text = os.environ.get("FASTCONV_MAX_WORKSPACE")
    if not text:
        return None
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"FASTCONV_MAX_WORKSPACE is {text!r}; expected an integer of at least 0, in bytes")
    return min(int(text), _ANY_WORKSPACE)


max_workspace: int | None = _max_workspace_of_environment()


class Limits(NamedTuple):
    """What the operators get, in their order: None for their own."""

    max_error: float | None = None
    max_workspace: int | None = None


_TORCH: Any = torch._C
_FLAG_BENCHMARK, _FLAG_DETERMINISTIC, _FLAG_ENABLED = 1, 2, 4


class _Switches(ModuleType):
    """PyTorch's switches as this package names them. A module, because `torch.compile` guards on the attributes of a
    module: compiled code is compiled again when a switch changes."""

    _cudnn: Any = torch.backends.cudnn
    _forward_ad: Any = forward_ad

    dual_level = property(attrgetter("_forward_ad._current_level"))  # of forward-mode differentiation; -1 outside of it

    # "tf32", "ieee", "none" or "bf16". Only the per-operation switch answers whatever mix of old and new API set it:
    # `allow_tf32` raises. A C function reads it: torch 2.10 compiles Python functions that checking a guard runs,
    # and with fullgraph=True it may not.
    conv_precision = property(attrgetter("_cudnn.conv.fp32_precision"))

    @property
    def backend_flags(self) -> int:
        """`torch.backends.cudnn`'s switches as the operators take them, by the C functions that its attributes read: a
        guard of compiled code asks in every call."""
        deterministic = _TORCH._get_cudnn_deterministic() or _TORCH._get_deterministic_algorithms()
        return (
            (_FLAG_BENCHMARK if _TORCH._get_cudnn_benchmark() else 0)
            | (_FLAG_DETERMINISTIC if deterministic else 0)
            | (_FLAG_ENABLED if _TORCH._get_cudnn_enabled() else 0)
        )


switches = _Switches("fastconv.settings.switches")


def cuda_precision() -> str:
    """Class of a float32 CUDA convolution without a precision of its own: ``"tf32"`` or ``"fp32"``."""
    if torch.compiler.is_compiling():
        precision = switches.conv_precision
    else:  # what it reads, without the Python of three modules' attributes, which every eager call would pass
        precision = torch._C._get_fp32_precision_getter("cuda", "conv")
    return "tf32" if precision == "tf32" else "fp32"


def resolve_precision(precision: str | None, is_cuda: bool) -> str:
    """The accuracy class of a float32 convolution: ``"ieee"``, ``"fp32"`` or ``"tf32"``.

    ``None`` follows `torch.backends.cudnn.conv.fp32_precision`, where PyTorch's ``ieee`` and ``none`` mean FP32
    accuracy by any means, and is ``"fp32"`` on the CPU. Raises ValueError for any other value."""
    if precision is None:
        return cuda_precision() if is_cuda else "fp32"
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}; expected None or one of {', '.join(PRECISIONS)}")
    return precision


def resolve_max_error(asked: Any, algorithm: str) -> float | None:
    """The limit that the operators get for what the caller asked for: FASTCONV_MAX_ERROR stands in for None, but says
    nothing about an algorithm that is named. Raises TypeError or ValueError for what is not a number of at least 1."""
    check_max_error(asked)
    if asked is None:
        return max_error if algorithm == "auto" else None
    return float(asked)


def resolve_max_workspace(asked: Any, algorithm: str) -> int | None:
    """As `resolve_max_error`, with FASTCONV_MAX_WORKSPACE."""
    check_max_workspace(asked)
    if asked is None:
        return max_workspace if algorithm == "auto" else None
    symbolic: Any = isinstance(asked, torch.SymInt)
    return asked if symbolic else min(operator.index(asked), _ANY_WORKSPACE)


def resolve_algorithm(asked: str) -> str:
    """What the operators get for the name that was asked for: what the environment says in the place of ``"auto"``, or
    of all."""
    return auto_algorithm if asked == "auto" or disabled else asked


def resolve_limits(asked_error: Any, asked_workspace: Any, algorithm: str) -> Limits:
    """Both limits as the operators get them."""
    return Limits(resolve_max_error(asked_error, algorithm), resolve_max_workspace(asked_workspace, algorithm))


def resolve_activation(activation: str | None) -> str:
    """The operators' name of an activation. Raises ValueError naming the known ones."""
    if activation is None:
        return "none"
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; expected None or one of {', '.join(ACTIVATIONS)}")
    return activation


def unpack_flags(flags: int) -> tuple[bool, bool, bool]:
    """(benchmark, deterministic, enabled)"""
    return bool(flags & _FLAG_BENCHMARK), bool(flags & _FLAG_DETERMINISTIC), bool(flags & _FLAG_ENABLED)
