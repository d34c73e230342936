"""Tables and plot of whole networks, for benchmarks.reports.documents."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness.results import CLASSES, Document, Row
from benchmarks.harness.runs import TF32, short_of
from benchmarks.networks.forms import MODES
from benchmarks.networks.parts import NAME as CUDNN_BEST
from benchmarks.reports import common
from fastconv.figures import new_figure, save_figure

OVERHEAD = dict.fromkeys(("vgg16", "resnet50", "yolov3"), 1.10)  # goals: a network's time over its convolutions'
OTHERS_OVERHEAD = 1.25
IN_GRAPHS = ("compile", "compile_graph", "graph", "fused_graph")
WITHOUT_GRAPHS = ("fused", "compile_default", "eager")
FULL_ROUNDS = 20  # of a time that stands in a table; of fewer is told
# Who has a run of its own, or one of `networks`: suite -> what it is called, and its forms.
RIVALS = {
    "networks_graphs": ("frozen, in a graph by hand", ("frozen_graph",)),
    "networks_autotune": ("max-autotune", ("compile_max_autotune", "frozen_max_autotune")),
    "networks_cudnn": ("best cuDNN layers", (CUDNN_BEST,)),
}
# In the order of the tables.
TITLES = {"vgg16": "VGG-16", "resnet50": "ResNet-50", "densenet121": "DenseNet-121", "densenet161": "DenseNet-161"}
TITLES |= {"yolov3": "YOLOv3", "unet": "U-Net", "rrdb": "RRDB (ESRGAN)", "sd_vae_decoder": "VAE decoder"}
TITLES |= {f"vae_decoder_{side}": f"VAE decoder, {side} x {side}" for side in (1024, 2048)}
TITLES |= {"efficientnet_b0": "EfficientNet-B0", "hrnet_w18": "HRNet-W18", "segformer_mit_b2": "SegFormer-B2"}
TITLES |= {"repvgg_a2": "RepVGG-A2", "convnext_tiny": "ConvNeXt-T", "sdxl_unet": "SDXL's UNet"}
TITLES |= {"maskrcnn_resnet50_fpn": "Mask R-CNN", "retinanet_resnet50_fpn": "RetinaNet", "yolov8n": "YOLOv8n"}
TITLES |= {"mobilenet_v3_large": "MobileNetV3-L", "resnext50_32x4d": "ResNeXt-50", "regnet_x_3_2gf": "RegNetX-3.2GF"}
TITLES |= {"inception_v3": "Inception v3", "chess_192x15": "chess, 15 blocks of 192", "sd15_unet": "SD 1.5's UNet"}


def best_peer(row: Row) -> tuple[str | None, float | None]:
    """(form, microseconds) of the fastest form of PyTorch; what nobody can run is none."""
    timed = {name: us for name, us in row["peers"].items() if us is not None and name != CUDNN_BEST}
    best = min(timed, key=lambda name: timed[name], default=None)
    return best, timed.get(best or "")


def speedup_of(us: float | None, peer_us: float | None) -> float | None:
    return peer_us / us if us and peer_us else None


def fastest(rows: Mapping[str, Row]) -> tuple[float | None, float | None]:
    """Microseconds of the fastest form of ours and of PyTorch's, of a network's rows by mode."""
    ours = min((row["us"] for row in rows.values() if row["us"]), default=None)
    return ours, min((us for row in rows.values() if (us := best_peer(row)[1])), default=None)


Key = tuple[str, str, int]  # network, class, batch


class Versus(NamedTuple):
    """Microseconds of the fastest of ours and of the fastest of some peers, of one run."""

    us: float
    peer: str
    peer_us: float

    @property
    def speedup(self) -> float:
        return self.peer_us / self.us


def against(peers: tuple[str, ...], *documents: Document | None) -> dict[Key, Versus]:
    """Ours against these peers, of the first document where any of them has a time."""
    found: dict[Key, Versus] = {}
    for document in filter(None, documents):
        for key, its in by_network(document, None).items():
            ours, _ = fastest(its)
            timed = {name: us for row in its.values() for name in peers if (us := row["peers"].get(name))}
            if ours and timed:
                best = min(timed, key=lambda name: timed[name])
                found.setdefault(key, Versus(ours, best, timed[best]))
    return found


def speedups(document: Document, autotune: Document | None = None) -> dict[Key, float | None]:
    """The fastest of ours over the fastest form of PyTorch: the least of the ratios, each of one run. autotune: the
    file of the run against max-autotune."""
    other = against(RIVALS["networks_autotune"][1], autotune)
    found: dict[Key, float | None] = {}
    for key, its in by_network(document, None).items():
        ratios = [speedup_of(*fastest(its)), other[key].speedup if key in other else None]
        found[key] = min((ratio for ratio in ratios if ratio), default=None)
    return found


def over_tf32(document: Document) -> dict[tuple[str, int], float | None]:
    """The fastest of ours in class fp32 over the fastest form of PyTorch in TF32, by network and batch: of the same run
    where that had time for it (`best_tf32_peer_us`), else of class tf32's."""
    found = by_network(document, None)
    ratios = {}
    for (network, accuracy, batch), its in found.items():
        if accuracy == "fp32":
            ready = [row for row in its.values() if not any(name.startswith(TF32) for name in short_of(row))]
            beside = [us for row in ready if (us := row.get("best_tf32_peer_us"))]
            its_tf32 = min(beside, default=None) or fastest(found.get((network, "tf32", batch), {}))[1]
            ratios[network, batch] = speedup_of(fastest(its)[0], its_tf32)
    return ratios


