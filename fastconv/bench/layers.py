"""The layer sets: the convolutions of well-known networks, and the least time each can take."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

import torch

# What one H200 sustains, measured (docs/performance.md); FFMA by its peak, 132 SMs x 128 lanes at 1.98 GHz.
BANDWIDTH = 4.5e12  # bytes/s, reading
TENSOR_FLOPS = 790e12  # FP16 operands, FP32 accumulators
FFMA_FLOPS = 66.9e12


@dataclass(frozen=True)
class Layer:
    """A convolution [N, c, h, w] x [k, c/groups, r, s]; the batch N comes with the suite."""

    layer: str
    c: int
    h: int
    w: int
    k: int
    r: int = 3
    s: int = 3
    stride: int = 1
    padding: int = 1
    dilation: int = 1
    groups: int = 1

    @property
    def p(self) -> int:
        return (self.h + 2 * self.padding - self.dilation * (self.r - 1) - 1) // self.stride + 1

    @property
    def q(self) -> int:
        return (self.w + 2 * self.padding - self.dilation * (self.s - 1) - 1) // self.stride + 1

    def direct_flops(self, n: int) -> float:
        """Twice the multiply-adds of the direct algorithm."""
        return 2.0 * n * self.k * self.p * self.q * (self.c // self.groups) * self.r * self.s

    def fields(self) -> dict[str, Any]:
        """This layer's part of a result row."""
        return asdict(self)

    def floor_us(self, n: int, accuracy: str) -> float:
        """The least time on an H200: max(input and output through memory, multiplies at the measured rate).

        Multiplies are those of F(4x4) where it applies (3x3, stride 1), else of the direct algorithm; times 3 in class
        `fp32` (three split products), once in the other tensor-core classes, by FFMA in `ieee`.
        """
        size = 2 if accuracy in ("fp16", "bf16") else 4
        moved = n * (self.c * self.h * self.w + self.k * self.p * self.q) * size
        flops = self.direct_flops(n)
        if (self.r, self.s, self.stride, self.dilation, self.groups) == (3, 3, 1, 1, 1):
            flops = 2.0 * 36 * n * ceil(self.p / 4) * ceil(self.q / 4) * self.c * self.k
        rate = {"ieee": FFMA_FLOPS, "fp32": TENSOR_FLOPS / 3}.get(accuracy, TENSOR_FLOPS)
        return max(moved / BANDWIDTH, flops / rate) * 1e6


LAYERS = [
    Layer("vgg1_1", 3, 224, 224, 64),
    Layer("vgg1_2", 64, 224, 224, 64),
    Layer("vgg2_1", 64, 112, 112, 128),
    Layer("vgg2_2", 128, 112, 112, 128),
    Layer("vgg3_1", 128, 56, 56, 256),
    Layer("vgg3_2", 256, 56, 56, 256),
    Layer("vgg4_1", 256, 28, 28, 512),
    Layer("vgg4_2", 512, 28, 28, 512),
    Layer("vgg5", 512, 14, 14, 512),
    Layer("res1", 64, 56, 56, 64),
    Layer("res2", 128, 28, 28, 128),
    Layer("res3", 256, 14, 14, 256),
    Layer("res4", 512, 7, 7, 512),
    Layer("yolo1", 32, 208, 208, 64),
    Layer("yolo2", 64, 104, 104, 128),
    Layer("yolo3", 128, 52, 52, 256),
    Layer("yolo4", 256, 26, 26, 512),
    Layer("yolo5", 512, 13, 13, 1024),
    Layer("dense1", 192, 56, 56, 48),
    Layer("dense2", 192, 28, 28, 48),
    Layer("dense3", 192, 14, 14, 48),
    Layer("dense4", 192, 7, 7, 48),
]


