"""Figures of the megakernel's page."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.harness.results import CLASSES, Document, Row
from benchmarks.papers import megakernel_model as model
from benchmarks.peers import REFUSED
from benchmarks.reports import common
from benchmarks.reports import megakernel as study
from benchmarks.reports.papers.shared import of_class
from fastconv.figures import new_figure, save_figure

BATCH = 64
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
    message = f"Mixing the tasks, class {accuracy}, is worth {said} times, geometric mean of the layers"
    common.title(figure, message, document)
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
    common.title(figure, f"ResNet's 2_x layer, class {accuracy}: the megakernel is {place}", document)
    save_figure(figure, path)


def figures(document: Document, prefix: str) -> dict[str, Callable[[Path], None]]:
    """<prefix>_<layers, gains, distances, m, tasks>_<class>.svg."""
    its = of_batch(document, BATCH)
    found: dict[str, Callable[[Path], None]] = {}
    for accuracy in CLASSES:
        if study.rows_of(its, "layers", accuracy):
            found[f"{prefix}_layers_{accuracy}.svg"] = partial(study.plot_layers, its, accuracy)
            found[f"{prefix}_gains_{accuracy}.svg"] = partial(plot_gains, document, accuracy)
        if study.rows_of(document, "mapping", accuracy):
            found[f"{prefix}_distances_{accuracy}.svg"] = partial(
                study.plot_mapping, document, accuracy, ("d_ig", "d_go")
            )
            found[f"{prefix}_m_{accuracy}.svg"] = partial(study.plot_mapping, document, accuracy, ("m",))
        if study.rows_of(document, "distribution", accuracy):
            found[f"{prefix}_tasks_{accuracy}.svg"] = partial(study.plot_tasks, document, accuracy)
    return found


def resnet2_figures(document: Document, prefix: str) -> dict[str, Callable[[Path], None]]:
    """<prefix>_resnet2_<class>.svg."""
    drawn = [accuracy for accuracy in CLASSES if contenders(document, accuracy)]
    return {f"{prefix}_resnet2_{accuracy}.svg": partial(plot_contenders, document, accuracy) for accuracy in drawn}
