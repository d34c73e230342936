"""What is timed of layers: passes, batches, grids, the suite they belong to; and the least time that they can take."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import ceil
from typing import Any

import torch

from benchmarks.harness.results import slug
from fastconv.models.layers import Layer

# What one H200 sustains, measured (docs/performance.md); FFMA by its peak, 132 SMs x 128 lanes at 1.98 GHz.
BANDWIDTH = 4.5e12  # bytes/s, reading
TENSOR_FLOPS = 790e12  # FP16 operands, FP32 accumulators
FFMA_FLOPS = 66.9e12
BANDWIDTHS = {"h200": BANDWIDTH, "h100": 3.0e12}  # the same of others, by the folder of their results (docs/log/91)

GRADIENTS = ("backward_weight", "backward_input")
FUSED = ("bias_relu", "bias_residual_relu")  # ReLU(conv + bias), ReLU(conv + bias + residual)
PASSES = ("forward", *GRADIENTS, *FUSED)

# lenet5: the source's. Maps of 512x512 come few at a time, and deep layers are bound by their filters at batch 1 and 2.
BATCHES = {
    "lenet5": (10000, 1000, 100),
    "narrow": (8, 1),
    "ragged": (32, 8),
    "deep": (2, 1),
    "sequences": (8, 1),
    "transposed": (8, 1),
}


def batches_of(layer_set: str) -> tuple[int, ...]:
    """The batch sizes at which a set is timed unless others are asked for."""
    return BATCHES.get(layer_set, (64, 1))


def grid(
    channels: Sequence[int],
    filters: Sequence[int] | None,
    sizes: Sequence[int],
    kernel: int = 3,
    stride: int = 1,
    padding: int | None = None,
    dilation: int = 1,
    groups: int = 1,
) -> list[Layer]:
    """What a sweep times: every C of `channels` with every K of `filters` (None: K = C) on every square map.

    kernel: R and S. padding: None keeps the size at stride 1 (for an odd kernel). The name of a layer says all of it.
    Raises ValueError if groups do not divide C and K, or a padded map is smaller than the kernel's extent.
    """
    extent = dilation * (kernel - 1) + 1
    padding = extent // 2 if padding is None else padding
    layers = []
    for size, c in itertools.product(sizes, channels):
        for k in [c] if filters is None else filters:
            if c % groups or k % groups:
                raise ValueError(f"groups is {groups}; expected a divisor of C = {c} and K = {k}")
            if size + 2 * padding < extent:
                raise ValueError(f"sizes: {size} with padding {padding} is less than the kernel's extent {extent}")
            name = f"c{c}_k{k}_{size}x{size}_{kernel}x{kernel}"
            usual = {"s": 1, "p": extent // 2, "d": 1, "g": 1}
            for letter, value in {"s": stride, "p": padding, "d": dilation, "g": groups}.items():
                name += "" if value == usual[letter] else f"_{letter}{value}"
            layers.append(Layer(name, c, size, size, k, kernel, kernel, stride, padding, dilation, groups))
    return layers


def suite_of(layer_set: str, direction: str = "forward", device: str = "cuda") -> str:
    """The suite under whose name results of a set, or of a sweep, for a pass (of PASSES) on such a device are kept."""
    name = layer_set if layer_set in ("layers", "sweep") else f"layers_{layer_set}"
    name = name if direction == "forward" else f"{name}_{direction}"
    return name if device == "cuda" else f"{name}_cpu"


def bandwidth_of(gpu: str) -> float:
    """bytes/s, by the folder of results; of a device that is not known an H200's."""
    return BANDWIDTHS.get(gpu, BANDWIDTH)


def floor_us(layer: Any, n: int, accuracy: str, gpu: str) -> float:
    """The least time on a GPU, by the folder of its results: max(input and output through memory, multiplies at an
    H200's measured rate).

    Multiplies are those of F(4x4) where it applies (3x3, stride 1), else of the direct algorithm; times 3 in class
    `fp32` (three split products), once in the other tensor-core classes, by FFMA in `ieee`. layer: a Layer, or another
    one with its names whose stride and dilation may be pairs.
    """
    size = 2 if accuracy in ("fp16", "bf16") else 4
    moved = n * (layer.c * layer.h * layer.w + layer.k * layer.p * layer.q) * size
    flops = layer.direct_flops(n)
    unit = all(value in (1, (1, 1)) for value in (layer.stride, layer.dilation, layer.groups))
    if unit and (layer.r, layer.s) == (3, 3):
        flops = 2.0 * 36 * n * ceil(layer.p / 4) * ceil(layer.q / 4) * layer.c * layer.k
    rate = {"ieee": FFMA_FLOPS, "fp32": TENSOR_FLOPS / 3}.get(accuracy, TENSOR_FLOPS)
    return max(moved / bandwidth_of(gpu), flops / rate) * 1e6


def floor_here(layer: Any, n: int, accuracy: str, device: torch.device | None = None) -> float | None:
    """The same of a device, default the GPU that there is; a CPU has none."""
    if not torch.cuda.is_available() or (device is not None and device.type != "cuda"):
        return None
    return floor_us(layer, n, accuracy, slug(torch.cuda.get_device_name(device)))
