"""cuConv's survey: who wins how many configurations, by what, where; and how far each variant is from the best."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.harness.results import CLASSES, Document, Row
from benchmarks.layers.suite import is_wrong
from benchmarks.peers import REFUSED
from benchmarks.reports import common
from benchmarks.reports.papers import counters
from benchmarks.reports.papers.shared import NOTHING, File, Wins, classes_of, of_class, wins
from fastconv.figures import new_figure, save_figure

NAME = "cuconv"
ALGORITHMS = ("two_stage", "auto")
PACKING = "auto, filters packed in every call"


def _us(row: Row, algorithm: str) -> float | None:
    if algorithm in ("auto", PACKING):
        packing = row.get("us_with_packing") if algorithm == PACKING else None  # None: there is nothing to pack
        return None if is_wrong(row) else packing or row["us"]
    us: float | None = row["algorithms"].get(algorithm)
    return us


def cudnn_us(row: Row, layout: str | None = None) -> float | None:
    """The fastest of cuDNN's algorithms; of those in one layout, as the source has it."""
    refused = {name for name, note in row.get("notes", {}).items() if note.startswith(REFUSED)}
    times = {name: us for name, us in row["peers"].items() if us and name.startswith("cudnn_") and name not in refused}
    if layout is not None:
        times = {name: us for name, us in times.items() if name.endswith("_nhwc") == (layout == "nhwc")}
    return min(times.values(), default=None)


def over_all(row: Row, algorithm: str) -> float | None:
    """Times faster than the best of all rivals; None where either was not timed."""
    us = _us(row, algorithm)
    return row["best_peer_us"] / us if us and row["best_peer_us"] else None


def over_source(row: Row, algorithm: str) -> float | None:
    """The same over cuDNN's algorithms in NCHW, the source's rivals."""
    us, peer = _us(row, algorithm), cudnn_us(row, "nchw")
    return peer / us if us and peer else None


def overall(document: Document, gpu: str) -> str:
    """A row per class, layout and algorithm."""
    header = ["class", "ours in", "algorithm", "configurations", "won against cuDNN in NCHW", "mean there", "at most"]
    header += ["won against all rivals", "mean there", "at most"]
    lines = []
    for accuracy in classes_of(document, CLASSES):
        for layout in ("nchw", "nhwc"):
            rows = of_class(document, accuracy, layout)
            for algorithm in (*ALGORITHMS, PACKING) if rows else ():
                shown = algorithm if algorithm == PACKING else f"`{algorithm}`"
                line = [f"`{accuracy}`", layout.upper(), shown, str(len(rows))]
                for speedup in (over_source, over_all):
                    found = wins(speedup(row, algorithm) for row in rows)
                    line += [f"{found.won} ({found.share * 100:.1f} %)", common.times(found.mean)]
                    line += [common.times(found.most)]
                lines.append(line)
    return "\n\n".join([common.markdown_table(header, lines), _rounds(document)])


def _rounds(document: Document) -> str:
    found = [row["rounds"] for row in document["rows"] if row.get("rounds")]
    if not found:
        return "No row has a time."
    return f"Medians of {min(found)} to {max(found)} rounds ({statistics.median(found):.0f} in the median)."


def _points(document: Document, algorithm: str, accuracy: str) -> dict[int, list[tuple[int, float]]]:
    """Filter size -> (batch, times faster than cuDNN in NCHW) of what was timed."""
    found: dict[int, list[tuple[int, float]]] = {}
    for row in sorted(of_class(document, accuracy, "nchw"), key=lambda row: row["r"]):
        if value := over_source(row, algorithm):
            found.setdefault(row["r"], []).append((row["n"], value))
    return found


def _by_size(document: Document, algorithm: str, accuracy: str, layout: str = "nchw") -> dict[tuple[int, int], Wins]:
    rows = of_class(document, accuracy, layout)
    pairs = {(row["r"], row["n"]) for row in rows}
    return {
        (r, n): wins(over_source(row, algorithm) for row in rows if (row["r"], row["n"]) == (r, n)) for r, n in pairs
    }


def sizes(document: Document, gpu: str, algorithm: str, accuracy: str) -> str:
    """A row per filter size, a column per batch: share won against cuDNN in NCHW, mean and largest speedup there."""
    found = _by_size(document, algorithm, accuracy)
    if not found:
        return NOTHING
    batches = sorted({n for _, n in found})
    lines = []
    for r in sorted({r for r, _ in found}):
        lines.append([f"{r}x{r}", *(str(found[r, n]) if (r, n) in found else "-" for n in batches)])
    table = common.markdown_table(["filter", *(f"batch {n}" for n in batches)], lines)
    if not _points(document, algorithm, accuracy):
        return table
    return f"![{algorithm}, class {accuracy}](../figures/{gpu}_paper_cuconv_{algorithm}_{accuracy}.svg)\n\n{table}"