NOT_FINITE = " (not finite)"  # behind a ratio of times that were taken on values beyond the type's range


def is_finite(rows: Iterable[Row]) -> bool:
    """Whether what both sides computed is, where it was compared."""
    errors = (row.get(name) for row in rows for name in ("logits_error", "peer_error"))
    return all(error is None or math.isfinite(error) for error in errors)


def times(ratio: float | None, rows: Iterable[Row]) -> str:
    """A ratio of times of these rows, marked where their values were not finite."""
    return common.times(ratio) + ("" if ratio is None or is_finite(rows) else NOT_FINITE)


def best_table(document: Document) -> str:
    """A row per network: of each class milliseconds of the fastest of ours, of PyTorch's, and their ratio."""
    found, tf32 = by_network(document, None), over_tf32(document)
    classes = [name for name in CLASSES if any(accuracy == name for _, accuracy, _ in found)]
    lines = []
    for network, batch in dict.fromkeys((network, batch) for network, _, batch in found):
        cells = []
        for name in classes:
            its = found.get((network, name, batch), {})
            ours, theirs = fastest(its)
            ratio = speedup_of(ours, theirs)
            cells.append(f"{common.ms(ours)}, {common.ms(theirs)}, {times(ratio, its.values())}" if ratio else "-")
        image = next((row["image"] for row in document["rows"] if _is_of(row, network, batch) and "image" in row), None)
        title = TITLES.get(network, network) + (f", {image} x {image}" if image else "")
        lines.append([title, str(batch), *cells, common.times(tf32.get((network, batch)))])
    header = ["network", "batch", *(f"`{name}`" for name in classes), "`fp32` over TF32"]
    return "\n\n".join([common.markdown_table(header, lines), *common.other_commits(document, document["rows"])])


