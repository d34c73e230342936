"""Our side of a layer: which algorithms fit, which one `auto` takes, and each as a callable with packed weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fastconv import _C, ops
from fastconv.models.layers import Layer
from fastconv.ops import autograd

_PRECISIONS = {"ieee": "ieee", "fp32": "fp32", "tf32": "tf32", "fp16": "fp32", "bf16": "fp32"}
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_BENCHMARK, _CUDNN_ENABLED = 1, 4  # bits of the operator's backend_flags


def dtype_of(accuracy: str) -> torch.dtype:
    """The element type of a class."""
    return _DTYPES.get(accuracy, torch.float32)


def precision_of(accuracy: str) -> str:
    """The operators' precision with which tensors of the class's type are computed in it."""
    return _PRECISIONS[accuracy]


def _problem(
    layer: Layer, n: int, accuracy: str, layout: str, max_error: float | None = None, direction: str = "forward"
) -> _C.ConvProblem:
    """direction: a pass of `benchmarks.layers.sets`; a fused one has a bias and a ReLU, perhaps a residual."""
    epilogue = direction.split("_")
    return _C.ConvProblem(
        n=n,
        c=layer.c,
        h=layer.h,
        w=layer.w,
        k=layer.k,
        r=layer.r,
        s=layer.s,
        stride=(layer.stride, layer.stride),
        padding=(layer.padding, layer.padding),
        dilation=(layer.dilation, layer.dilation),
        groups=layer.groups,
        dtype=ops.dtype_name(dtype_of(accuracy)),
        precision=_PRECISIONS[accuracy],
        layout=layout,
        max_error=max_error,
        bias="bias" in epilogue,
        residual="residual" in epilogue,
        activation="relu" if "relu" in epilogue else "none",
    )


def candidates(
    layer: Layer, n: int, accuracy: str, layout: str, device: torch.device, direction: str = "forward"
) -> list[dict[str, Any]]:
    """The planner's row for every algorithm: algorithm, ok, reason, config, workspace_bytes, cost_us."""
    return _C.candidates(_problem(layer, n, accuracy, layout, None, direction), ops.device_info(device))


def auto_choice(
    layer: Layer, n: int, accuracy: str, layout: str, device: torch.device, max_error: float | None = None,
    direction: str = "forward",
) -> str:  # fmt: skip
    """The registry name of what `algorithm="auto"` runs within that limit."""
    problem = _problem(layer, n, accuracy, layout, max_error, direction)
    return _C.choose("auto", problem, ops.device_info(device))["algorithm"]


def contender(
    algorithm: str, x: torch.Tensor, weight: torch.Tensor, layer: Layer, accuracy: str,
    bias: torch.Tensor | None = None, residual: torch.Tensor | None = None, *, search: bool = True,
) -> Callable[[], torch.Tensor]:  # fmt: skip
    """A callable that runs `algorithm`, its weights packed here and now, outside every timed region.

    x: [N, C, H, W] in the layout to be measured; weight: [K, C/groups, R, S], contiguous. With a bias [K], and a
    residual [N, K, P, Q] or none: ReLU(conv + bias + residual). search: PyTorch's own with cudnn.benchmark=True.
    """
    stride, padding, dilation = ([value] * 2 for value in (layer.stride, layer.padding, layer.dilation))
    precision, epilogue = _PRECISIONS[accuracy], ("none" if bias is None else "relu", 0.01)
    if algorithm == "torch":
        channels_last = x.is_contiguous(memory_format=torch.channels_last)
        order = torch.channels_last if channels_last else torch.contiguous_format
        arranged, flags = weight.contiguous(memory_format=order), (_BENCHMARK if search else 0) | _CUDNN_ENABLED
        arguments = (x, arranged, bias, residual, stride, padding, dilation, layer.groups, algorithm, precision)
        return functools.partial(autograd.conv2d, *arguments, *epilogue, flags)
    packed = ops.pack_weight(weight, layer.groups, algorithm, precision)
    channels_last = not x.is_contiguous()
    geometry = (stride, padding, dilation, layer.groups, channels_last)
    shape = list(weight.shape)
    return functools.partial(
        autograd.conv2d_packed, x, packed, shape, bias, residual, *geometry, algorithm, precision, *epilogue
    )


def packed_bytes(algorithm: str, weight: torch.Tensor, layer: Layer, accuracy: str) -> int:
    """Of the packed weight; 0 where PyTorch's own convolution runs."""
    if algorithm == "torch":
        return 0
    return ops.packed_bytes(weight, layer.groups, algorithm, _PRECISIONS[accuracy])


def packing_contender(
    algorithm: str, x: torch.Tensor, weight: torch.Tensor, layer: Layer, accuracy: str, *addends: torch.Tensor | None
) -> Callable[[], torch.Tensor]:
    """`contender`, but the filter is packed in every call."""

    def call() -> torch.Tensor:
        return contender(algorithm, x, weight, layer, accuracy, *addends)()

    return call


def gradient_choice(x: torch.Tensor, layer: Layer, accuracy: str, direction: str) -> tuple[str, str]:
    """(what `algorithm="auto"` runs for a gradient, why it is PyTorch's). The input gradient is made of forward
    convolutions, each with a choice of its own: `auto`."""
    if direction == "backward_input":
        return "auto", ""
    row = _C.choose_weight_gradient("auto", *_gradient_problem(x, layer, accuracy))
    return row["algorithm"], row["reason"]


def gradient_algorithms(x: torch.Tensor, layer: Layer, accuracy: str, direction: str) -> list[str]:
    """What of ours computes a gradient: the algorithms whose own weight gradient serves the layer."""
    if direction == "backward_input":
        return ["auto"]
    problem, device = _gradient_problem(x, layer, accuracy)
    names = [row["algorithm"] for row in _C.candidates(problem, device) if row["algorithm"] != "torch"]
    return [name for name in names if _C.choose_weight_gradient(name, problem, device)["algorithm"] == name]


def _gradient_problem(x: torch.Tensor, layer: Layer, accuracy: str) -> tuple[_C.ConvProblem, _C.DeviceInfo]:
    layout = "nchw" if x.is_contiguous() else "nhwc"
    return _problem(layer, x.shape[0], accuracy, layout), ops.device_info(x.device)


def gradient_contender(
    algorithm: str, x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, layer: Layer, accuracy: str,
    direction: str,
) -> Callable[[], torch.Tensor]:  # fmt: skip
    """A callable that runs a gradient as autograd would; everything, the packing of the filter too, is timed.

    x: [N, C, H, W], weight: [K, C/groups, R, S], grad: [N, K, P, Q], all in the layout to be measured.
    """
    stride, padding, dilation = ([value] * 2 for value in (layer.stride, layer.padding, layer.dilation))
    rest = (stride, padding, dilation, layer.groups, algorithm, _PRECISIONS[accuracy], _BENCHMARK | _CUDNN_ENABLED)
    operator, operands = ops.input_gradient_op, (grad, weight, list(x.shape))
    if direction == "backward_weight":
        operator, operands = ops.weight_gradient_op, (x, grad, list(weight.shape))

    def call() -> torch.Tensor:
        # Where PyTorch computes it, it follows the global switches: those that the peers have.
        with torch.backends.cudnn.flags(
            enabled=True, benchmark=True, deterministic=False, allow_tf32=accuracy == "tf32"
        ):
            return operator(*operands, *rest)

    return call
