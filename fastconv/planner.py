"""From tensors to the planner: the few translations that the layer, the swap and explain() share."""

from __future__ import annotations

import functools
import json
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.utils import _pair

from fastconv import _C, ops

PRECISIONS = ("ieee", "fp32", "tf32")


@functools.lru_cache(maxsize=64)
def device_info(device: torch.device) -> _C.DeviceInfo:
    """The planner's description of a torch device; ValueError if it is neither a CPU nor a CUDA device."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is '{device}'; expected a cpu or cuda device")
    index = -1
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
    fields: dict[str, Any] = json.loads(ops.device_info(index))
    info = _C.DeviceInfo()
    info.type = getattr(_C.DeviceType, fields.pop("type"))
    for name, value in fields.items():
        setattr(info, name, value)
    return info


def dtype_name(dtype: torch.dtype) -> str:
    """The planner's name of a dtype."""
    name = str(dtype).removeprefix("torch.")
    return name if name in ("float32", "float16", "bfloat16") else "other"


def suggests_channels_last(tensor: Tensor) -> bool:
    """PyTorch's rule (c10, is_channels_last_strides_2d_s4) for a 4-D tensor: the one that the operators follow."""
    if tensor.dim() != 4 or tensor.stride(1) == 0:
        return False
    least = 0
    for d in (1, 3, 2, 0):
        size, stride = tensor.size(d), tensor.stride(d)
        if size == 0 or stride < least or (d == 0 and least == tensor.stride(1)):
            return False
        least = stride * max(size, 1)
    return True


def choose(
    algorithm: str,
    input: Tensor,
    weight: Tensor,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
    precision: str,
    bias: bool,
) -> dict[str, Any]:
    """What the operators would run for these tensors: algorithm, config, workspace_bytes, packed_bytes, cost_us."""
    n, c, h, w = input.shape
    k, _, r, s = weight.shape
    channels_last = suggests_channels_last(input) or suggests_channels_last(weight)
    problem = _C.ConvProblem(
        n=n, c=c, h=h, w=w, k=k, r=r, s=s, stride=_pair(stride), padding=_pair(padding), dilation=_pair(dilation),
        groups=groups, dtype=dtype_name(input.dtype), precision=precision, layout="nhwc" if channels_last else "nchw",
        bias=bias,
    )  # fmt: skip
    return _C.choose(algorithm, problem, device_info(input.device))


def check_settings(algorithm: str, precision: str | None) -> None:
    """TypeError or ValueError if these are not an algorithm of the registry and a precision."""
    if not isinstance(algorithm, str):
        raise TypeError(f"algorithm is {algorithm!r}; expected a string")
    known = ["auto", *(row["name"] for row in _C.algorithms())]
    if algorithm not in known:
        raise ValueError(f"algorithm is '{algorithm}'; expected one of {', '.join(known)}")
    if precision is not None and not isinstance(precision, str):
        raise TypeError(f"precision is {precision!r}; expected None or a string")
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(f"precision is '{precision}'; expected None or one of {', '.join(PRECISIONS)}")