def table(document: Document, accuracy: str) -> str:
    """Whole networks, a row per mode of ours: time, the fastest form of PyTorch, how far both are from float64."""
    rows = [row for row in document["rows"] if row["class"] == accuracy]
    header = ["network", "batch", "mode", "swapped", "ours ran", "ours ms", "best PyTorch ms", "its form", "speedup"]
    header += ["logits error", "PyTorch's", "top-1 agreement", "PyTorch's", "MiB", "PyTorch's", "its form"]
    lines = []
    for row in rows:
        best, best_us = best_peer(row)
        ran = f"{row['ours']} of {row['total']}" if "ours" in row else "-"
        line = [row["network"], str(row["batch"]), row["mode"], f"{row['swapped']} of {row['total']}", ran]
        line += [
            common.ms(row["us"]),
            common.ms(best_us),
            f"`{best}`" if best else "-",
            times(speedup_of(row["us"], best_us), [row]),
        ]
        line += [common.scientific(row["logits_error"]), common.scientific(row.get("peer_error"))]
        line += [_percent(row["top1_agreement"]), _percent(row.get("peer_top1_agreement"))]
        line += [common.mib(row.get(name)) for name in ("peak_bytes", "peer_peak_bytes")]
        lines.append([*line, f"`{form}`" if (form := row.get("peer_peak_form")) else "-"])
    below = [*few_rounds(rows), *common.other_commits(document, rows)]
    return "\n\n".join([common.markdown_table(header, lines), *below])


def overhead_table(document: Document) -> str:
    """A row per network and batch, by class: the fastest of ours in a graph over the kernels of its convolutions, as
    the same network in the same layout has them, launched kernel by kernel; in bold above the goal."""
    found = by_network(document, None)
    classes = [name for name in CLASSES if any(accuracy == name for _, accuracy, _ in found)]
    lines = []
    for network, batch in dict.fromkeys((network, batch) for network, _, batch in found):
        goal = OVERHEAD.get(network, OTHERS_OVERHEAD)
        cells = [_overhead(found.get((network, name, batch), {}), goal) for name in classes]
        lines.append([TITLES.get(network, network), str(batch), f"{goal:.2f}", *cells])
    drawn = common.markdown_table(["network", "batch", "goal", *(f"`{name}`" for name in classes)], lines)
    return "\n\n".join([drawn, *common.other_commits(document, document["rows"])])


def _overhead(its: Mapping[str, Row], goal: float) -> str:
    whole, kernels = in_graph(its), convolutions_us(its)
    if kernels is None or whole is None:
        return "-"
    text = f"{whole['us'] / kernels:.2f}" if is_finite(its.values()) else NOT_FINITE.strip(" ()")
    return f"**{text}**" if is_finite(its.values()) and whole["us"] > goal * kernels else text


def in_graph(its: Mapping[str, Row]) -> Row | None:
    """The row of the fastest of ours in a graph."""
    known = (row for mode, row in its.items() if mode in IN_GRAPHS and row["us"])
    return min(known, key=lambda row: row["us"], default=None)


def convolutions_us(its: Mapping[str, Row]) -> float | None:
    """Microseconds of the kernels of a network's convolutions, launched kernel by kernel: of the fused one, else of the
    compiled, else of the swapped one. In the layout of the fastest in a graph, as other kernels run in the other; None
    where that was not profiled (of older rows is what was the faster with the host's launches)."""
    first = next((row for mode in WITHOUT_GRAPHS if (row := its.get(mode)) and row.get("layers_us")), None)
    whole = in_graph(its)
    if first is None or whole is None:
        return None
    return (first.get("layers_us_of") or {first.get("layout"): first["layers_us"]}).get(whole.get("layout"))


def _is_of(row: Row, network: str, batch: int) -> bool:
    return (row["network"], row["batch"]) == (network, batch)


def few_rounds(rows: Sequence[Row]) -> list[str]:
    """A sentence where times of ours are of fewer rounds than others."""
    few = [row for row in rows if row.get("rounds") and row["rounds"] < FULL_ROUNDS]
    names = [f"{row['network']}, `{row['class']}`, {row['mode']} ({row['rounds']})" for row in few]
    return [f"Of fewer than {FULL_ROUNDS} rounds, ours: {'; '.join(names)}."] if names else []


