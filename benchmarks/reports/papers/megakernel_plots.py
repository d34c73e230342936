"""Figures of the megakernel's page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.harness.results import CLASSES, Document, Row
from benchmarks.papers import megakernel_model as model
from benchmarks.peers import REFUSED
from benchmarks.reports import common
from benchmarks.reports import megakernel as study
from benchmarks.reports.papers.shared import of_class, title
from fastconv.figures import new_figure, save_figure

BATCH = 64
AXES = {
    "d_ig": "D_IG: tasks from an input task\nto the product that needs it",
    "d_go": "D_GO: tasks from a product\nto its output task",
    "m": "M: products that share a block of filters",
}
OURS = "ours: "


def of_batch(document: Document, n: int) -> Document:
    return {**document, "rows": [row for row in document["rows"] if row["n"] == n]}


def tiles_of(row: Row) -> int:
    """Of the whole batch; padding 1: P = H, Q = W."""
    tiles: int = row["n"] * -(-row["h"] // model.TILE) * -(-row["w"] // model.TILE)
    return tiles


def contenders(document: Document, accuracy: str) -> list[tuple[str, float, float | None]]:
    """Of the 2_x layer: name, microseconds and error, the fastest first; ours in its faster layout."""
    found: dict[str, tuple[float, float | None]] = {}
    for row in of_class(document, accuracy):
        refused = {name for name, note in row["notes"].items() if note.startswith((REFUSED, "no rival of class"))}
        for name, us in row["algorithms"].items():
            if us and us < found.get(f"{OURS}`{name}`", (us + 1, None))[0]:
                found[f"{OURS}`{name}`"] = us, row["errors"].get(name, {}).get("l2")
        for name, us in row["peers"].items():
            if us and name not in refused:
                found[f"`{name}`"] = us, row["peer_errors"].get(name)
    return sorted(((name, *its) for name, its in found.items()), key=lambda item: item[1])


def plot_layers(document: Document, accuracy: str, path: Path) -> None:
    """Bars per layer: times faster than its own tasks in series, than winograd_f4, than cuDNN's non-fused Winograd."""
    rows = study.rows_of(document, "layers", accuracy)
    figure, axes = new_figure(9.0, 3.2)
    for index, (label, ratio, colour) in enumerate(study.RATIOS):
        axes.bar(0, 0, color=colour, label=label)
        for place, row in enumerate(rows):
            if value := ratio(row):
                at = place + 0.29 * (index - 1)
                axes.bar(at, value, color=colour, width=0.27)
                axes.text(at, value, f" {value:.2f}", ha="center", va="bottom", fontsize=5, rotation=90)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(rows)), [row["layer"] for row in rows], rotation=60)
    axes.set_ylabel("times faster than")
    axes.margins(x=0.01, y=0.15)
    axes.legend(frameon=False, fontsize=7, ncols=3, loc="upper left")
    said = [f"{value:.2f} over {label}" for label, ratio, _ in study.RATIOS if (value := common.mean(map(ratio, rows)))]
    title(figure, f"Megakernel, class {accuracy}, batch {rows[0]['n']}, times as fast: {', '.join(said)}", document)
    save_figure(figure, path)


def plot_gains(document: Document, accuracy: str, path: Path) -> None:
    """Over its tasks in series: against C + K, against the number of tiles, a point per layer; against the batch, the
    geometric mean with the least and the most."""
    rows = study.rows_of(document, "layers", accuracy)
    timed = [(row, gain) for row in rows if (gain := study.over_series(row))]
    figure, first = new_figure(9.0, 3.0)
    first.remove()
    by_channels, by_tiles, by_batch = figure.subplots(1, 3, sharey=True)
    for row, gain in timed:
        if row["n"] == BATCH:
            colour = common.win_or_loss(gain)
            by_channels.scatter(row["c"] + row["k"], gain, s=14, color=colour)
            by_tiles.scatter(tiles_of(row), gain, s=14, color=colour)
    batches = sorted({row["n"] for row, _ in timed})
    its = {n: [gain for row, gain in timed if row["n"] == n] for n in batches}
    means = [common.mean(its[n]) or 0.0 for n in batches]
    by_batch.plot(batches, means, marker="o", markersize=4, color=common.OURS)
    by_batch.fill_between(
        batches, *[[each(its[n]) for n in batches] for each in (min, max)], color=common.ALSO_OURS, alpha=0.4
    )
    for axes, label in (
        (by_channels, f"C + K, batch {BATCH}"),
        (by_tiles, f"tiles, batch {BATCH}"),
        (by_batch, "batch; band: least and most"),
    ):
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)
    by_channels.set_ylabel("times faster than\nits tasks in series")
    ends = list(dict.fromkeys((0, len(batches) - 1))) if batches else []
    said = " and ".join(f"{means[at]:.2f} at batch {batches[at]}" for at in ends)
    title(figure, f"Mixing the tasks, class {accuracy}, is worth {said} times, geometric mean of the layers", document)
    save_figure(figure, path)


