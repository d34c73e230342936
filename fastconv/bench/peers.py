"""The rivals of one layer in one class: PyTorch in both layouts, and every legacy algorithm of cuDNN."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from fastconv.bench import cudnn
from fastconv.bench.layers import Layer

Call = Callable[[], torch.Tensor]


def torch_convolution(x: torch.Tensor, weight: torch.Tensor, layer: Layer, tf32: bool) -> torch.Tensor:
    """PyTorch's convolution with cudnn.benchmark=True, its switches given as arguments: no global state is touched."""
    geometry = [layer.stride] * 2, [layer.padding] * 2, [layer.dilation] * 2
    benchmark, deterministic, cudnn_enabled = True, False, True
    return torch.ops.aten._convolution.default(
        x, weight, None, *geometry, False, [0, 0], layer.groups, benchmark, deterministic, cudnn_enabled, tf32
    )


def peers(
    inputs: dict[str, torch.Tensor], weights: dict[str, torch.Tensor], layer: Layer, tf32: bool
) -> tuple[dict[str, Call], dict[str, str]]:
    """name -> call for every rival, name -> why not for those that cannot run.

    inputs, weights: layout ("nchw", "nhwc") -> the same values dense in that layout. Each rival reads its own layout:
    nobody's time holds a conversion. tf32 matters for float32 alone.
    """
    calls: dict[str, Call] = {}
    refused: dict[str, str] = {}
    for layout, x in inputs.items():
        calls[f"torch_{layout}"] = functools.partial(torch_convolution, x, weights[layout], layer, tf32)
    if not next(iter(inputs.values())).is_cuda:
        return calls, refused
    problems = {}
    for layout, x in inputs.items():
        try:
            problems[layout] = cudnn.Problem(x, weights[layout], layer, layout, tf32)
        except (cudnn.CudnnError, cudnn.CudnnUnavailable) as error:
            refused[f"cudnn_{layout}"] = str(error)
    direct, unsupported = cudnn.contenders(problems)
    return calls | direct, refused | unsupported