def by_network(document: Document, accuracy: str | None) -> dict[Key, dict[str, Row]]:
    """Of every network -> mode -> row. In the order of TITLES: that of the rows is of who was measured first."""
    found: dict[Key, dict[str, Row]] = {}
    order = {name: place for place, name in enumerate(TITLES)}
    rows = sorted(document["rows"], key=lambda row: order.get(row["network"], len(order)))
    for cls in CLASSES if accuracy is None else [accuracy]:
        for row in rows:
            if row["class"] == cls:
                found.setdefault((row["network"], cls, row["batch"]), {})[row["mode"]] = row
    return found


def energy_table(document: Document) -> str:
    """A row per network and class: energy of an image, the fastest mode of ours against the fastest form of PyTorch;
    millijoules of the whole board and watts. "" if none was measured."""
    lines = []
    for (name, cls, batch), modes in by_network(document, None).items():
        known = {mode: row for mode, row in modes.items() if "energy" in row and "peer_energy" in row}
        if not known:
            continue
        mode = min(known, key=lambda mode: known[mode]["us"])
        row = known[mode]
        ours, peer = row["energy"], row["peer_energy"]
        line = [TITLES.get(name, name), str(batch), f"`{cls}`", mode, f"{ours['image_j'] * 1e3:.1f}"]
        line += [f"{ours['watts']:.0f}", f"`{row['best_peer']}`", f"{peer['image_j'] * 1e3:.1f}"]
        lines.append([*line, f"{peer['watts']:.0f}", common.times(peer["image_j"] / ours["image_j"])])
    header = ["network", "batch", "class", "ours", "mJ per image", "W", "PyTorch", "mJ per image", "W", "less by"]
    return common.markdown_table(header, lines) if lines else ""


def summary(document: Document, accuracy: str | None = None, runs: Mapping[str, Document] | None = None) -> str:
    """A row per network (and class, without `accuracy`): the floor of its convolutions, PyTorch eager and its fastest
    form, ours in its modes, and the fastest of ours against the latter and against each of RIVALS that has a time.

    runs: the files of these, from which their times and ratios are then."""
    known = [mode for mode in MODES if any(row["mode"] == mode for row in document["rows"])]
    keys = by_network(document, accuracy).keys()
    timed = {title: against(forms, (runs or {}).get(suite), document) for suite, (title, forms) in RIVALS.items()}
    timed = {title: found for title, found in timed.items() if keys & found.keys()}
    titles, rivals = list(timed), list(timed.values())
    header = ["network", "batch", *([] if accuracy else ["class"]), "convolutions' floor ms", "PyTorch eager ms"]
    header += ["PyTorch at its best ms", "its form", *(f"{title} ms" for title in titles)]
    header += [*(f"ours, {mode}" for mode in known), "speedup", *(f"over {title}" for title in titles)]
    lines: list[list[str]] = []
    rows: list[Row] = []
    for key, its in by_network(document, accuracy).items():
        name, cls, batch = key
        rows += its.values()
        best, best_us = min(map(best_peer, its.values()), key=lambda pair: pair[1] or float("inf"))
        first = next(iter(its.values()))
        ours, _ = fastest(its)
        of_rivals = [found.get(key) for found in rivals]
        line = [name, str(batch), *([] if accuracy else [f"`{cls}`"]), common.ms(first.get("floor_us"))]
        line += [common.ms(first["peers"].get("torch_eager")), common.ms(best_us), f"`{best}`" if best else "-"]
        line += (common.ms(v and v.peer_us) for v in of_rivals)
        line += [common.ms(its[mode]["us"]) if mode in its else "-" for mode in known]
        lines.append(
            [*line, times(speedup_of(ours, best_us), its.values()), *(common.times(v and v.speedup) for v in of_rivals)]
        )
    below = [*few_rounds(rows), *common.other_commits(document, rows)]
    return "\n\n".join([common.markdown_table(header, lines), *below])


