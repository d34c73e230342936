"""The stages of the staged Winograd algorithms, timed one by one: how close the transforms come to memory speed."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import ours, results
from benchmarks.layers.sets import floor_here
from fastconv import _C, environment, ops
from fastconv.models.layers import Layer, select
from fastconv.timing import L2Flush

# Those of the folder whose stages are kernels of their own: its instances are named by their tile, F(m x m).
TILES = {
    row["name"]: row["tile"][0]
    for row in _C.algorithms()
    if row["name"] == "winograd_f{}".format(*row["tile"]) and row["tile"][0] == row["tile"][1]
}
STAGES = {"transpose": "transpose", "input_transform": "input", "output_transform": "output"}  # kernel -> stage
COPY = "Memcpy DtoD"
FLUSH = ("elementwise_kernel", "reduce_kernel", "Memset", COPY)  # what L2Flush launches, and what is no stage


def _stage_of(kernel: str) -> str | None:
    """The stage that a kernel belongs to; None: not ours."""
    for name, stage in STAGES.items():
        if name in kernel:
            return stage
    return None if any(name in kernel for name in FLUSH) else "gemm"


def _profiled(call: Callable[[], object], flush: L2Flush) -> list[tuple[str, float]]:
    """(kernel, microseconds) of all that a call runs on the GPU, with a cold L2."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        flush()
        call()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    return [(event.name, event.device_time) for event in profiler.events() if event.device_type == cuda]


def _copy_us(moved: float, flush: L2Flush, rounds: int) -> float:
    """A plain copy that reads and writes `moved` bytes in all: what memory gives to a kernel of that size."""
    source, target = (torch.empty(int(moved) // 32 * 16, dtype=torch.uint8, device="cuda").zero_() for _ in range(2))
    times = [
        sum(us for name, us in _profiled(lambda: target.copy_(source), flush) if COPY in name) for _ in range(rounds)
    ]
    return median(times)


def _moved_bytes(layer: Layer, n: int, accuracy: str, m: int, device: torch.device) -> dict[str, float]:
    """Bytes that each kernel beside the GEMM must move: x in and out; x in and V out; M in and y out."""
    tiles = n * ceil(layer.p / m) * ceil(layer.q / m)
    points = (m + 2) ** 2
    element = 2 if accuracy in ("fp16", "bf16") else 4
    split = 4 if ops.device_info(device).compute_capability == 90 else 6  # lo, hi; the library's GEMM needs hi twice
    v_element = {"ieee": 4, "fp32": split, "tf32": split}.get(accuracy, 2)
    x_bytes = n * layer.c * layer.h * layer.w * element
    return {
        "transpose": 2 * x_bytes,
        "input": x_bytes + points * tiles * layer.c * v_element,
        "output": points * tiles * layer.k * 4 + n * layer.k * layer.p * layer.q * element,
    }


def _unmeasured(total_us: float, floor_us: float | None) -> dict[str, Any]:
    """The rest of a layer row: the sum of the stages, and null where this suite measures nothing."""
    nothing = ("us_q25", "us_q75", "error", "max_error", "best_peer", "best_peer_us", "peer_error")
    row: dict[str, Any] = dict.fromkeys(nothing)
    return row | {"pass": "forward", "us": total_us, "floor_us": floor_us, "algorithms": {}, "peers": {}}


def _rate(row: dict[str, Any], stage: str) -> str:
    rate, copy = (row.get(f"{stage}_{what}tb_per_s") for what in ("", "copy_"))
    return "" if rate is None else f" {rate:5.2f} TB/s ({copy:.2f})"


def run(
    layers: str | None = None,
    *,
    batch: int = 64,
    accuracy: str = "fp32",
    algorithm: str = "winograd_f4",
    layouts: tuple[str, ...] = ("nhwc",),
    rounds: int = 10,
    out: Path | str | None = None,
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Profiles `algorithm` on the layer set (cold L2) and writes a result file, suite `winograd_stages`.

    Each row: layer, layout, class, us of the transposition of NCHW input (0 without), the input, gemm and output stage
    (medians over `rounds`), and the TB/s of all but the GEMM, each beside that of a plain copy of the same number of
    bytes. Needs a CUDA device.
    """
    device = torch.device("cuda")
    m = TILES[algorithm]
    head = environment.describe("winograd_stages", device)
    document = {**head, "rows": []}
    flush = L2Flush(device)
    for layer in select(layers):
        for layout in layouts:
            order = torch.channels_last if layout == "nhwc" else torch.contiguous_format
            x = torch.randn(batch, layer.c, layer.h, layer.w, device=device, dtype=ours.dtype_of(accuracy)).relu_()
            x = x.contiguous(memory_format=order)
            scale = (2.0 / (layer.c * 9)) ** 0.5
            weight = torch.randn(layer.k, layer.c, 3, 3, device=device, dtype=x.dtype) * scale
            call = ours.contender(algorithm, x, weight, layer, accuracy)
            call()
            torch.cuda.synchronize()
            samples: dict[str, list[float]] = {"transpose": [], "input": [], "gemm": [], "output": []}
            for _ in range(rounds):
                sums = dict.fromkeys(samples, 0.0)
                for name, time in _profiled(call, flush):
                    if (stage := _stage_of(name)) is not None:
                        sums[stage] += time
                for stage, value in sums.items():
                    samples[stage].append(value)
            us = {stage: median(values) for stage, values in samples.items()}
            moved = _moved_bytes(layer, batch, accuracy, m, device)
            copies = {stage: _copy_us(size, flush, 3) for stage, size in moved.items() if us[stage]}
            row = {**layer.fields(), "n": batch, "class": accuracy, "layout": layout, "algorithm": algorithm}
            row |= {f"{stage}_us": value for stage, value in us.items()}
            row |= _unmeasured(sum(us.values()), floor_here(layer, batch, accuracy, device))
            row |= {f"{stage}_tb_per_s": moved[stage] / us[stage] / 1e6 for stage in copies}
            row |= {f"{stage}_copy_tb_per_s": moved[stage] / copy / 1e6 for stage, copy in copies.items()}
            document["rows"].append(row)
            shown = [f"{stage} {time:8.1f} us" + _rate(row, stage) for stage, time in us.items() if time]
            report(f"{layer.layer:8} {layout}  {'   '.join(shown)}")
            del x, weight, call
            torch.cuda.empty_cache()
    results.write(out or results.default_path(head), document)
    return document
