"""Where the cost model does not tell what is fast, `auto` may measure, once for each problem, when a layer, or
`fastconv.conv2d` with a weight that it meets again, is called:

- on a GPU, where `torch.backends.cudnn.benchmark` lets PyTorch search, too: those candidates that cost about as much as
  the cheapest. The choice ends with the process, as PyTorch's does;
- on a CPU whose rates nobody has measured, one with neither AVX2 nor AVX-512: the two cheapest candidates and PyTorch's
  convolution. The choice is kept as `fastconv.tune`'s are (`fastconv.measured`).

A call that trains its weight has that gradient measured, too. What is compiled is measured while it is compiled, where
sizes are known. FASTCONV_MEASURE=1 measures on every device and keeps the choices, FASTCONV_MEASURE=0 never.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastconv import _C, measured, ops, selection, settings, tuning
from fastconv.ops.geometry import pair

_searches: Any = torch._C._get_cudnn_benchmark
_MOST_SEEN = 1 << 16  # programs may see ever new shapes
_seen: dict[tuple[Any, ...], int] = {}  # with how often choices had been forgotten by then


def is_unknown(device: torch.device) -> bool:
    """Whether the cost model has no constants for it: a CPU with neither AVX2 nor AVX-512, or a GPU that the table in
    csrc/core/device_info.cpp does not have."""
    info = ops.device_info(device)
    if device.type == "cpu":
        return info.instruction_set == _C.InstructionSet.generic
    _C.set_rates(info, 0.0, 0.0)  # a row's own, whatever the clocks; of no row, shares of them
    return info.bandwidth_bytes_per_s == 0.0


@functools.cache
def _is_unknown_cpu() -> bool:
    return is_unknown(torch.device("cpu"))


def is_wanted(x: Tensor) -> bool:
    """Whether calls with such an input are to be measured."""
    if settings.measure is not None:
        return settings.measure
    if not x.is_cuda:
        return _is_unknown_cpu()
    return _searches() and not (torch._C._get_cudnn_deterministic() or torch._C._get_deterministic_algorithms())


def measure(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, key: tuple[Any, ...], precision: str,
    passes: Sequence[str] = ("forward",),
) -> None:  # fmt: skip
    """Measures passes of a call for which `auto` is to choose, unless its like has been. `key`: of `fastconv.eager`.
    With a weight's gradient among them its forward pass packs the weight."""
    *_, output_padding = key
    if key[0] != "auto" or output_padding is not None or not is_wanted(x):
        return
    call = (
        x.device, x.shape, x.stride(), x.dtype, weight.shape, weight.stride(), bias is None, residual is None, key,
        precision, tuple(passes), torch.get_num_threads(), settings.switches.backend_flags,
    )  # fmt: skip
    if _seen.get(call) == measured.times_forgotten or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    if len(_seen) == _MOST_SEEN:
        _seen.clear()
    _seen[call] = measured.times_forgotten
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
            after and residual is not None, max_pool, trained="backward_weight" in passes,
        )  # fmt: skip
        convolution.problem()
    except (RuntimeError, ValueError):  # the call itself says what is wrong with it
        return
    measure_problems(convolution, passes)


def measure_problems(convolution: tuning.Convolution, passes: Sequence[str]) -> None:
    """Measures those passes of a convolution that have not been, but for the input gradient: of that one a quick
    measurement tells less than the costs do (docs/log/155-shuffles.md)."""
    wanted = (convolution.in_pass(pass_) for pass_ in passes if pass_ != "backward_input")
    for each in [each for each in wanted if each.key not in measured.choices()]:
        tuning.measure_quickly(each, kept=settings.measure is True or convolution.device.type == "cpu")


def passes_of(x: Tensor) -> list[str]:
    """What is to be measured of a call that trains its weight."""
    return [pass_ for pass_ in selection.PASSES if pass_ != "backward_input" or x.requires_grad]
