"""The textbook's ladder: direct, tiled, unrolled for a matrix product, unrolled inside of it; what each moves.

ladder   times of the rungs on three layers. What is said beside them is arithmetic: floating-point operations, bytes
         that each rung asks of memory in the textbook's model, their quotient, which resource bounds it, how many times
         larger the unrolled input is than the input, and how many bytes it takes
kernels  what each rung launches in NCHW: blocks, threads, registers, shared memory, occupancy; needs cuda
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
OWN_BLOCK, OWN_DIRECT, OWN_CONSTANT, OWN_UNROLL = (
    ladder_study.PREFIX + name
    for name in ("direct", "direct_restrict_size", "direct_constant_memory", "unroll_restrict")
)
RUNGS = {
    OWN_BLOCK: "one thread per output, blocks of 16x16",
    "direct": "one thread per output, any layout and size",
    OWN_DIRECT: "blocks of 16x16, the filter's size a constant",
    OWN_CONSTANT: "the same, filters in constant memory, 64 KiB at a time",
    "direct_tiled": "input patch and filters in shared memory",
    OWN_UNROLL: "unrolled to memory, then a product in tiles of 16x16",
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
    """In the textbook's model, without caches: a direct thread reads both operands of every product, or one of them
    where constant memory has the other; a tile reads its
    patch of the input once for all its filters, and the filters once; unrolling writes the unrolled input and reads it
    back; a product that unrolls inside reads every operand once."""
    filters = layer.k * layer.c * layer.r * layer.s
    x, y = n * layer.c * layer.h * layer.w, n * layer.k * layer.p * layer.q
    flops = layer.direct_flops(n)
    if rung in ("direct", OWN_BLOCK, OWN_DIRECT):
        elements = flops + y  # two operands for two operations
    elif rung == OWN_CONSTANT:  # whose cache answers for the filters
        elements = flops / 2 + filters + y
    elif rung == OWN_UNROLL:  # a tile reads its rows of both operands once
        tiles = n * -(-layer.p * layer.q // TILE)
        unrolled = unrolled_bytes(layer, n) / ELEMENT
        elements = x + unrolled + -(-layer.k // TILE) * unrolled + tiles * filters + y
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
