"""Single-image ResNet: six layers, what is launched for them, how exact it is; blocks and networks by form."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from operator import truediv
from pathlib import Path
from typing import Any

from benchmarks.harness.results import CLASSES, Document, Row
from benchmarks.layers.suite import ratio
from benchmarks.networks.forms import MODES
from benchmarks.papers.single_image import BEYOND, SOURCE
from benchmarks.peers import REFUSED
from benchmarks.reports import common
from benchmarks.reports.networks import speedup_of
from benchmarks.reports.papers.shared import NOTHING, File, classes_of, of_class, rows_in, short_name, span
from fastconv.figures import new_figure, save_figure

NAME = "single_image"
WORDS = re.compile(r"\w+")
MAX_BEYOND = 1e-3  # the source's: fewer than 0.1 % of the elements


def cudnn_us(row: Row) -> float | None:
    """cuDNN's fused convolution, bias and activation, at its fastest in either layout."""
    names = [f"{name}_{layout}" for name in ("cudnn_graph",) for layout in ("nchw", "nhwc")]
    names += [f"torch_{layout}_fused" for layout in ("nchw", "nhwc")]
    refused = {name for name, note in row.get("notes", {}).items() if note.startswith(REFUSED)}
    return min((us for name in names if name not in refused and (us := row["peers"].get(name))), default=None)


def eager_us(row: Row) -> float | None:
    """PyTorch's convolution, then bias and ReLU in passes of their own."""
    return min((us for name in ("torch_nchw", "torch_nhwc") if (us := row["peers"].get(name))), default=None)


def best_rows(document: Document) -> list[Row]:
    """Of every layer and class the row of the layout in which `auto` is faster."""
    found: dict[tuple[str, str], Row] = {}
    for accuracy in CLASSES:
        for row in of_class(document, accuracy):
            held = found.get((accuracy, row["layer"]))
            if row["us"] and (held is None or row["us"] < held["us"]):
                found[accuracy, row["layer"]] = row
    return list(found.values())


def layers(document: Document, gpu: str) -> str:
    header = [
        "layer",
        "class",
        "source: cuDNN, its own us",
        "its gain",
        "ours us",
        "algorithm",
        "layout",
        "cuDNN fused us",
    ]
    header += ["gain", "PyTorch's passes us", "gain", "error", "workspace MiB", "packed MiB"]
    header += ["with packing us"]
    lines = []
    for row in best_rows(document):
        theirs, its = SOURCE.get(row["layer"], (None, None))
        line = [row["layer"], f"`{row['class']}`", f"{theirs}, {its}"]
        line += [common.times(_source_gain(row)), common.us(row["us"]), f"`{row['algorithm']}`"]
        line += [row["layout"].upper(), common.us(cudnn_us(row)), common.times(speedup_of(row["us"], cudnn_us(row)))]
        line += [common.us(eager_us(row)), common.times(speedup_of(row["us"], eager_us(row)))]
        line += [common.scientific(row["error"])]
        line += [common.mib(row.get(f"{name}_bytes"), 2) for name in ("workspace", "packed")]
        lines.append([*line, common.us(row.get("us_with_packing"))])
    drawn = dict.fromkeys(row["class"] for row in best_rows(document) if cudnn_us(row))
    images = [f"![Layers, class {each}](../figures/{gpu}_paper_single_image_layers_{each}.svg)" for each in drawn]
    return "\n\n".join([*images, common.markdown_table(header, lines)])


def kernels(document: Document, gpu: str) -> str:
    """A row per kernel that an algorithm launches."""
    header = [
        "layer",
        "class",
        "algorithm",
        "kernel",
        "blocks",
        "threads",
        "registers",
        "shared bytes",
        "occupancy",
        "us",
    ]
    lines = []
    for accuracy in classes_of(document, CLASSES):
        for row in of_class(document, accuracy):
            for kernel in row["kernels"]:
                line = [row["layer"], f"`{accuracy}`", f"`{row['algorithm']}`", f"`{short_name(kernel['kernel'])}`"]
                line += [str(kernel["blocks"])]
                line += [str(kernel[each]) for each in ("threads", "registers", "shared_bytes")]
                lines.append([*line, f"{kernel['occupancy']:.0%}", common.us(kernel["us"])])
    return common.markdown_table(header, lines) if lines else NOTHING


