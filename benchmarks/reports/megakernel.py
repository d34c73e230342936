"""Tables and plots of the suite `megakernel`, for benchmarks.reports.documents: the paper's figures with our data.

Regions: <gpu>/megakernel/layers, .../mapping, .../rivals and .../tasks, each with figures and tables of all classes
that the file holds; .../<one of them>/<class>, a table alone; .../missing; and, from the suite `soak_megakernel`,
<gpu>/soak_megakernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.harness.results import CLASSES, Document, Row
from benchmarks.reports import common
from benchmarks.studies.megakernel import BATCHES, DISTANCES, MIN_CHANNELS, NAME, RIVAL, SERIES, STAGED
from fastconv import trace
from fastconv.figures import new_figure, save_figure
from fastconv.models.layers import LAYERS

SWEPT = {"d_ig": "D_IG", "d_go": "D_GO", "m": "M"}
AXES = {
    "d_ig": "D_IG: tasks from an input task\nto the product that needs it",
    "d_go": "D_GO: tasks from a product\nto its output task",
    "m": "M: products that share a block of filters",
}


def rows_of(document: Document, part: str, accuracy: str | None = None) -> list[Row]:
    """The rows of a part that hold a time."""
    rows = [row for row in document["rows"] if row["part"] == part and row["us"] is not None]
    return [row for row in rows if accuracy is None or row["class"] == accuracy]


def over_series(row: Row) -> float | None:
    """Times faster than the same tasks kind by kind, a launch each: the same code, and the same type of M."""
    return _over(row, SERIES)


def over_staged(row: Row) -> float | None:
    """Times faster than `winograd_f4`, whose products are other kernels, and whose M is float32 in every class."""
    return _over(row, STAGED)


def _over(row: Row, name: str) -> float | None:
    return _times(row, row["algorithms"].get(name))


def _fastest(row: Row, prefix: str) -> tuple[str, float | None]:
    """The fastest of the rivals whose names begin so, and its microseconds; "" and None if none was timed."""
    times = {name: us for name, us in row["peers"].items() if us and name.startswith(prefix)}
    name = min(times, key=lambda name: times[name], default="")
    return name, times.get(name)


def over_cudnn(row: Row) -> float | None:
    """Times faster than the faster layout of cuDNN's non-fused Winograd."""
    return _times(row, _fastest(row, RIVAL)[1])


def over_best(row: Row) -> float | None:
    """Times faster than the fastest rival of all, cuDNN's and PyTorch's."""
    return _times(row, row["best_peer_us"])


def over_torch(row: Row) -> float | None:
    """Times faster than the faster layout of PyTorch's convolution, by its search."""
    return _times(row, _fastest(row, "torch_")[1])


def _times(row: Row, us: float | None) -> float | None:
    return us / row["us"] if us and row["us"] else None


def layer_table(document: Document, accuracy: str) -> str:
    """A row per layer: megakernel, its tasks in series, winograd_f4, cuDNN's non-fused Winograd, the best peer, ratios,
    error; and where the file has them its time with packing, its bytes, PyTorch's fastest and what `auto` takes."""
    header = ["layer", "C->K @HxW", "megakernel us", "its series us", "over its series", "`winograd_f4` us"]
    header += ["over `winograd_f4`", "cuDNN non-fused us", "over cuDNN", "best peer us"]
    header += ["over the best peer", "error", "error / cuDNN's", "floor us"]
    rows = rows_of(document, "layers", accuracy)
    more = any(row.get("auto") for row in rows)
    header += ["with packing us", "workspace, packed MiB", "PyTorch us", "over PyTorch", "`auto` us"] if more else []
    lines = [_layer_line(row, document) + (_more(row) if more else []) for row in rows]
    ratios = (over_series, over_staged, over_cudnn, over_best, over_torch)
    means = [common.times(common.mean(ratio(row) for row in rows)) for ratio in ratios]
    last = [
        "geometric mean",
        f"{len(rows)} layers",
        "",
        "",
        means[0],
        "",
        means[1],
        "",
        means[2],
        "",
        means[3],
        *[""] * 3,
    ]
    return common.markdown_table(header, [*lines, last + (["", "", "", means[4], ""] if more else [])])


