"""What the source's model says of the megakernel: operations and bytes of each stage of F(4x4,3x3), and the time that
mixing its tasks can hide. Class `ieee`, filters transformed beforehand; every array is read or written once.

    one stage after the other   M_T / S_M + max(C_G / S_C, M_G / S_M)                    (8)
    all stages beside another   max((C_T + C_G) / S_C, (M_T + M_G) / S_M)                (9)

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


def stages(layer: Layer, n: int) -> dict[str, Stage]:
    """filter, input, gemm, output of a 3x3 layer with stride 1."""
    tiles = n * ceil(layer.p / TILE) * ceil(layer.q / TILE)
    u, v, m = layer.c * layer.k, tiles * layer.c, tiles * layer.k  # each has POINTS values
    x, y = n * layer.c * layer.h * layer.w, n * layer.k * layer.p * layer.q
    return {
        "filter": Stage(FILTER * u, ELEMENT * (9 + POINTS) * u),
        "input": Stage(INPUT * v, ELEMENT * (x + POINTS * v)),
        "gemm": Stage(2.0 * POINTS * tiles * layer.c * layer.k, ELEMENT * POINTS * (u + v + m)),
        "output": Stage(OUTPUT * m, ELEMENT * (POINTS * m + y)),
    }


def predicted_us(layer: Layer, n: int, memory: float = BANDWIDTH, flops: float = FFMA_FLOPS) -> tuple[float, float]:
    """Microseconds of (8), one stage after the other, and of (9), all beside another. memory, flops: S_M and S_C."""
    its = stages(layer, n)
    transforms, products = its["input"] + its["output"], its["gemm"]
    both = transforms + products
    series = transforms.bytes / memory + max(products.flops / flops, products.bytes / memory)
    return series * 1e6, max(both.flops / flops, both.bytes / memory) * 1e6