def rivals_table(runs: Mapping[str, Document]) -> str:
    """A row per network, class and rival of RIVALS, ours and it of one run; below, why one has no time, and who has
    none at all."""
    lines: list[list[str]] = []
    reasons: dict[str, None] = {}
    for suite, (title, forms) in RIVALS.items():
        for (name, cls, batch), its in against(forms, runs.get(suite)).items():
            line = [title, TITLES.get(name, name), str(batch), f"`{cls}`", common.ms(its.us), common.ms(its.peer_us)]
            lines.append([*line, f"`{its.peer}`", common.times(its.speedup)])
        for (name, cls, _), rows in (by_network(runs[suite], None) if suite in runs else {}).items():
            failures = next(iter(rows.values())).get("failures", {}).items()
            reasons |= {f"- {name}, `{cls}`, `{form}`: {why}": None for form, why in failures if form.startswith(forms)}
    header = ["rival", "network", "batch", "class", "ours ms", "its ms", "its form", "speedup"]
    missing = [title for suite, (title, _) in RIVALS.items() if suite not in runs]
    below = ["\n".join(reasons)] if reasons else []
    below += [f"Not measured: {', '.join(missing)}."] if missing else []
    return "\n\n".join([common.markdown_table(header, lines), *below])


def peers_table(document: Document, accuracy: str) -> str:
    """Milliseconds of every form of PyTorch, the fastest in bold; below, why one has no time."""
    found = by_network(document, accuracy)
    first = {key: next(iter(its.values())) for key, its in found.items()}
    names = list(dict.fromkeys(name for row in first.values() for name in row["peers"]))
    lines, reasons = [], []
    for (network, _, batch), row in first.items():
        best, _ = best_peer(row)
        cells = [common.ms(row["peers"].get(name)) for name in names]
        cells = [f"**{cell}**" if name == best else cell for name, cell in zip(names, cells, strict=True)]
        lines.append([network, str(batch), *cells])
        for name, why in row.get("failures", {}).items():
            if not name.startswith(("fastconv_", "groups ")):
                reasons.append(f"- {network}, `{name}`: {why}")
    drawn = common.markdown_table(["network", "batch", *(f"`{name}`" for name in names)], lines)
    below = ["\n".join(reasons)] if reasons else []
    return "\n\n".join([drawn, *below, *common.other_commits(document, list(first.values()))])


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def figures(document: Document, prefix: str) -> dict[str, Callable[[Path], None]]:
    """One for each class that the file holds: <prefix>_<class>.svg."""
    return {
        f"{prefix}_{accuracy}.svg": partial(plot, document, accuracy)
        for accuracy in sorted({row["class"] for row in document["rows"]})
    }


def plot(document: Document, accuracy: str, path: Path) -> None:
    """A group of bars per network: PyTorch's fastest form over each mode of ours."""
    names: list[str] = []
    values: list[float] = []
    best = []
    for (network, _, batch), its in by_network(document, accuracy).items():
        _, peer_us = fastest(its)
        found = {mode: value for mode, row in its.items() if (value := speedup_of(row["us"], peer_us))}
        names += [f"{TITLES.get(network, network)}, batch {batch}: {mode.replace('_', ', ')}" for mode in found]
        values += found.values()
        best += [max(found.values())] if found else []
    figure, axes = new_figure(7.0, 0.8 + 0.2 * len(names))
    axes.barh(names, values, color=[common.win_or_loss(value) for value in values], height=0.7)
    for index, value in enumerate(values):
        axes.text(value, index, f" {value:.2f}", va="center", fontsize=7)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel("times faster than the fastest form of PyTorch")
    span = f"{min(best):.2f} to {max(best):.2f}" if best else "no"
    common.title(figure, f"Class {accuracy}: {span} times PyTorch at its best", document)
    axes.tick_params(axis="y", labelsize=7)
    axes.margins(x=0.1, y=0.02)
    save_figure(figure, path)
