"""The textbook's ladder: times of the rungs beside what the model says that they move, and the roofline."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.harness.results import CLASSES, Document, Row, slug
from benchmarks.layers.sets import FFMA_FLOPS, bandwidth_of
from benchmarks.papers.textbook import (
    BATCHES,
    LAYERS,
    OWN_BLOCK,
    OWN_DIRECT,
    RUNGS,
    expansion,
    roofline,
    unrolled_bytes,
)
from benchmarks.reports import common
from benchmarks.reports.papers.shared import NOTHING, File, of_class, rates
from fastconv.figures import new_figure, save_figure

NAME = "textbook"
ALIKE = (OWN_BLOCK, OWN_DIRECT, "implicit_gemm")  # rungs that move what another one does


def model(document: Document, gpu: str) -> str:
    """Arithmetic alone, at the experiment's batch."""
    (n,) = BATCHES
    header = ["layer", "C->K @HxW, filter", "GFLOP", "unrolled / input", "unrolled, one image MiB", f"batch {n} MiB"]
    shown = [rung for rung in RUNGS if rung not in ALIKE]
    header += [f"`{rung}`: GB, FLOP per byte, bound" for rung in shown]
    lines = []
    for layer in LAYERS:
        shape = f"{layer.c}->{layer.k} @{layer.h}x{layer.w}, {layer.r}x{layer.s}"
        line = [layer.layer, shape, f"{layer.direct_flops(n) / 1e9:.1f}", f"{expansion(layer):.2f}"]
        line += [f"{unrolled_bytes(layer, images) / 2**20:.1f}" for images in (1, n)]
        for rung in shown:
            its = roofline(layer, n, rung, bandwidth_of(gpu))
            line.append(f"{its.bytes / 1e9:.2f}, {its.intensity:.2f}, {its.bound}")
        lines.append(line)
    return f"{common.markdown_table(header, lines)}\n\n{rates(gpu)}"


def _fastest(document: Document, accuracy: str) -> dict[tuple[str, str], tuple[Row, float]]:
    """(layer, rung) -> the row of its faster layout, and its microseconds."""
    found: dict[tuple[str, str], tuple[Row, float]] = {}
    for row in of_class(document, accuracy):
        for rung in RUNGS:
            us = row["algorithms"].get(rung)
            if us and us < found.get((row["layer"], rung), (row, float("inf")))[1]:
                found[row["layer"], rung] = row, us
    return found


def ladder(document: Document, gpu: str, accuracy: str) -> str:
    """A row per layer and rung: time, rate, the model's floor and bound, and the fastest rival."""
    found = _fastest(document, accuracy)
    header = ["layer", "rung", "layout", "us", "TFLOP/s", "times the rung before", "model's floor us", "its bound"]
    header += ["best peer us", "peer"]
    lines = []
    before: dict[str, float] = {}
    for (name, rung), (row, us) in sorted(found.items(), key=lambda item: (item[0][0], list(RUNGS).index(item[0][1]))):
        its = roofline(common.layer_of(row), row["n"], rung, bandwidth_of(gpu))
        line = [name, f"`{rung}`", row["layout"].upper(), common.us(us), f"{its.flops / us / 1e6:.2f}"]
        line += [common.times(before[name] / us) if name in before else "-", common.us(its.floor_us), its.bound]
        lines.append([*line, common.us(row["best_peer_us"]), f"`{row['best_peer']}`"])
        before[name] = us
    if not lines:
        return NOTHING
    image = f"![Roofline, class {accuracy}](../figures/{gpu}_paper_textbook_roofline_{accuracy}.svg)"
    return "\n\n".join([image, common.markdown_table(header, lines)])


def kernels(document: Document, gpu: str) -> str:
    """A row per layer and rung: the longest of the kernels that it launches, and what of a multiprocessor it fills."""
    lines = []
    for row in document["rows"]:
        for kernel in row["kernels"][:1]:
            name = kernel["kernel"].partition("(")[0].partition("<")[0].removeprefix("void ").split("::")[-1]
            line = [row["layer"], f"`{row['algorithm']}`", f"`{name}`", str(kernel["launches"])]
            line += [str(kernel[each]) for each in ("blocks", "threads", "registers", "shared_bytes")]
            lines.append(
                [*line, f"{kernel['occupancy']:.0%}", common.us(kernel["us"]), common.scientific(row["error"])]
            )
    header = ["layer", "rung", "longest kernel", "launches", "blocks", "threads", "registers", "shared bytes"]
    return common.markdown_table([*header, "occupancy", "us", "error"], lines) if lines else NOTHING


TABLES: dict[str, tuple[str | None, Callable[..., str]]] = {
    "model": (None, model),
    "ladder": ("paper_textbook", ladder),
    "kernels": ("paper_textbook_kernels", kernels),
}


def said(file: File) -> str:
    """What holds of the claim: each rung moves less than the one before, and is faster."""
    found = _fastest(file("paper_textbook") or {"rows": []}, "ieee")
    if not found:
        return NOTHING
    parts = []
    for layer in dict.fromkeys(name for name, _ in found):
        its = {rung: us for (name, rung), (_, us) in found.items() if name == layer}
        order = sorted(its, key=lambda rung: its[rung])
        gain = its[order[-1]] / its[order[0]]
        parts.append(f"{layer}: `{order[0]}` is the fastest rung, {gain:.1f} times as fast as `{order[-1]}`")
    return f"In class `ieee`, {'; '.join(parts)}."


def plot(document: Document, accuracy: str, path: Path) -> None:
    """FLOP/s against FLOP per byte of the model, both logarithmic, under the GPU's roof."""
    figure, axes = new_figure(5.5, 3.4)
    bandwidth = bandwidth_of(slug(document["gpu"]))
    span = [0.1, 1e4]
    axes.plot(span, [min(FFMA_FLOPS, bandwidth * x) / 1e12 for x in span], color="white")  # the limits of the axes
    ridge = FFMA_FLOPS / bandwidth
    roof = [span[0], ridge, span[1]]
    axes.plot(roof, [min(FFMA_FLOPS, bandwidth * x) / 1e12 for x in roof], color="black", linewidth=0.9)
    found = _fastest(document, accuracy)
    for index, rung in enumerate(RUNGS):
        points = [
            (roofline(common.layer_of(row), row["n"], rung), us) for (_, its), (row, us) in found.items() if its == rung
        ]
        if points:
            rates = [its.flops / us / 1e6 for its, us in points]
            label = f"{rung}: {min(rates):.1f} to {max(rates):.1f} TFLOP/s"
            axes.scatter([its.intensity for its, _ in points], rates, s=24, color=f"C{index}", label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOP per byte, in the textbook's model")
    axes.set_ylabel("TFLOP/s")
    message = f"Class {accuracy}: what each rung reaches under FP32's roof; above it are caches and tensor cores"
    figure.suptitle(f"{message} ({document['gpu']})", x=0.01, ha="left", fontsize=8)
    axes.legend(frameon=False, fontsize=6)
    save_figure(figure, path)


def figures(document: Document, prefix: str) -> dict[str, Callable[[Path], None]]:
    """<prefix>_roofline_<class>.svg."""
    drawn = [accuracy for accuracy in CLASSES if _fastest(document, accuracy)]
    return {f"{prefix}_roofline_{accuracy}.svg": partial(plot, document, accuracy) for accuracy in drawn}