def _layer_line(row: Row, document: Document) -> list[str]:
    rival, rival_us = _fastest(row, RIVAL)
    rival_error = row.get("peer_errors", {}).get(rival) or row["peer_error"]
    line = [row["layer"], f"{row['c']}->{row['k']} @{row['h']}x{row['w']}", common.us(row["us"])]
    line += [common.us(row["algorithms"].get(SERIES)), common.times(over_series(row))]
    line += [common.us(row["algorithms"].get(STAGED)), common.times(over_staged(row))]
    best = f"{common.us(row['best_peer_us'])} `{row['best_peer']}`" if row["best_peer"] else "-"
    line += [common.us(rival_us), common.times(over_cudnn(row)), best, common.times(over_best(row))]
    line += [common.scientific(row["error"])]
    line += ["-" if not rival_error or not rival_us else f"{row['error'] / rival_error:.2f}"]
    return [*line, common.us(common.floor_of(row, document))]


def _more(row: Row) -> list[str]:
    choice = row.get("auto")
    line = [common.us(row.get("us_with_packing"))]
    line += [", ".join(common.mib(row.get(f"{name}_bytes"), 1) for name in ("workspace", "packed"))]
    line += [common.us(_fastest(row, "torch_")[1]), common.times(over_torch(row))]
    return [*line, f"{common.us(row['algorithms'].get(choice))} `{choice}`" if choice else "-"]


def missing(document: Document) -> str:
    """What was measured of the layer set, and what the suite was asked for and did not measure, and why not."""
    found: dict[tuple[str, ...], list[str]] = {}
    for text in document.get("missing") or []:
        part, where, reason = text.split(": ", 2)
        layer, _, rest = where.partition(", ")
        found.setdefault((part, rest, reason), []).append(layer)
    lines = [f"- Missing: {part}, {rest}: {', '.join(layers)}: {why}." for (part, rest, why), layers in found.items()]
    layers = {accuracy: len(rows_of(document, "layers", accuracy)) for accuracy in CLASSES}
    counts = ", ".join(f"{count} of {len(LAYERS)} in `{accuracy}`" for accuracy, count in layers.items() if count)
    said = f"Measured: {counts or 'no layer'}; by default those with C and K of at least {MIN_CHANNELS}."
    if without := [f"`{accuracy}`" for accuracy, count in layers.items() if not count]:
        said += f" Not measured: class {', '.join(without)}."
    return "\n".join([said, *([""] if lines else []), *lines])


def _swept(document: Document, accuracy: str, name: str) -> dict[str, list[Row]]:
    """layer -> the rows in which one parameter of the map changes, in its order."""
    found: dict[str, list[Row]] = {}
    for row in rows_of(document, "mapping", accuracy):
        if row["variant"].startswith(f"{name}="):
            found.setdefault(row["layer"], []).append(row)
    return {layer: sorted(rows, key=lambda row: row[name]) for layer, rows in found.items()}


def mapping_table(document: Document, accuracy: str) -> str:
    """Microseconds for each value of D_IG, D_GO and M, the others as planned; what is planned is marked."""
    planned = {row["layer"]: row for row in rows_of(document, "mapping", accuracy) if row["variant"] == "planned"}
    tables = []
    for name, title in SWEPT.items():
        values = BATCHES if name == "m" else DISTANCES
        header = ["layer", *(f"{title} = {value}" for value in values), "as planned"]
        lines = []
        for layer, rows in _swept(document, accuracy, name).items():
            times = {int(row["variant"].partition("=")[2]): row["us"] for row in rows}
            least = min(times.values())
            cells = [f"**{common.us(us)}**" if us == least else common.us(us) for us in map(times.get, values)]
            its = planned.get(layer)
            lines.append([layer, *cells, "-" if its is None else f"{common.us(its['us'])} ({its[name]})"])
        tables.append(common.markdown_table(header, lines))
    return "\n\n".join(tables)


def _rivals(row: Row) -> list[tuple[str, float]]:
    """(name, microseconds) of everything that was timed on a layer, the fastest first."""
    timed = {**row["peers"], **row["algorithms"]}
    return sorted(((name, us) for name, us in timed.items() if us is not None), key=lambda item: item[1])


