"""Many launches of each algorithm, side by side with others: the same bits every time, and no wait that never ends."""

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
from fastconv import environment, reference, testing
from fastconv.models.layers import Layer

PER_GRAPH = 25  # launches of each of two streams in a graph


def random_layers(seed: int, channels: int = 160, size: int = 40, batch: int = 9) -> Iterator[tuple[Layer, int]]:
    """Endless small layers with their batch: any size up to these, channels in eights half of the time, kernels 3x3
    mostly."""
    draw = random.Random(seed)
    while True:
        step = draw.choice((1, 8))
        c, k = (step * draw.randint(1, channels // step) for _ in range(2))
        r = draw.choice((3, 3, 3, 1, 5))
        stride = 1 if r == 3 else draw.choice((1, 2))
        h, w = draw.randint(r, size), draw.randint(r, size)
        yield Layer(f"random_{r}x{r}", c, h, w, k, r, r, stride, r // 2), draw.randint(1, batch)


def _repeated(call: Callable[[], torch.Tensor], expected: torch.Tensor, wrong: torch.Tensor) -> Callable[[], None]:
    """PER_GRAPH runs of a call. Each output is compared with the expected bits, counted in `wrong` [1], and overwritten
    with NaN: its memory is the next launch's."""

    def work() -> None:
        for _ in range(PER_GRAPH):
            output = call()
            wrong.add_((concurrent.bits(output) != expected).any())
            output.fill_(float("nan"))
            del output

    return work


def _one(algorithm: str, layer: Layer, n: int, accuracy: str, layout: str, launches: int, device: torch.device):
    """The row of one layer: two inputs, one of them with magnitudes spread over many powers of two."""
    order = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    dtype = ours.dtype_of(accuracy)
    shape = (n, layer.c, layer.h, layer.w)
    inputs = [torch.randn(shape, device=device), torch.randn(shape, device=device)]
    inputs[1] *= torch.exp2(torch.randint(-6, 7, shape, device=device).float())
    inputs = [x.to(dtype).contiguous(memory_format=order) for x in inputs]
    weight = (torch.randn(layer.k, layer.c, layer.r, layer.s, device=device) / (layer.c * layer.r) ** 0.5).to(dtype)
    calls = [ours.contender(algorithm, x, weight, layer, accuracy) for x in inputs]
    first = [call() for call in calls]
    exact = reference.conv2d(inputs[0], weight, stride=layer.stride, padding=layer.padding)
    expected = [concurrent.bits(y.clone(memory_format=torch.preserve_format)) for y in first]
    wrong = torch.zeros(len(calls), dtype=torch.int64, device=device)
    works = [_repeated(*each) for each in zip(calls, expected, wrong.split(1), strict=True)]
    graph = concurrent.capture(works, PER_GRAPH, device)
    replays = ceil(launches / (PER_GRAPH * len(calls)))
    start = time.perf_counter()
    for _ in range(replays):
        graph.replay()
    torch.cuda.synchronize(device)
    found = testing.errors(first[0], exact)
    row: dict[str, Any] = dict.fromkeys(
        ("us", "us_q25", "us_q75", "best_peer", "best_peer_us", "peer_error", "floor_us")
    )
    row |= {**layer.fields(), "n": n, "class": accuracy, "layout": layout, "pass": "forward", "algorithm": algorithm}
    row |= {"algorithms": {}, "peers": {}, "error": found.relative_l2, "max_error": found.maximum}
    return row | {
        "launches": replays * PER_GRAPH * len(calls),
        "mismatches": int(wrong.sum()),
        "seconds": time.perf_counter() - start,
    }


def run(
    algorithms: Sequence[str],
    classes: Sequence[str],
    *,
    launches: int = 100_000,
    layers: int = 10,
    seed: int = 0,
    out: Path | str | None = None,
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Launches each algorithm `launches` times in each class, over `layers` random layers, and writes a result file.

    Launches overlap on two streams, beside matrix products on a third, in CUDA graphs; every output is compared bit by
    bit with that of a lone call, whose error against float64 is in the row. Needs a CUDA device. Returns the document,
    suite `soak`: a row per layer with `launches` and `mismatches`; algorithms that do not offer a class have no row.
    """
    device = torch.device("cuda")
    head = environment.describe("soak", device)
    document = {**head, "rows": []}
    for algorithm in algorithms:
        for accuracy in classes:
            done = 0
            for index, (layer, n) in enumerate(random_layers(seed)):
                if done == layers or index == 100 * layers:
                    break
                layout = ("nhwc", "nchw")[index % 2]
                candidates = ours.candidates(layer, n, accuracy, layout, device)
                if not any(row["ok"] for row in candidates if row["algorithm"] == algorithm):
                    continue
                document["rows"].append(_one(algorithm, layer, n, accuracy, layout, ceil(launches / layers), device))
                done += 1
            rows = [row for row in document["rows"] if (row["algorithm"], row["class"]) == (algorithm, accuracy)]
            if rows:
                count, wrong = (sum(row[name] for row in rows) for name in ("launches", "mismatches"))
                seconds = sum(row["seconds"] for row in rows)
                report(f"{algorithm:20} {accuracy:5} {count} launches, {wrong} differ, {seconds:.1f} s")
                results.write(out or results.default_path(head), document)
    return document
