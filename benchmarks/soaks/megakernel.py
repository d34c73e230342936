"""A million launches of winograd_megakernel: any shape, map, grid and delays, on several streams beside a competing
kernel; the bits of each are those of an ordinary call, and none hangs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from math import ceil
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import ours, results
from benchmarks.soaks import concurrent
from fastconv import environment, ops, reference, testing
from fastconv.instrumented import Megakernel, Options
from fastconv.models.layers import Layer

NAME, SUITE = "winograd_megakernel", "soak_megakernel"
STREAMS, PER_STREAM = 8, 48  # of a graph: launches that may overlap, and each stream's
NOISE = 30  # competing kernels of a graph


def random_layers(seed: int) -> Iterator[tuple[Layer, int, str]]:
    """Endless small layers, batch and layout: 3x3, any size and channels, one to seven groups of tiles."""
    draw = random.Random(seed)
    while True:
        step = draw.choice((1, 4, 8))
        c, k = (step * draw.randint(1, 144 // step) for _ in range(2))
        padding, n = draw.randint(0, 2), draw.choice((1, 1, 2, 3, 5))
        h, w = (draw.randint(3, draw.choice((8, 48))) for _ in range(2))
        yield Layer("random_3x3", c, h, w, k, padding=padding), n, draw.choice(("nhwc", "nchw"))


def random_options(draw: random.Random, blocks: int) -> Options:
    """A map, a grid of 1 to `blocks` blocks and delays of up to 4 us, each as planned, or off, half of the time."""
    grid = draw.choice((0, 0, draw.randint(1, blocks), draw.randint(2, 12)))
    grid = draw.choice((1, 2, 3)) if draw.random() < 0.04 else grid  # slow
    d_ig, d_go = (draw.choice((None, None, 0, draw.randint(0, 300))) for _ in range(2))
    delay = draw.choice((0, 0, 0, 255, 1023)) if draw.random() < 0.96 else 4095
    return Options(d_ig, d_go, draw.choice((None, None, 1, 2, 3)), grid, delay)


def _varied(
    pair: Sequence[Megakernel], outputs: torch.Tensor, expected: torch.Tensor, options: Sequence[Options],
    wrong: torch.Tensor,
) -> Callable[[], None]:  # fmt: skip
    """A launch for each of `options`, of the same layer with two inputs, which take turns: what a launch finds in the
    workspace is not what it is about to write there, so that reading too early shows.

    The outputs [launches, ...] lie behind one another, NaN before the launches; how many of them differ from `expected`
    [2, ...] is added to `wrong` [1].
    """

    def work() -> None:
        outputs.fill_(float("nan"))
        for launch, each in enumerate(options):
            pair[launch % 2](each, outputs[launch])
        found = concurrent.bits(outputs).unflatten(0, (len(options) // 2, 2))
        wrong.add_((found != concurrent.bits(expected)).flatten(2).any(2).sum())

    return work


def _some(layer: Layer, n: int, layout: str, accuracy: str, device: torch.device) -> tuple[Any, ...]:
    """(two kernels, the outputs of ordinary calls [2, ...], the larger error) of a layer and two inputs, whose values
    are spread over many powers of two."""
    order = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    dtype = ours.dtype_of(accuracy)
    weight = (torch.randn(layer.k, layer.c, 3, 3, device=device) / (layer.c * 3) ** 0.5).to(dtype)
    padding = (layer.padding, layer.padding)
    pair, found = [], []
    for _ in range(2):
        x = torch.randn(n, layer.c, layer.h, layer.w, device=device)
        x = x * torch.exp2(torch.randint(-6, 7, x.shape, device=device).float())
        x = x.to(dtype).contiguous(memory_format=order)
        pair.append(Megakernel(x, weight, padding, ours.precision_of(accuracy)))
        y = ours.contender(NAME, x, weight, layer, accuracy)()  # the ordinary operator, not the instrumented one
        found.append((y, testing.errors(y, reference.conv2d(x, weight, padding=layer.padding))))
    expected = pair[0].new_output(2)
    for place, (y, _) in zip(expected, found, strict=True):
        place.copy_(y)
    return pair, expected, max((errors for _, errors in found), key=lambda errors: errors.relative_l2)


def run(
    *,
    launches: int = 1_000_000,
    shapes: int = 200,
    classes: Sequence[str] = ("fp32", "ieee"),
    seed: int = 0,
    budget_s: float = 600.0,
    out: Path | str | None = None,
    report: Callable[[str], None] = print,
) -> results.Document:
    """Launches the megakernel `launches` times, in all classes together, over `shapes` random layers in each, and
    writes a result file.

    Eight layers at a time, a stream each, in a CUDA graph that is replayed; each launch in it has a map, a grid and
    delays of its own, and another input than the one before. A launch that hangs ends in an exception that names the
    wait (docs/concepts/megakernel.md). No layer
    begins after `budget_s` seconds. Needs a CUDA device. Returns the document, suite `soak_megakernel`: a row per
    layer with `launches`, `mismatches`, `seconds` and the error of the ordinary call; `missing`: classes that the
    kernel does not offer, and what there was no time for.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    head = environment.describe(SUITE, device)
    document: results.Document = {**head, "rows": [], "missing": []}
    draw, begin = random.Random(seed), time.perf_counter()
    blocks = ops.device_info(device).processors
    offered = []
    for accuracy in classes:
        rows = ours.candidates(Layer("any", 64, 14, 14, 64), 1, accuracy, "nhwc", device)
        (row,) = (row for row in rows if row["algorithm"] == NAME)
        offered += [accuracy] if row["ok"] else []
        document["missing"] += [] if row["ok"] else [f"{accuracy}: {row['reason']}"]
    for accuracy in offered:
        layers = random_layers(seed)
        turns = ceil(shapes / STREAMS)
        replays = ceil(launches / (len(offered) * turns * STREAMS * PER_STREAM))
        for turn in range(turns):
            if time.perf_counter() - begin > budget_s:
                document["missing"].append(f"{accuracy}: {turns - turn} of {turns} turns, for want of time")
                break
            chosen = [next(layers) for _ in range(STREAMS)]
            some = [_some(*each, accuracy, device) for each in chosen]
            wrong = torch.zeros(STREAMS, dtype=torch.int64, device=device)
            outputs = [pair[0].new_output(PER_STREAM) for pair, _, _ in some]
            works = []
            for (pair, expected, _), place, count in zip(some, outputs, wrong.split(1), strict=True):
                options = [random_options(draw, blocks) for _ in range(PER_STREAM)]
                works.append(_varied(pair, place, expected, options, count))
            graph = concurrent.capture(works, NOISE, device)
            start = time.perf_counter()
            for _ in range(replays):
                graph.replay()
            torch.cuda.synchronize(device)
            seconds = time.perf_counter() - start
            for (layer, n, layout), (_, _, errors), mismatches in zip(chosen, some, wrong.tolist(), strict=True):
                row = dict.fromkeys(("us", "us_q25", "us_q75", "best_peer", "best_peer_us", "peer_error", "floor_us"))
                row |= {**layer.fields(), "n": n, "class": accuracy, "layout": layout, "pass": "forward"}
                row |= {"algorithm": NAME, "algorithms": {}, "peers": {}, "error": errors.relative_l2}
                row |= {"max_error": errors.maximum, "launches": replays * PER_STREAM, "mismatches": mismatches}
                document["rows"].append(row | {"seconds": seconds / STREAMS})
            del graph, outputs
            results.write(out or results.default_path(head), document)
            done = sum(row["launches"] for row in document["rows"])
            differ = sum(row["mismatches"] for row in document["rows"])
            report(f"{accuracy}: {done} launches, {differ} differ, {time.perf_counter() - begin:.1f} s")
    results.write(out or results.default_path(head), document)
    return document