def statistic(document: Document, gpu: str) -> str:
    """A row per algorithm and class: the largest error of any element of the layers, the largest share that is beyond
    the source's 1e-5, and on how many layers that is below 0.1 %."""
    lines = []
    for accuracy in classes_of(document, CLASSES):
        rows = [row for row in of_class(document, accuracy) if row["largest"] is not None]
        for algorithm in dict.fromkeys(row["algorithm"] for row in rows):
            its = [row for row in rows if row["algorithm"] == algorithm]
            beyond = [row["beyond"] for row in its]
            kept = sum(share < MAX_BEYOND for share in beyond)
            line = [f"`{algorithm}`", f"`{accuracy}`", common.scientific(max(row["largest"] for row in its))]
            lines.append([*line, f"{max(beyond) * 100:.3f} %", f"{kept} of {len(its)}"])
    header = ["algorithm", "class", "largest error", f"most elements beyond {BEYOND:g}", "layers with less than 0.1 %"]
    return common.markdown_table(header, lines)


def forms(document: Document, gpu: str) -> str:
    """A row per network (or block) and class: every form of both sides, and the fastest of ours over PyTorch's."""
    modes = [mode for mode in MODES if any(row["mode"] == mode for row in document["rows"])]
    peers = list(dict.fromkeys(name for row in document["rows"] for name in row["peers"]))
    header = ["network", "class", *(f"ours {mode} us" for mode in modes), *(f"`{name}` us" for name in peers)]
    header += ["fastest over fastest", "same form, eager"]
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for accuracy in CLASSES:
        for row in of_class(document, accuracy):
            found.setdefault((row["network"], accuracy), {})[row["mode"]] = row
    lines = []
    for (name, accuracy), its in found.items():
        first = next(iter(its.values()))
        cells = [common.us(its[mode]["us"] if mode in its else None) for mode in modes]
        cells += [common.us(first["peers"].get(peer)) for peer in peers]
        ours = min((row["us"] for row in its.values() if row["us"]), default=None)
        eager = its["eager"]["us"] if "eager" in its else None
        ratios = [speedup_of(ours, first["best_peer_us"]), speedup_of(eager, first["peers"].get("torch_eager"))]
        lines.append([name, f"`{accuracy}`", *cells, *map(common.times, ratios)])
    return common.markdown_table(header, lines)


TABLES = {
    "layers": ("papers/single_image/layers", layers),
    "kernels": ("papers/single_image/kernels", kernels),
    "statistic": ("papers/single_image/kernels", statistic),
    "blocks": ("papers/single_image/blocks", forms),
    "networks": ("papers/single_image/networks", forms),
}


def _gains(document: Document, accuracy: str, name: str, size: int) -> list[float]:
    """Times as fast as an algorithm of ours, on the layers with filters of a size."""
    rows = [row for row in best_rows(document) if row["class"] == accuracy and row["r"] == size]
    return [us / row["us"] for row in rows if (us := _least(document, row, name))]


def _least(document: Document, row: Row, name: str) -> float | None:
    """An algorithm's time on the layer of a row, in its faster layout."""
    its = [each for each in of_class(document, row["class"]) if each["layer"] == row["layer"]]
    return min((us for each in its if (us := each["algorithms"].get(name))), default=None)


def exact(file: File) -> str:
    """The source's statistic, over all algorithms and classes."""
    rows = [row for row in rows_in(file, "papers/single_image/kernels") if row["largest"] is not None]
    if not rows:
        return NOTHING
    most, largest = max(row["beyond"] for row in rows), max(row["largest"] for row in rows)
    kept = sum(row["beyond"] < MAX_BEYOND for row in rows)
    text = f"the largest error of an element is {largest:.1e}; in {kept} of {len(rows)} cases, each an algorithm on a "
    return (
        text + f"layer in a class, fewer than 0.1 % of the elements are beyond {BEYOND:g}, at most {most * 100:.3f} %"
    )