def rivals_table(document: Document, accuracy: str) -> str:
    """Every algorithm on one layer, the fastest first, and how many times longer it takes than the megakernel."""
    lines = []
    for row in rows_of(document, "rivals", accuracy):
        ours = row["algorithms"].get(NAME)
        for name, us in _rivals(row):
            lines.append([f"`{name}`", common.us(us), "-" if not ours else f"{us / ours:.2f}x"])
    return common.markdown_table(["algorithm", "us", "times the megakernel's"], lines)


def tasks_table(document: Document, accuracy: str) -> str:
    """What the records of two launches say: how busy the workers are, how long they wait, what overlaps."""
    header = ["layer", "order", "us", "busy", "waiting", "products busy", "products waiting", "transforms busy"]
    header += ["transforms waiting", "transforms beside products"]
    rows = rows_of(document, "distribution", accuracy)
    kinds = [kind for kind in trace.KINDS if any(kind in row["task_us"] for row in rows)]
    header += [f"{kind} task us" for kind in kinds]
    lines = []
    for row in rows:
        sources = (row, row.get("products"), row.get("transforms"))  # the pools: where a block has two workers
        shares = ["-" if its is None else f"{its[what]:.0%}" for its in sources for what in ("busy", "waiting")]
        lines.append([row["layer"], row["variant"], common.us(row["us"]), *shares, f"{row['overlap']:.0%}"])
        lines[-1] += [common.us(row["task_us"].get(kind)) for kind in kinds]
    return common.markdown_table(header, lines)


def soak_line(document: Document) -> str:
    """One line: how many launches, how many differ."""
    rows = document["rows"]
    parts = []
    for accuracy in CLASSES:
        own = [row for row in rows if row["class"] == accuracy]
        if own:
            launches, differ = (sum(row[name] for row in own) for name in ("launches", "mismatches"))
            seconds, worst = sum(row["seconds"] for row in own), max(row["error"] for row in own)
            parts.append(
                f"`{accuracy}`: {launches:,} launches of {len(own)} layers in {seconds:.0f} s, {differ} differ "
                f"(largest error of a layer {worst:.1e})"
            )
    return ". ".join([*parts, *(f"Missing: {text}" for text in document.get("missing") or [])]) + "."


# Section -> its part of the suite, its table, its figures.
SECTIONS: dict[str, tuple[str, Callable[[Document, str], str], tuple[str, ...]]] = {
    "layers": ("layers", layer_table, ("layers",)),
    "mapping": ("mapping", mapping_table, ("distances", "m")),
    "rivals": ("rivals", rivals_table, ("rivals",)),
    "tasks": ("distribution", tasks_table, ("tasks",)),
}


def region(rest: Sequence[str], gpu: str, document: Document) -> str | None:
    """The Markdown of a region, for a document in docs/; None for a name that is not this suite's."""
    match rest:
        case ["missing"]:
            return missing(document)
        case [name] if name in SECTIONS:
            classes = [accuracy for accuracy in CLASSES if rows_of(document, SECTIONS[name][0], accuracy)]
            return "\n\n".join(_section(name, accuracy, gpu, document) for accuracy in classes)
        case [name, accuracy] if name in SECTIONS and accuracy in CLASSES:
            return SECTIONS[name][1](document, accuracy)
    return None


def _section(name: str, accuracy: str, gpu: str, document: Document) -> str:
    """The figures and the table of one class."""
    _, table, drawn = SECTIONS[name]
    images = [f"![{each}, class {accuracy}](figures/{gpu}_megakernel_{each}_{accuracy}.svg)" for each in drawn]
    return "\n\n".join([f"Class `{accuracy}`:", *images, table(document, accuracy)])


# ---- Plots

RATIOS = (
    ("its tasks in series", over_series, common.OURS),
    ("winograd_f4", over_staged, common.ALSO_OURS),
    ("cuDNN's non-fused Winograd", over_cudnn, common.NEUTRAL),
)


