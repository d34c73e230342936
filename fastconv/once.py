"""On a CPU whose rates nobody has measured, one with neither AVX2 nor AVX-512, the cost model does not know what is
fast. There `auto` measures: at the first call of each problem, the candidates that it takes for the two fastest and
PyTorch's convolution. The choice is kept as `fastconv.tune`'s are (`fastconv.measured`).

Calls of layers, and of `fastconv.conv2d` with a weight that it meets again, come here; compiled code and gradients are
planned by the cost model. FASTCONV_MEASURE=1 has every CPU measure, FASTCONV_MEASURE=0 none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastconv import _C, measured, ops, settings, tuning
from fastconv.ops.geometry import pair

_CANDIDATES, _ROUNDS = 2, 3

wanted: bool | None = settings.measure  # None: until a call asks, `is_unknown` does
_seen: set[tuple[Any, ...]] = set()


def is_unknown(device: torch.device) -> bool:
    """Whether the cost model has no constants for it: a CPU with neither AVX2 nor AVX-512, or a GPU that the table in
    csrc/core/device_info.cpp does not have."""
    info = ops.device_info(device)
    if device.type == "cpu":
        return info.instruction_set == _C.InstructionSet.generic
    _C.set_rates(info, 0.0, 0.0)  # a row's own, whatever the clocks; of no row, shares of them
    return info.bandwidth_bytes_per_s == 0.0


def see(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, key: tuple[Any, ...], precision: str
) -> None:
    """Measures a call, if it is one on the CPU for which `auto` is to choose, and its like has not been measured.
    `key`: of `fastconv.eager`."""
    global wanted
    if wanted is None:
        wanted = is_unknown(torch.device("cpu"))
    *_, output_padding = key
    if not wanted or key[0] != "auto" or not x.is_cpu or output_padding is not None:
        return
    call = (
        x.shape, x.stride(), x.dtype, weight.shape, weight.stride(), bias is None, residual is None, key, precision,
        torch.get_num_threads(),
    )  # fmt: skip
    if call in _seen:
        return
    _seen.add(call)
    _, stride, padding, dilation, groups, activation, slope, limits, after, max_pool, _ = key
    max_error, max_workspace = limits
    fits = x.dim() == 4 and weight.dim() == 4 and x.shape[1] == weight.shape[1] * groups
    if not fits or ops.dtype_name(x.dtype) == "other" or 0 in (*x.shape, *weight.shape):
        return
    try:
        convolution = tuning.Convolution(
            x.device, x.dtype, tuple(x.shape), tuple(weight.shape), tuple(pair("stride", stride)),
            tuple(pair("padding", padding)), tuple(pair("dilation", dilation)), groups, precision, ops.format_of(x),
            ops.format_of(weight), bias is not None, residual is not None, activation, slope, max_error, max_workspace,
            after and residual is not None, max_pool,
        )  # fmt: skip
        problem = repr(convolution.problem())
    except (RuntimeError, ValueError):  # the call itself says what is wrong with it
        return
    if (measured.device_name(x.device), problem, "forward") not in measured.choices():
        tuning.measure_one(convolution, _CANDIDATES, _ROUNDS)