def pointwise(file: File) -> str:
    """1x1 layers in class `ieee` against cuBLAS: the calls, and the kernels of the product alone."""
    document = file("papers/single_image/layers") or {"rows": []}
    gains = _gains(document, "ieee", "im2col_gemm", 1)
    if not gains:
        return NOTHING
    text = f"our 1x1 layers are {span(gains)} times as fast as `im2col_gemm`, which is cuBLAS's product with bias and "
    text += "ReLU behind it"
    parts = []
    rows = [row for row in rows_in(file, "papers/single_image/kernels") if row["class"] == "ieee" and row["r"] == 1]
    for layer in dict.fromkeys(row["layer"] for row in rows):
        its = {row["algorithm"]: row["kernels"] for row in rows if row["layer"] == layer}
        both = [_product_us(its.get(name, [])) for name in ("direct_tiled", "im2col_gemm")]
        if all(both):
            parts.append(f"{' and '.join(map(common.us, both))} us on {layer.removeprefix('1x1 ')}")
    return text + (f"; `direct_tiled` and cuBLAS's product, kernels alone: {', '.join(parts)}" if parts else "")


def _product_us(kernels: list[dict[str, Any]]) -> float | None:
    """Microseconds of a product, split sums added; not of what unrolls or finishes it."""
    found = [
        kernel["us"] for kernel in kernels if not {"unroll_nchw", "finish_chunk"} & set(WORDS.findall(kernel["kernel"]))
    ]
    return sum(found) if found else None


CALLS = ("eager", "fused")  # forms that are called kernel by kernel


def modules(file: File) -> str:
    """What the forms of a module take, and what the convolution's kernels do."""
    forms = _by_network(file, "papers/single_image/blocks").values()
    graph, eager, fused = ([its[mode]["us"] for its in forms if mode in its] for mode in ("fused_graph", *CALLS))
    alone = [row["us"] for row in best_rows(file("papers/single_image/layers") or {"rows": []})]
    if not any(graph) or not alone:
        return NOTHING
    text = ""
    if len(eager) == len(fused) and all(eager) and all(fused):
        text = f"fused, three calls are one, which takes {span(map(truediv, fused, eager))} times as long; "
    text += f"in a CUDA graph a module takes {span(filter(None, graph), '.0f')} us, its convolution alone "
    return text + f"{span(alone, '.0f')} us"


def _by_network(file: File, suite: str) -> dict[tuple[str, str], dict[str, Row]]:
    """(network, class) -> mode -> row."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows_in(file, suite):
        found.setdefault((row["network"], row["class"]), {})[row["mode"]] = row
    return found


def _fastest_gains(file: File, suite: str, accuracy: str, size: str = "") -> list[float]:
    """Our fastest form over PyTorch's."""
    found = []
    for (name, its_class), its in _by_network(file, suite).items():
        us = min((row["us"] for row in its.values() if row["us"]), default=None)
        gain = speedup_of(us, next(iter(its.values()))["best_peer_us"])
        found += [gain] if gain and its_class == accuracy and name.startswith(size) else []
    return found


def graphs(file: File) -> str:
    """Modules, the fastest form over the fastest, by filter size."""
    parts = [
        f"{size} layers {span(gains)} times in `{accuracy}`"
        for size in ("3x3", "1x1")
        for accuracy in CLASSES
        if (gains := _fastest_gains(file, "papers/single_image/blocks", accuracy, size))
    ]
    return ", ".join(parts) or NOTHING


def whole(file: File) -> str:
    """Whole networks: the fastest form over the fastest, and swapped alone over PyTorch, call by call."""
    suite = "papers/single_image/networks"
    parts = []
    for accuracy in CLASSES:
        gains = _fastest_gains(file, suite, accuracy)
        eager = [
            gain
            for (_, its_class), its in _by_network(file, suite).items()
            if its_class == accuracy and "eager" in its
            if (gain := speedup_of(its["eager"]["us"], its["eager"]["peers"].get("torch_eager")))
        ]
        if gains:
            parts.append(
                f"in `{accuracy}` {span(gains)} times as fast" + (f" (swapped alone {span(eager)})" if eager else "")
            )
    peers = dict.fromkeys(name for row in rows_in(file, suite) for name in row["peers"])
    return f"{', '.join(parts)}; PyTorch's forms are {', '.join(f'`{name}`' for name in peers)}" if parts else NOTHING