def plot_mapping(document: Document, accuracy: str, names: Sequence[str], path: Path) -> None:
    """Time over winograd_f4's against parameters of the map, a panel each, a line per layer; planned values ringed."""
    planned = {row["layer"]: row for row in study.rows_of(document, "mapping", accuracy) if row["variant"] == "planned"}
    figure, first = new_figure(3.0 + 2.6 * len(names), 3.2)
    first.remove()
    panels = figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
    for axes, name in zip(panels, names, strict=True):
        for index, (layer, rows) in enumerate(study._swept(document, accuracy, name).items()):
            rows = [row for row in rows if row["algorithms"].get(study.STAGED)]
            values = [int(row["variant"].partition("=")[2]) for row in rows]
            times = [row["us"] / row["algorithms"][study.STAGED] for row in rows]
            label = f"{layer}, {rows[0]['c']} channels" if axes is panels[0] and rows else None
            axes.plot(values, times, marker="o", markersize=3, label=label, color=f"C{index}")
            its = planned.get(layer)
            if its and its["algorithms"].get(study.STAGED):
                ratio = its["us"] / its["algorithms"][study.STAGED]
                axes.scatter(its[name], ratio, s=60, facecolors="none", edgecolors=f"C{index}")
        axes.axhline(1.0, color="black", linewidth=0.8)
        if name == "m":
            axes.set_xscale("log", base=2)
        else:
            axes.set_xscale("symlog", base=2, linthresh=16)
            axes.set_xlim(left=-4)
        axes.set_xlabel(AXES[name])
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].plot([], [], "o", markersize=8, markerfacecolor="none", color="black", label="planned")
    panels[0].set_ylabel("time / that of winograd_f4")
    figure.legend(loc="outside right center", frameon=False, fontsize=7)
    title(figure, study._mapping_message(document, accuracy, names), document)
    save_figure(figure, path)


def plot_contenders(document: Document, accuracy: str, path: Path) -> None:
    """Everybody on the 2_x layer, the fastest above."""
    found = contenders(document, accuracy)
    names = [name.replace("`", "") for name, *_ in found]
    own = f"{OURS}{study.NAME}"
    colours = [
        common.OURS if name == own else common.ALSO_OURS if name.startswith(OURS) else common.NEUTRAL for name in names
    ]
    figure, axes = new_figure(6.5, 0.8 + 0.16 * len(found))
    axes.barh(names, [us for _, us, _ in found], color=colours, height=0.7)
    for at, (_, us, _) in enumerate(found):
        axes.text(us, at, f" {common.us(us)}", va="center", fontsize=6)
    axes.set_xscale("log")
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=6)
    axes.set_xlabel("microseconds; light blue: others of ours, grey: rivals")
    axes.margins(x=0.1, y=0.01)
    place = f"number {names.index(own) + 1} of {len(names)}" if own in names else "not timed"
    title(figure, f"ResNet's 2_x layer, class {accuracy}: the megakernel is {place}", document)
    save_figure(figure, path)


def figures(document: Document, prefix: str) -> dict[str, Callable[[Path], None]]:
    """<prefix>_<layers, gains, distances, m, tasks>_<class>.svg."""
    its = of_batch(document, BATCH)
    found: dict[str, Callable[[Path], None]] = {}
    for accuracy in CLASSES:
        if study.rows_of(its, "layers", accuracy):
            found[f"{prefix}_layers_{accuracy}.svg"] = partial(plot_layers, its, accuracy)
            found[f"{prefix}_gains_{accuracy}.svg"] = partial(plot_gains, document, accuracy)
        if study.rows_of(document, "mapping", accuracy):
            found[f"{prefix}_distances_{accuracy}.svg"] = partial(plot_mapping, document, accuracy, ("d_ig", "d_go"))
            found[f"{prefix}_m_{accuracy}.svg"] = partial(plot_mapping, document, accuracy, ("m",))
        if study.rows_of(document, "distribution", accuracy):
            found[f"{prefix}_tasks_{accuracy}.svg"] = partial(study.plot_tasks, document, accuracy)
    return found


def resnet2_figures(document: Document, prefix: str) -> dict[str, Callable[[Path], None]]:
    """<prefix>_<class>.svg."""
    drawn = [accuracy for accuracy in CLASSES if contenders(document, accuracy)]
    return {f"{prefix}_{accuracy}.svg": partial(plot_contenders, document, accuracy) for accuracy in drawn}
