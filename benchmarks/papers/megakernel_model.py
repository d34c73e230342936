"""What the source's model says of the megakernel: operations and bytes of each stage of F(4x4,3x3), and the time that
mixing its tasks can hide. Class `ieee`, filters transformed beforehand; every array is read or written once.

    one stage after the other   M_T / S_M + max(C_G / S_C, M_G / S_M)                    (8)
    all stages beside another   max((C_T + C_G) / S_C, (M_T + M_G) / S_M)                (9)

    the same, V and M never in memory       max((C_T + C_G) / S_C, bytes of input and output / S_M)

M are bytes and C operations, of the transforms (T) and the products (G), S_M and S_C what memory and arithmetic do in a
second: in series transforms are bound by memory and products by arithmetic, and mixed both units work all the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from benchmarks.layers.sets import BANDWIDTH, FFMA_FLOPS
from fastconv.models.layers import Layer

ELEMENT = 4  # bytes
POINTS, TILE = 36, 4  # of F(4x4,3x3): values of a transformed tile, outputs of one in height and width
# Operations of a tile (of a filter) in one channel, additions and multiplications, as Lavin and Gray count them.
FILTER, INPUT, OUTPUT = 72, 156, 90


@dataclass(frozen=True)
class Stage:
    flops: float
    bytes: float

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flops / self.bytes

    def __add__(self, other: Stage) -> Stage:
        return Stage(self.flops + other.flops, self.bytes + other.bytes)


def stages(layer: Layer, n: int, stored: int = ELEMENT) -> dict[str, Stage]:
    """filter, input, gemm, output of a 3x3 layer with stride 1. stored: bytes of a value of U, V and M."""
    tiles = n * ceil(layer.p / TILE) * ceil(layer.q / TILE)
    u, v, m = layer.c * layer.k, tiles * layer.c, tiles * layer.k  # each has POINTS values
    x, y = n * layer.c * layer.h * layer.w, n * layer.k * layer.p * layer.q
    return {
        "filter": Stage(FILTER * u, ELEMENT * 9 * u + stored * POINTS * u),
        "input": Stage(INPUT * v, ELEMENT * x + stored * POINTS * v),
        "gemm": Stage(2.0 * POINTS * tiles * layer.c * layer.k, stored * POINTS * (u + v + m)),
        "output": Stage(OUTPUT * m, stored * POINTS * m + ELEMENT * y),
    }


@dataclass(frozen=True)
class Predicted:
    """Microseconds: (8), one stage after the other; (9), all beside another; the latter with V and M on the chip."""

    series: float
    mixed: float
    on_chip: float


def predicted(
    layer: Layer, n: int, memory: float = BANDWIDTH, flops: float = FFMA_FLOPS, products: float | None = None,
    stored: int = ELEMENT,
) -> Predicted:  # fmt: skip
    """memory, flops: S_M and S_C; products: S_C of the products alone, where tensor cores compute them. stored: as in
    `stages`."""
    its = stages(layer, n, stored)
    transforms, gemm = its["input"] + its["output"], its["gemm"]
    rate = products or flops
    computed = max(gemm.flops / rate, transforms.flops / flops) if products else (transforms + gemm).flops / flops
    ends = ELEMENT * n * (layer.c * layer.h * layer.w + layer.k * layer.p * layer.q)
    series = transforms.bytes / memory + max(gemm.flops / rate, gemm.bytes / memory)
    mixed = max(computed, (transforms + gemm).bytes / memory)
    return Predicted(series * 1e6, mixed * 1e6, max(computed, ends / memory) * 1e6)
