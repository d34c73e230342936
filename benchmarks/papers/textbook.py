"""The textbook's ladder: direct, tiled, unrolled for a matrix product, unrolled inside of it; what each moves.

ladder   times of the rungs on three layers. What is said beside them is arithmetic: floating-point operations, bytes
         that each rung asks of memory in the textbook's model, their quotient, which resource bounds it, how many times
         larger the unrolled input is than the input, and how many bytes it takes
kernels  what each rung launches in NCHW: blocks, threads, registers, shared memory, occupancy
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.harness import launches, ours, results, turns
from benchmarks.harness.runs import deadline_of, is_past
from benchmarks.layers import group as layer_group
from benchmarks.layers import suite as layer_suite
from benchmarks.layers.sets import BANDWIDTH, FFMA_FLOPS
from benchmarks.papers import Options
from benchmarks.papers.common import KERNEL_KEY, empty_row
from benchmarks.studies import ladder as study
from fastconv import timing
from fastconv.models.layers import SETS, Layer, select

BATCHES = (64,)
CLASSES = ("ieee", "fp32")
ELEMENT = 4  # bytes
TILE = 16  # outputs in height and width of a block, the textbook's
OWN_BLOCK, OWN_DIRECT, OWN_CONSTANT, OWN_UNROLL = (
    study.PREFIX + name for name in ("direct", "direct_restrict_size", "direct_constant_memory", "unroll_restrict")
)
TENSOR_CORES = "implicit_gemm"
RUNGS = {
    OWN_BLOCK: "one thread per output, blocks of 16x16",
    "direct": "one thread per output, any layout and size",
    OWN_DIRECT: "blocks of 16x16, the filter's size a constant",
    OWN_CONSTANT: "the same, filters in constant memory, 64 KiB at a time",
    "direct_tiled": "input patch and filters in shared memory",
    OWN_UNROLL: "unrolled to memory, then a product in tiles of 16x16",
    "im2col_gemm": "unrolled to memory, then the library's product",
    "fused_unroll": "unrolled inside the product, FP32 arithmetic",
    TENSOR_CORES: "unrolled inside the product, tensor cores",
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
    """What a rung does: FLOPs, and bytes that it asks of memory, which reads so many in a second."""

    flops: float
    bytes: float
    bandwidth: float = BANDWIDTH

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes

    @property
    def us(self) -> float:
        """Without caches, at that bandwidth and Hopper's FP32 rate: what caches hold, a kernel may beat."""
        return max(self.flops / FFMA_FLOPS, self.bytes / self.bandwidth) * 1e6

    @property
    def bound(self) -> str:
        return "memory" if self.intensity < FFMA_FLOPS / self.bandwidth else "arithmetic"


def roofline(layer: Layer, n: int, rung: str, bandwidth: float = BANDWIDTH) -> Roofline:
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
    return Roofline(flops, elements * ELEMENT, bandwidth)


def _layers_of(options: Options) -> list[Layer]:
    names = options.layers.split(",") if options.layers else [""]
    return [layer for layer in LAYERS if any(layer.layer.startswith(name) for name in names)]


def ladder(options: Options) -> results.Document:
    """The rungs on the three layers."""
    return layer_suite.run(
        options.batches or BATCHES, options.classes or CLASSES, _layers_of(options), [*RUNGS], rounds=options.rounds,
        budget_s=options.budget_s, device=options.device, layouts=("nchw", "nhwc"), resume=options.resume,
        workers=options.workers, survey=True, **options.file("papers/textbook/ladder"),
    )  # fmt: skip


def kernels(options: Options) -> results.Document:
    """A row per layer and rung, NCHW: class `ieee`, and of what has only tensor cores `fp32`."""
    device, (out, document) = torch.device(options.device), options.held("papers/textbook/kernels", KERNEL_KEY)
    held = {(row["layer"], row["n"]) for row in results.own_rows(document)} if options.resume else set()
    n, deadline = (options.batches or BATCHES)[0], deadline_of(options.budget_s)
    with torch.inference_mode():
        for layer in _layers_of(options):
            if (layer.layer, n) in held or is_past(deadline):
                continue
            with turns.timing():
                rows = [row for accuracy in ("ieee", "fp32") for row in _kernel_rows(layer, n, accuracy, device)]
            for row in rows:
                results.put(document, row, KERNEL_KEY)
            results.write(out, document)
    return document


def _kernel_rows(layer: Layer, n: int, accuracy: str, device: torch.device) -> list[results.Row]:
    layout = "nchw"
    group = layer_group.Group(layer, n, torch.float32, False, [accuracy], (layout,), device)
    reference = layer_group.prepare_data(group, seed=0)
    x, weight, rows = group.inputs[layout], group.weights[layout], []
    serving = study.serving(RUNGS, layer, accuracy, layout, device)
    planned = ours.candidates(layer, n, accuracy, layout, device)
    workspaces = {row["algorithm"]: row["workspace_bytes"] for row in planned if row["ok"]}
    serving += workspaces
    for rung in RUNGS if accuracy == "ieee" else (TENSOR_CORES,):
        if rung not in serving:
            continue
        row = empty_row(layer, n, accuracy, layout) | {"algorithm": rung, "kernels": []}
        try:
            if study.is_rung(rung):
                call, kept = study.contender(rung, x, weight, layer), (study.workspace_bytes(rung, x, weight, layer), 0)
            else:
                call = ours.contender(rung, x, weight, layer, accuracy)
                kept = workspaces[rung], ours.packed_bytes(rung, weight, layer, accuracy)
            row |= {"workspace_bytes": kept[0], "packed_bytes": kept[1]}
            row["error"] = reference.error(call())["l2"]
            if device.type == "cuda":
                row["kernels"] = launches.distinct(launches.of_call(call), launches.Multiprocessor.of(device))
        except RuntimeError as error:
            row["notes"][rung] = timing.message_of(error)
            timing.recover()
        rows.append(row)
    return rows


PARTS: dict[str, Any] = {"ladder": ladder, "kernels": kernels}
