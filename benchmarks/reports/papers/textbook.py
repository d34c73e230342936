"""The textbook's ladder: times of the rungs beside what the model says that they move, and the roofline."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.harness.results import CLASSES, Document, Row, slug
from benchmarks.layers.sets import FFMA_FLOPS, TENSOR_FLOPS, bandwidth_of
from benchmarks.papers.textbook import (
    BATCHES,
    LAYERS,
    OWN_BLOCK,
    OWN_CONSTANT,
    OWN_DIRECT,
    OWN_UNROLL,
    RUNGS,
    Roofline,
    expansion,
    roofline,
    unrolled_bytes,
)
from benchmarks.reports import common
from benchmarks.reports.papers.shared import (
    BESIDE,
    NOTHING,
    File,
    beside,
    bytes_of,
    classes_of,
    of_class,
    packing_us,
    rates,
    short_name,
    span,
    without_empty,
)
from fastconv.figures import new_figure, save_figure

NAME = "textbook"
ON_TENSOR_CORES = "implicit_gemm"
ALIKE = (OWN_BLOCK, OWN_DIRECT, ON_TENSOR_CORES)  # rungs that move what another one does
# Rung -> the one that it is built on. `im2col_gemm` is of none: its product is cuBLAS's.
BUILT_ON = {OWN_CONSTANT: OWN_DIRECT, OWN_UNROLL: "direct_tiled", "fused_unroll": OWN_UNROLL}


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


def _modelled(its: Roofline, rung: str) -> tuple[float, str]:
    """Microseconds and what they are of. On tensor cores FP32 is three products of half types."""
    if rung != ON_TENSOR_CORES:
        return its.us, "memory" if its.bound == "memory" else "FP32 units"
    memory, products = its.bytes / its.bandwidth, 3 * its.flops / TENSOR_FLOPS
    return max(memory, products) * 1e6, "memory" if memory > products else "tensor cores, 3 products"


def ladder(document: Document, gpu: str, accuracy: str) -> str:
    """A row per layer and rung: time, rate, the model's time and bound, and the fastest rival."""
    found = _fastest(document, accuracy)
    header = ["layer", "rung", "layout", "us", "TFLOP/s", "times the rung before"]
    header += ["model's time without caches, us", "bound", "best peer us", "peer"]
    lines = []
    before: dict[str, float] = {}
    for (name, rung), (row, us) in sorted(found.items(), key=lambda item: (item[0][0], list(RUNGS).index(item[0][1]))):
        its = roofline(common.layer_of(row), row["n"], rung, bandwidth_of(gpu))
        line = [name, f"`{rung}`", row["layout"].upper(), common.us(us), f"{its.flops / us / 1e6:.2f}"]
        model_us, bound = _modelled(its, rung)
        line += [common.times(before[name] / us) if name in before else "-", common.us(model_us), bound]
        lines.append([*line, common.us(row["best_peer_us"]), f"`{row['best_peer']}`"])
        before[name] = us
    if not lines:
        return NOTHING
    image = f"![Roofline, class {accuracy}](../figures/{gpu}_paper_textbook_roofline_{accuracy}.svg)"
    return "\n\n".join([image, common.markdown_table(header, lines)])


def memory(document: Document, gpu: str) -> str:
    """A row per layer, class and layout: the fastest rung, its time with packing, what it keeps beside its tensors; and
    our choice, cuDNN's best, PyTorch's."""
    lines = []
    for accuracy in classes_of(document, CLASSES):
        for row in of_class(document, accuracy):
            found = [(us, rung) for rung in RUNGS if (us := row["algorithms"].get(rung))]
            if not found:
                continue
            us, rung = min(found)
            line = [row["layer"], f"`{accuracy}`", row["layout"].upper(), f"`{rung}`", common.us(us)]
            line += [common.us(packing_us(row, rung)), *bytes_of(row, 1, rung).split(", ")]
            lines.append([*line, *beside(row)])
    header = ["layer", "class", "layout", "fastest rung", "us", "with packing us", "workspace MiB"]
    header += ["packed filters MiB", *BESIDE]
    return without_empty(common.markdown_table(header, lines)) if lines else NOTHING