def plot_layers(document: Document, accuracy: str, path: Path) -> None:
    """Bars per layer: times faster than its own tasks in series, than winograd_f4, than cuDNN's non-fused Winograd."""
    rows = rows_of(document, "layers", accuracy)
    figure, axes = new_figure(9.0, 3.2)
    for index, (label, ratio, colour) in enumerate(RATIOS):
        pairs = [(place + 0.29 * (index - 1), value) for place, row in enumerate(rows) if (value := ratio(row))]
        if not pairs:
            continue
        axes.bar(*zip(*pairs, strict=True), color=colour, width=0.27, label=label)
        for at, value in pairs:
            axes.text(at, value, f" {value:.2f}", ha="center", va="bottom", fontsize=5, rotation=90)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(rows)), [row["layer"] for row in rows], rotation=60)
    axes.set_ylabel("times faster than")
    axes.margins(x=0.01, y=0.15)
    axes.legend(frameon=False, fontsize=7, ncols=3, loc="upper left")
    said = [f"{value:.2f} over {label}" for label, ratio, _ in RATIOS if (value := common.mean(map(ratio, rows)))]
    message = f"Megakernel, class {accuracy}, batch {rows[0]['n']}, times as fast: {', '.join(said)}"
    common.title(figure, message, document)
    save_figure(figure, path)


def plot_channels(document: Document, path: Path) -> None:
    """Speedup against C + K: over its own tasks in series, winograd_f4 and cuDNN; a mark per class."""
    present = [name for name in CLASSES if rows_of(document, "layers", name)]
    shown = [item for item in RATIOS if any(item[1](row) for row in rows_of(document, "layers"))]
    figure, first = new_figure(2.0 + 3.0 * len(shown), 3.2)
    first.remove()
    panels = figure.subplots(1, len(shown), squeeze=False)[0]
    for axes, (label, ratio, _) in zip(panels, shown, strict=True):
        for index, accuracy in enumerate(present):
            pairs = [(row["c"] + row["k"], ratio(row)) for row in rows_of(document, "layers", accuracy)]
            channels, values = [at for at, value in pairs if value], [value for _, value in pairs if value]
            its = accuracy if axes is panels[0] else None
            axes.scatter(channels, values, s=22, marker="s^ovD"[index], label=its, color=f"C{index}", alpha=0.85)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("C + K")
        axes.set_ylabel("times faster than\n" + label)
        axes.spines[["top", "right"]].set_visible(False)
    label, ratio, _ = shown[0]
    means = [common.mean(map(ratio, rows_of(document, "layers", name))) for name in present]
    said = ", ".join(f"{name} {value:.2f}" for name, value in zip(present, means, strict=True) if value)
    common.title(figure, f"Over {label}: {said} in geometric mean", document, 10)
    figure.legend(loc="outside right center", frameon=False, fontsize=8)
    save_figure(figure, path)


def plot_mapping(document: Document, accuracy: str, names: Sequence[str], path: Path) -> None:
    """Time over winograd_f4's against parameters of the map, a panel each, a line per layer; planned values ringed."""
    planned = {row["layer"]: row for row in rows_of(document, "mapping", accuracy) if row["variant"] == "planned"}
    figure, first = new_figure(3.0 + 2.6 * len(names), 3.2)
    first.remove()
    panels = figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
    for axes, name in zip(panels, names, strict=True):
        for index, (layer, rows) in enumerate(_swept(document, accuracy, name).items()):
            rows = [row for row in rows if row["algorithms"].get(STAGED)]
            values = [int(row["variant"].partition("=")[2]) for row in rows]
            times = [row["us"] / row["algorithms"][STAGED] for row in rows]
            label = f"{layer}, {rows[0]['c']} channels" if axes is panels[0] and rows else None
            axes.plot(values, times, marker="o", markersize=3, label=label, color=f"C{index}")
            its = planned.get(layer)
            if its and its["algorithms"].get(STAGED):
                ratio = its["us"] / its["algorithms"][STAGED]
                axes.scatter(its[name], ratio, s=60, facecolors="none", edgecolors=f"C{index}")
        axes.axhline(1.0, color="black", linewidth=0.8)
        if name == "m":
            axes.set_xscale("log", base=2)
        else:
            axes.set_xscale("symlog", base=2, linthresh=16)
            axes.set_xlim(-4, 1.2 * axes.get_xlim()[1])  # room for the last ring
        axes.set_xlabel(AXES[name])
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].plot([], [], "o", markersize=8, markerfacecolor="none", color="black", label="planned")
    panels[0].set_ylabel("time / that of winograd_f4")
    figure.legend(loc="outside right center", frameon=False, fontsize=7)
    common.title(figure, _mapping_message(document, accuracy, names), document)
    save_figure(figure, path)