def spread(file: File) -> str:
    """The same PyTorch code in two classes of FP32: how far its times are apart, on the network where that is most."""
    times: dict[str, list[float]] = {}
    for (name, accuracy), its in _by_network(file, "papers/single_image/networks").items():
        if accuracy in ("ieee", "fp32") and (us := next(iter(its.values()))["peers"].get("torch_eager")):
            times.setdefault(name, []).append(us)
    pairs = {name: its for name, its in times.items() if len(its) == 2}
    if not pairs:
        return NOTHING
    name = max(pairs, key=lambda name: max(pairs[name]) / min(pairs[name]))
    return f"{min(pairs[name]) / 1e3:.1f} and {max(pairs[name]) / 1e3:.1f} ms of {name}"


SENTENCES = {"exact": exact, "pointwise": pointwise, "modules": modules, "graphs": graphs, "whole": whole}
SENTENCES |= {"spread": spread}


def plot(document: Document, accuracy: str, path: Path) -> None:
    """Bars per layer: cuDNN's fused convolution, PyTorch's passes, and the source's gain, over ours."""
    rows = [row for row in best_rows(document) if row["class"] == accuracy]
    figure, axes = new_figure(6.5, 3.0)
    series = [
        ("cuDNN's fused convolution", common.OURS, [speedup_of(row["us"], cudnn_us(row)) for row in rows]),
        ("PyTorch's passes", common.ALSO_OURS, [speedup_of(row["us"], eager_us(row)) for row in rows]),
        ("the source over its cuDNN", common.NEUTRAL, [_source_gain(row) for row in rows]),
    ]
    for index, (label, colour, values) in enumerate(series):
        axes.bar(0, 0, color=colour, label=label)
        for place, value in enumerate(values):
            if value:
                at = place + 0.27 * (index - 1)
                axes.bar(at, value, width=0.25, color=colour)
                axes.text(at, value, f"{value:.1f}", ha="center", va="bottom", fontsize=6)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(rows)), [row["layer"].replace(" ", "\n") for row in rows])
    axes.set_ylabel("times faster than")
    axes.margins(y=0.1)
    axes.legend(frameon=False, fontsize=7)
    gains = [value for value in series[0][2] if value]
    message = f"Batch 1, class {accuracy}: {span(gains)} times as fast as cuDNN's fused convolution"
    common.title(figure, message, document)
    save_figure(figure, path)


def _source_gain(row: Row) -> float | None:
    theirs, its = SOURCE.get(row["layer"], (None, None))
    return theirs / its if theirs and its else None


def figures(document: Document, prefix: str) -> dict[str, Callable[[Path], None]]:
    """<prefix>_layers_<class>.svg."""
    drawn = dict.fromkeys(row["class"] for row in best_rows(document) if cudnn_us(row))
    return {f"{prefix}_layers_{accuracy}.svg": partial(plot, document, accuracy) for accuracy in drawn}


def said(file: File) -> str:
    """What holds of the claim: 1.2 to 2.1 times as fast as cuDNN on these layers."""
    document = file("papers/single_image/layers")
    parts = []
    for accuracy in ("ieee", "fp32"):
        rows = [row for row in best_rows(document or {"rows": []}) if row["class"] == accuracy]
        gains = [gain for row in rows if (gain := speedup_of(row["us"], cudnn_us(row)))]
        best = [gain for row in rows if (gain := ratio(row))]
        if gains:
            own = sum(row["algorithm"] != "torch" for row in rows)
            text = (
                f"class `{accuracy}`: {min(gains):.2f} to {max(gains):.2f} times as fast as cuDNN's fused convolution"
            )
            text += (
                f" ({sum(gain > 1 for gain in gains)} of {len(gains)} layers faster, {own} of them by a kernel of ours;"
            )
            parts.append(f"{text} {common.mean(best) or 0.0:.2f} times the best of all rivals in geometric mean)")
    if not parts:
        return NOTHING
    return f"The source is 1.18 to 2.09 times as fast as its cuDNN on the six layers; here {'; '.join(parts)}."