def _square(layer: str, c: int, size: int, k: int, kernel: int, stride: int = 1, groups: int = 1) -> Layer:
    """A square map and kernel, padded by half of it."""
    return Layer(layer, c, size, size, k, kernel, kernel, stride, kernel // 2, 1, groups)


GRADIENTS = ("backward_weight", "backward_input")
FUSED = ("bias_relu", "bias_residual_relu")  # ReLU(conv + bias), ReLU(conv + bias + residual)
PASSES = ("forward", *GRADIENTS, *FUSED)

SETS: dict[str, list[Layer]] = {
    "layers": LAYERS,  # 3x3 with stride 1: what every published comparison times
    "pointwise": [  # 1x1: ResNet-50's bottlenecks in and out, DenseNet-161's layers and transitions
        _square("res1_in", 256, 56, 64, 1),
        _square("res1_out", 64, 56, 256, 1),
        _square("res2_in", 512, 28, 128, 1),
        _square("res2_out", 128, 28, 512, 1),
        _square("res3_in", 1024, 14, 256, 1),
        _square("res3_out", 256, 14, 1024, 1),
        _square("res4_in", 2048, 7, 512, 1),
        _square("res4_out", 512, 7, 2048, 1),
        _square("dense1_in", 240, 56, 192, 1),
        _square("dense2_in", 576, 28, 192, 1),
        _square("dense3_in", 1248, 14, 192, 1),
        _square("dense4_in", 1632, 7, 192, 1),
        _square("dense1_next", 384, 56, 192, 1),
        _square("dense3_next", 2112, 14, 1056, 1),
    ],
    "strided": [  # ResNet-50's 3x3 and its shortcuts, YOLOv3's downsampling
        _square("res2_down", 128, 56, 128, 3, 2),
        _square("res3_down", 256, 28, 256, 3, 2),
        _square("res4_down", 512, 14, 512, 3, 2),
        _square("res2_short", 256, 56, 512, 1, 2),
        _square("res3_short", 512, 28, 1024, 1, 2),
        _square("res4_short", 1024, 14, 2048, 1, 2),
        _square("yolo1_down", 32, 416, 64, 3, 2),
        _square("yolo3_down", 128, 104, 256, 3, 2),
        _square("yolo5_down", 512, 26, 1024, 3, 2),
    ],
    "stems": [  # the first layers of ResNet, DenseNet-161, AlexNet and GoogLeNet; 5x5 and 7x7 further in
        _square("resnet", 3, 224, 64, 7, 2),
        _square("densenet", 3, 224, 96, 7, 2),
        Layer("alexnet1", 3, 224, 224, 64, 11, 11, 4, 2),
        _square("alexnet2", 64, 27, 192, 5),
        _square("inception3", 32, 28, 96, 5),
        _square("inception5", 48, 7, 128, 5),
    ],
    "groups": [  # depthwise: MobileNetV2, EfficientNet-B0, ConvNeXt-T; grouped: ResNeXt-50
        _square("mobile2", 96, 112, 96, 3, 2, 96),
        _square("mobile3", 144, 56, 144, 3, 1, 144),
        _square("mobile5", 576, 14, 576, 3, 1, 576),
        _square("efficient5", 672, 14, 672, 5, 1, 672),
        _square("convnext1", 96, 56, 96, 7, 1, 96),
        _square("convnext3", 384, 14, 384, 7, 1, 384),
        _square("resnext1", 128, 56, 128, 3, 1, 32),
        _square("resnext3", 512, 14, 512, 3, 1, 32),
    ],
    "lenet5": [  # the two layers of the modified LeNet-5 that the fifth source times (docs/algorithms.md)
        Layer("lenet1", 1, 86, 86, 4, 7, 7, 1, 0),
        Layer("lenet2", 4, 40, 40, 16, 7, 7, 1, 0),
    ],
}
BATCHES = {"lenet5": (10000, 1000, 100)}  # the source's


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


def suite_of(layer_set: str, device: torch.device, direction: str = "forward") -> str:
    """The suite under whose name results of a set, or of a sweep, for a pass (of PASSES) on that device are kept."""
    name = layer_set if layer_set in ("layers", "sweep") else f"layers_{layer_set}"
    name = name if direction == "forward" else f"{name}_{direction}"
    return name if device.type == "cuda" else f"{name}_cpu"


def select(names: str | list[str] | None = None, layer_set: str = "layers") -> list[Layer]:
    """The layers of a set whose names start with one of `names` ("vgg", "res1", or a comma-separated list); None: all.

    Raises ValueError if a name matches nothing, or there is no such set.
    """
    if layer_set not in SETS:
        raise ValueError(f"layer_set is {layer_set!r}; expected one of {', '.join(SETS)}")
    layers = SETS[layer_set]
    if names is None:
        return list(layers)
    wanted = names.split(",") if isinstance(names, str) else list(names)
    for name in wanted:
        if not any(layer.layer.startswith(name) for layer in layers):
            known = ", ".join(layer.layer for layer in layers)
            raise ValueError(f"layers: {name!r} matches none of {known}")
    return [layer for layer in layers if any(layer.layer.startswith(name) for name in wanted)]