def kernels(document: Document, gpu: str) -> str:
    """A row per layer and rung: the longest of the kernels that it launches, and what of a multiprocessor it fills."""
    lines = []
    for row in document["rows"]:
        for kernel in row["kernels"][:1]:
            line = [row["layer"], f"`{row['algorithm']}`", f"`{short_name(kernel['kernel'])}`", str(kernel["launches"])]
            line += [str(kernel[each]) for each in ("blocks", "threads", "registers", "shared_bytes")]
            line += [f"{kernel['occupancy']:.0%}", common.us(kernel["us"]), *bytes_of(row).split(", ")]
            lines.append([*line, common.scientific(row["error"])])
    header = ["layer", "rung", "longest kernel", "launches", "blocks", "threads", "registers", "shared bytes"]
    header += ["occupancy", "us", "workspace MiB", "packed filters MiB", "error"]
    return without_empty(common.markdown_table(header, lines)) if lines else NOTHING


TABLES: dict[str, tuple[str, Callable[..., str]]] = {
    "model": ("papers/textbook/ladder", model),
    "ladder": ("papers/textbook/ladder", ladder),
    "memory": ("papers/textbook/ladder", memory),
    "kernels": ("papers/textbook/kernels", kernels),
}


def behind(document: Document, accuracy: str) -> list[float]:
    """Of each layer: how many times the best rival's time the fastest rung takes."""
    found = _fastest(document, accuracy)
    ratios = []
    for layer in dict.fromkeys(name for name, _ in found):
        rows = [row for row in of_class(document, accuracy) if row["layer"] == layer]
        if peers := [row["best_peer_us"] for row in rows if row["best_peer_us"]]:
            ratios.append(min(us for (name, _), (_, us) in found.items() if name == layer) / min(peers))
    return ratios


def said(file: File) -> str:
    """What holds of the claim: each rung moves less than the one before, and is faster."""
    found = _fastest(file("papers/textbook/ladder") or {"rows": []}, "ieee")
    if not found:
        return NOTHING
    document = file("papers/textbook/ladder") or {"rows": []}
    parts: dict[str, list[str]] = {}
    for layer in dict.fromkeys(name for name, _ in found):
        its = {rung: us for (name, rung), (_, us) in found.items() if name == layer}
        order = sorted(its, key=lambda rung: its[rung])
        gain = f"{its[order[-1]] / its[order[0]]:.1f} times as fast as `{order[-1]}`"
        parts.setdefault(order[0], []).append(f"{gain} on {layer}")
    text = "; ".join(f"`{rung}` is the fastest rung, {', '.join(its)}" for rung, its in parts.items())
    for rung, before in BUILT_ON.items():
        both = [(found[layer, before][1], us) for (layer, name), (_, us) in found.items() if name == rung
                if (layer, before) in found]  # fmt: skip
        gains = [first / second for first, second in both]
        if gains and all(gain < 1 for gain in gains):
            text += f"; `{rung}` is a step back, {span(gains)} times as fast as `{before}`"
    if others := behind(document, "ieee"):
        worse = sum(ratio > 1 for ratio in others)
        text += f"; the best rival is ahead of all rungs on {worse} of {len(others)} layers"
        text += f", the fastest rung takes {span(others, '.1f')} times its time"
    return f"In class `ieee` {text}."


SENTENCES: dict[str, Callable[[File], str]] = {}


def plot(document: Document, accuracy: str, path: Path) -> None:
    """FLOP/s against FLOP per byte of the model, both logarithmic, under the GPU's roof."""
    figure, axes = new_figure(6.5, 3.6)
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
    message = f"Class {accuracy}: tiles and cuBLAS's product lift the rungs; above the roof are caches"
    tensor_cores = any(rung == ON_TENSOR_CORES for _, rung in found)
    common.title(figure, message + (" and, above the FP32 units', tensor cores" if tensor_cores else ""), document)
    axes.legend(frameon=False, fontsize=6)
    save_figure(figure, path)


def figures(document: Document, prefix: str) -> dict[str, Callable[[Path], None]]:
    """<prefix>_roofline_<class>.svg."""
    drawn = [accuracy for accuracy in CLASSES if _fastest(document, accuracy)]
    return {f"{prefix}_roofline_{accuracy}.svg": partial(plot, document, accuracy) for accuracy in drawn}