def _times(row: Row) -> dict[str, tuple[float, bool]]:
    """Everything that ran on a configuration: microseconds, and whether it was timed (else a single call)."""
    timed = {**row["peers"], **row["algorithms"]}
    found = {name: (us, False) for name, us in row.get("once_us", {}).items()}
    return found | {name: (us, True) for name, us in timed.items() if us}


def variants(document: Document, gpu: str, accuracy: str) -> str:
    """A row per variant: on how many configurations it ran, on how many it is the fastest of all, how many times the
    fastest's time it takes in the median, on how many configurations that is more than 3."""
    rows = of_class(document, accuracy, "nchw")
    ratios: dict[str, list[float]] = {}
    first: dict[str, int] = {}
    for row in rows:
        times = _times(row)
        timed = {name: us for name, (us, is_timed) in times.items() if is_timed and name != "torch"}
        if not timed:
            continue
        best = min(timed, key=lambda name: timed[name])
        first[best] = first.get(best, 0) + 1
        for name, (us, _) in times.items():
            ratios.setdefault(name, []).append(us / timed[best])
    ratios.pop("torch", None)  # our operator around the same convolution
    lines = []
    for name in sorted(ratios, key=lambda name: -first.get(name, 0)):
        its = ratios[name]
        far = sum(ratio > 3 for ratio in its)
        line = [f"`{name}`", str(len(its)), str(first.get(name, 0)), f"{statistics.median(its):.2f}", str(far)]
        lines.append(line)
    header = ["variant", "ran on", "fastest of all on", "median of its time / the fastest's", "more than 3 times on"]
    return common.markdown_table(header, lines)


TABLES = {
    "overall": ("paper_cuconv", overall),
    "sizes": ("paper_cuconv", sizes),
    "variants": ("paper_cuconv", variants),
    "counters": ("paper_cuconv_counters", counters.table),
}


def said(file: File) -> str:
    """What holds of the claim: 8.31 % of 602 configurations, 1.46 times in the mean, 2.29 at most."""
    document = file("paper_cuconv")
    rows = of_class(document, "ieee", "nchw") if document else []
    if not rows:
        return NOTHING
    found = wins(over_source(row, "two_stage") for row in rows)
    home = [row for row in rows if row["r"] == 1 and row["n"] <= 16]
    at_home = wins(over_source(row, "two_stage") for row in home)
    everyone = wins(over_all(row, "two_stage") for row in rows)
    chosen = wins(over_source(row, "auto") for row in rows)
    text = f"`two_stage` is faster than every algorithm of cuDNN's in NCHW on {found.share * 100:.1f} % of "
    text += f"{found.count} configurations (the source: 8.31 % of 602)"
    if found.mean is not None and found.most is not None:
        text += f", there {found.mean:.2f} times in the mean (1.46) and {found.most:.2f} at most (2.29)"
    text += f"; on 1x1 filters up to batch 16, its home, on {at_home.share * 100:.1f} %; against all rivals in both "
    return text + f"layouts on {everyone.share * 100:.1f} %; `auto` on {chosen.share * 100:.1f} %."


def plot(document: Document, algorithm: str, accuracy: str, path: Path) -> None:
    """A panel per filter size: every configuration's speedup over cuDNN in NCHW against the batch."""
    rows, points = of_class(document, accuracy, "nchw"), _points(document, algorithm, accuracy)
    figure, first = new_figure(9.0, 3.0)
    first.remove()
    panels = figure.subplots(1, len(points), squeeze=False, sharey=True)[0]
    for axes, (r, pairs) in zip(panels, points.items(), strict=True):
        colours = [common.win_or_loss(value) for _, value in pairs]
        axes.scatter([n for n, _ in pairs], [value for _, value in pairs], s=9, color=colours, alpha=0.6)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xlabel(f"batch, {r}x{r} filters")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("times faster than cuDNN's best")
    found = wins(over_source(row, algorithm) for row in rows)
    message = f"{algorithm}, class {accuracy}: faster on {found.won} of {found.count} configurations"
    figure.suptitle(f"{message} ({document['gpu']})", x=0.01, ha="left", fontsize=10)
    save_figure(figure, path)


def figures(document: Document, prefix: str) -> dict[str, Callable[[Path], None]]:
    """<prefix>_<algorithm>_<class>.svg."""
    return {
        f"{prefix}_{algorithm}_{accuracy}.svg": partial(plot, document, algorithm, accuracy)
        for accuracy in CLASSES
        for algorithm in ALGORITHMS
        if _points(document, algorithm, accuracy)
    }
