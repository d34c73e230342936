"""The textbook's ladder: direct, tiled, unrolled for a matrix product, unrolled inside of it; what each moves.

`ladder` times the rungs on three layers. What it says beside the times is arithmetic: floating-point operations, bytes
that each rung asks of memory in the textbook's model, their quotient, which resource bounds it, how many times larger
the unrolled input is than the input, and how many bytes it takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.harness import results
from benchmarks.layers import suite as layer_suite
from benchmarks.layers.sets import BANDWIDTH, FFMA_FLOPS
from benchmarks.papers import Options
from fastconv.models.layers import SETS, Layer, select

BATCHES = (64,)
CLASSES = ("ieee", "fp32")
ELEMENT = 4  # bytes
TILE = 16  # outputs in height and width of a block, the textbook's
RUNGS = {
    "direct": "one thread per output",
    "direct_tiled": "input patch and filters in shared memory",
    "im2col_gemm": "unrolled to memory, then the library's product",
    "fused_unroll": "unrolled inside the product, FP32 arithmetic",
    "implicit_gemm": "unrolled inside the product, tensor cores",
}
LAYERS = [*select("res1,vgg4_2"), next(layer for layer in SETS["stems"] if layer.layer == "alexnet2")]


def expansion(layer: Layer) -> float:
    """How many times larger the unrolled input, [C R S, P Q], is than the input, [C, H, W] without its padding."""
    return layer.r * layer.s * layer.p * layer.q / (layer.h * layer.w)


def unrolled_bytes(layer: Layer, n: int = 1) -> int:
    """Of the unrolled input of n images."""
    return n * layer.c * layer.r * layer.s * layer.p * layer.q * ELEMENT


@dataclass(frozen=True)
class Roofline:
    """What a rung does: FLOPs, and bytes that it asks of memory."""

    flops: float
    bytes: float

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes

    @property
    def floor_us(self) -> float:
        """At the H200's bandwidth and FP32 rate."""
        return max(self.flops / FFMA_FLOPS, self.bytes / BANDWIDTH) * 1e6

    @property
    def bound(self) -> str:
        return "memory" if self.intensity < FFMA_FLOPS / BANDWIDTH else "arithmetic"


def roofline(layer: Layer, n: int, rung: str) -> Roofline:
    """In the textbook's model, without caches: a direct thread reads both operands of every product; a tile reads its
    patch of the input once for all its filters, and the filters once; unrolling writes the unrolled input and reads it
    back; a product that unrolls inside reads every operand once."""
    filters = layer.k * layer.c * layer.r * layer.s
    x, y = n * layer.c * layer.h * layer.w, n * layer.k * layer.p * layer.q
    flops = layer.direct_flops(n)
    if rung == "direct":
        elements = flops + y  # two operands for two operations
    elif rung == "direct_tiled":
        tiles = n * -(-layer.p // TILE) * -(-layer.q // TILE)
        rows = (min(TILE, extent) - 1 for extent in (layer.p, layer.q))
        height, width = (row * layer.stride + kernel for row, kernel in zip(rows, (layer.r, layer.s), strict=True))
        elements = tiles * (layer.c * height * width + filters) + y
    elif rung == "im2col_gemm":
        elements = x + 2 * unrolled_bytes(layer, n) / ELEMENT + filters + y
    else:
        elements = x + filters + y
    return Roofline(flops, elements * ELEMENT)


def ladder(options: Options) -> results.Document:
    """The rungs on the three layers."""
    names = options.layers.split(",") if options.layers else [""]
    return layer_suite.run(
        options.batches or BATCHES, options.classes or CLASSES,
        [layer for layer in LAYERS if any(layer.layer.startswith(name) for name in names)],
        [*RUNGS], rounds=options.rounds, budget_s=options.budget_s, out=options.out("paper_textbook"),
        device=options.device, layouts=("nchw", "nhwc"), layer_set="paper_textbook", resume=options.resume,
        workers=options.workers, survey=True,
    )  # fmt: skip


PARTS: dict[str, Any] = {"ladder": ladder}