def _mapping_message(document: Document, accuracy: str, names: Sequence[str]) -> str:
    """How far the planned map is from the best one, over the layers."""
    planned = {row["layer"]: row["us"] for row in rows_of(document, "mapping", accuracy) if row["variant"] == "planned"}
    least = {
        layer: min(row["us"] for name in names for row in _swept(document, accuracy, name).get(layer, []))
        for layer in _swept(document, accuracy, names[0])
    }
    losses = [planned[layer] / us - 1 for layer, us in least.items() if layer in planned]
    what = " and ".join(SWEPT[name] for name in names)
    far = f": as planned at most {max(*losses, 0.0):.0%} above the best" if losses else ""
    return f"Class {accuracy}, {what}{far}"


def plot_rivals(document: Document, accuracy: str, path: Path) -> None:
    """Every algorithm on one layer, the fastest above."""
    (row,) = rows_of(document, "rivals", accuracy)
    pairs = _rivals(row)
    colours = {name: common.ALSO_OURS for name in row["algorithms"]} | {NAME: common.OURS}
    figure, axes = new_figure(7.0, 0.6 + 0.2 * len(pairs))
    bars = [colours.get(name, common.NEUTRAL) for name, _ in pairs]
    axes.barh([name for name, _ in pairs], [us for _, us in pairs], color=bars, height=0.7)
    for index, (_, us) in enumerate(pairs):
        axes.text(us, index, f" {common.us(us)}", va="center", fontsize=7)
    axes.set_xscale("log")
    axes.invert_yaxis()
    axes.set_xlabel("microseconds")
    order = [name for name, _ in pairs]
    message = f"Class {accuracy}, {row['layer']}, batch {row['n']}: the megakernel is number {order.index(NAME) + 1}"
    common.title(figure, f"{message} of {len(order)}", document, 10)
    axes.margins(x=0.1, y=0.02)
    save_figure(figure, path)


def plot_tasks(document: Document, accuracy: str, path: Path) -> None:
    """How many tasks of each kind run at a time: kind by kind, and as mapped, a layer's two on one scale."""
    panels = []
    rows = rows_of(document, "distribution", accuracy)
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    for row in sorted(rows, key=lambda row: (layers.index(row["layer"]), row["variant"] == "mapped")):
        name = {"mapped": "task map", "series": "kinds in series"}[row["variant"]]
        counts = np.array([row["running"][kind] for kind in trace.KINDS])
        title = f"{row['layer']}, {accuracy}, {name}: {row['us']:.0f} us, workers busy {row['busy']:.0%}"
        panels.append(trace.Panel(title, row["clock"], np.array(row["times_us"]), counts, row["layer"]))
    figure = trace.draw(panels)
    times = {(row["layer"], row["variant"]): row["us"] for row in rows}
    both = [layer for layer in layers if {(layer, "series"), (layer, "mapped")} <= times.keys()]
    gains = ", ".join(f"{times[layer, 'series'] / times[layer, 'mapped']:.2f} on {layer}" for layer in both)
    message = f"Tasks over time, class {accuracy}"
    message += f": the task map is as many times as fast as kinds in series: {gains}" if both else ""
    common.title(figure, message, document)
    save_figure(figure, path)


def figures(document: Document, prefix: str) -> dict[str, Callable[[Path], None]]:
    """What the file allows: <prefix>_<figure>_<class>.svg and <prefix>_channels.svg."""
    found: dict[str, Callable[[Path], None]] = {}
    for accuracy in CLASSES:
        if rows_of(document, "layers", accuracy):
            found[f"{prefix}_layers_{accuracy}.svg"] = partial(plot_layers, document, accuracy)
        if rows_of(document, "mapping", accuracy):
            found[f"{prefix}_distances_{accuracy}.svg"] = partial(plot_mapping, document, accuracy, ("d_ig", "d_go"))
            found[f"{prefix}_m_{accuracy}.svg"] = partial(plot_mapping, document, accuracy, ("m",))
        if rows_of(document, "rivals", accuracy):
            found[f"{prefix}_rivals_{accuracy}.svg"] = partial(plot_rivals, document, accuracy)
        if rows_of(document, "distribution", accuracy):
            found[f"{prefix}_tasks_{accuracy}.svg"] = partial(plot_tasks, document, accuracy)
    if rows_of(document, "layers"):
        found[f"{prefix}_channels.svg"] = partial(plot_channels, document)
    return found
