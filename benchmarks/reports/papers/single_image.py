"""Single-image ResNet: six layers, what is launched for them, how exact it is; blocks and networks by form."""

from __future__ import annotations

from benchmarks.harness.results import CLASSES, Document, Row
from benchmarks.layers.suite import ratio
from benchmarks.networks.forms import MODES
from benchmarks.papers.single_image import BEYOND, SOURCE
from benchmarks.peers import REFUSED
from benchmarks.reports import common
from benchmarks.reports.networks import speedup_of
from benchmarks.reports.papers.shared import NOTHING, File, classes_of, of_class

NAME = "single_image"
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
        line += [common.times(theirs / its if theirs and its else None), common.us(row["us"]), f"`{row['algorithm']}`"]
        line += [row["layout"].upper(), common.us(cudnn_us(row)), common.times(speedup_of(row["us"], cudnn_us(row)))]
        line += [common.us(eager_us(row)), common.times(speedup_of(row["us"], eager_us(row)))]
        line += [common.scientific(row["error"])]
        line += [common.mib(row.get(f"{name}_bytes"), 2) for name in ("workspace", "packed")]
        lines.append([*line, common.us(row.get("us_with_packing"))])
    return common.markdown_table(header, lines)


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
                name = kernel["kernel"].partition("(")[0].removeprefix("void ").replace("|", "\\|")
                line = [row["layer"], f"`{accuracy}`", f"`{row['algorithm']}`", f"`{name[:60]}`", str(kernel["blocks"])]
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
    "layers": ("paper_single_image", layers),
    "kernels": ("paper_single_image_kernels", kernels),
    "statistic": ("paper_single_image_kernels", statistic),
    "blocks": ("paper_single_image_blocks", forms),
    "networks": ("paper_single_image_networks", forms),
}


def said(file: File) -> str:
    """What holds of the claim: 1.2 to 2.1 times as fast as cuDNN on these layers."""
    document = file("paper_single_image")
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
