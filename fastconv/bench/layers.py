"""The layer set: the 3x3 convolutions of VGG-16, ResNet, YOLOv3 and DenseNet, and the least time each can take."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

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


def select(names: str | list[str] | None = None) -> list[Layer]:
    """The layers whose names start with one of `names` ("vgg", "res1", or a comma-separated list); None: all.

    Raises ValueError if a name matches nothing.
    """
    if names is None:
        return list(LAYERS)
    wanted = names.split(",") if isinstance(names, str) else list(names)
    for name in wanted:
        if not any(layer.layer.startswith(name) for layer in LAYERS):
            known = ", ".join(layer.layer for layer in LAYERS)
            raise ValueError(f"layers: {name!r} matches none of {known}")
    return [layer for layer in LAYERS if any(layer.layer.startswith(name) for name in wanted)]
