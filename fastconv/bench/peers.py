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


def torch_gradient(
    x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, layer: Layer, tf32: bool, direction: str
) -> torch.Tensor:
    """PyTorch's gradient of `direction` (backward_weight, backward_input) with cudnn.benchmark=True. Its operator takes
    the switches from the global state, which is restored."""
    geometry = [layer.stride] * 2, [layer.padding] * 2, [layer.dilation] * 2
    mask = [direction == "backward_input", direction == "backward_weight", False]
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=tf32):
        gradients = torch.ops.aten.convolution_backward.default(
            grad, x, weight, None, *geometry, False, [0, 0], layer.groups, mask
        )
    return gradients[mask.index(True)]


def peers(
    inputs: dict[str, torch.Tensor], weights: dict[str, torch.Tensor], layer: Layer, tf32: bool,
    direction: str = "forward", grads: dict[str, torch.Tensor] | None = None,
) -> tuple[dict[str, Call], dict[str, str]]:  # fmt: skip
    """name -> call for every rival, name -> why not for those that cannot run.

    inputs, weights, grads (for the gradients): layout ("nchw", "nhwc") -> the same values dense in that layout. Each
    rival reads its own layout: nobody's time holds a conversion. tf32 matters for float32 alone.
    """
    calls: dict[str, Call] = {}
    refused: dict[str, str] = {}
    for layout, x in inputs.items():
        call = functools.partial(torch_convolution, x, weights[layout], layer, tf32)
        if grads:
            call = functools.partial(torch_gradient, x, weights[layout], grads[layout], layer, tf32, direction)
        calls[f"torch_{layout}"] = call
    if not next(iter(inputs.values())).is_cuda:
        return calls, refused
    problems = {}
    for layout, x in inputs.items():
        try:
            problems[layout] = cudnn.Problem(
                x, weights[layout], layer, layout, tf32, direction, grads[layout] if grads else None
            )
        except (cudnn.CudnnError, cudnn.CudnnUnavailable) as error:
            refused[f"cudnn_{layout}"] = str(error)
    direct, unsupported = cudnn.contenders(problems)
    return calls | direct, refused | unsupported
