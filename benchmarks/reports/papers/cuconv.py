"""cuConv's survey: who wins how many configurations, by what, where; and how far each variant is from the best."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.harness.results import CLASSES, Document, Row
from benchmarks.layers.suite import is_wrong
from benchmarks.peers import REFUSED
from benchmarks.reports import common
from benchmarks.reports.papers import counters
from benchmarks.reports.papers.shared import NOTHING, File, Wins, classes_of, of_class, rows_in, span, wins
from fastconv.figures import new_figure, save_figure

NAME = "cuconv"
ALGORITHMS = ("two_stage", "auto")
PACKING = "auto, filters packed in every call"
CUDNNS = ("cudnn_", "torch_default_")  # PyTorch without a search is what cuDNN's heuristics choose
FAR = 3.0  # times the best: whoever is slower is run a few times and not timed
DARK = 1.5  # below it a cell of the survey's figure is too dark for black
SINGLE_CALLS = "fef9e29d555c"  # the commit whose surveys gave rivals up by single calls


def _us(row: Row, algorithm: str) -> float | None:
    if algorithm in ("auto", PACKING):
        packing = row.get("us_with_packing") if algorithm == PACKING else None  # None: there is nothing to pack
        return None if is_wrong(row) else packing or row["us"]
    us: float | None = row["algorithms"].get(algorithm)
    return us


def cudnn_us(row: Row, layout: str | None = None) -> float | None:
    """The fastest of cuDNN's algorithms, the one that its heuristics choose among them; of those in one layout, as the
    source has it."""
    refused = {name for name, note in row.get("notes", {}).items() if note.startswith(REFUSED)}
    times = {name: us for name, us in row["peers"].items() if us and name.startswith(CUDNNS) and name not in refused}
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


def _ratios(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Variant -> its time over the fastest of all, for each configuration on which it ran; infinite where it was so far
    behind that it was not timed."""
    found: dict[str, list[float]] = {}
    for row in rows:
        timed = {name: us for name, us in {**row["peers"], **row["algorithms"]}.items() if us and name != "torch"}
        if not timed:
            continue
        best = min(timed.values())
        dropped = dict.fromkeys(row.get("once_us", {}), math.inf)
        for name, us in {**dropped, **timed}.items():
            found.setdefault(name, []).append(us / best)
    found.pop("torch", None)  # our operator around the same convolution
    return found


def _median(ratios: Sequence[float]) -> float:
    """Of two in the middle, one of which was not timed, the other."""
    return statistics.median(
        ratios if math.isfinite(statistics.median_high(ratios)) else [statistics.median_low(ratios)]
    )


def _shown(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio <= FAR else f"> {FAR:.0f}"


def _by_wins(ratios: dict[str, list[float]]) -> list[str]:
    return sorted(ratios, key=lambda name: (-ratios[name].count(1.0), _median(ratios[name])))


def variants(document: Document, gpu: str, accuracy: str) -> str:
    """A row per variant: on how many configurations it ran, on how many it is the fastest of all, how many times the
    fastest's time it takes in the median, on how many configurations that is more than 3."""
    ratios = _ratios(of_class(document, accuracy, "nchw"))
    if not ratios:
        return NOTHING
    lines = []
    for name in _by_wins(ratios):
        its = ratios[name]
        line = [f"`{name}`", str(len(its)), str(its.count(1.0)), _shown(_median(its))]
        lines.append([*line, str(sum(ratio > FAR for ratio in its))])
    header = ["variant", "ran on", "fastest of all on", "median of its time / the fastest's", "more than 3 times on"]
    image = f"![Survey, class {accuracy}](../figures/{gpu}_paper_cuconv_survey_{accuracy}.svg)"
    return f"{image}\n\n{common.markdown_table(header, lines)}"


def memory(document: Document, gpu: str) -> str:
    """A row per class and layout: workspace and packed filters of what `auto` takes, in the median and at most."""
    header = ["class", "layout", "configurations", "workspace MiB, median", "at most", "packed MiB, median", "at most"]
    lines = []
    for accuracy in classes_of(document, CLASSES):
        for layout in ("nchw", "nhwc"):
            line = [f"`{accuracy}`", layout.upper()]
            rows = [row for row in of_class(document, accuracy, layout) if row.get("workspace_bytes") is not None]
            for name in ("workspace", "packed") if rows else ():
                its = [row[f"{name}_bytes"] or 0 for row in rows]
                line += [common.mib(each(its), 2) for each in (statistics.median, max)]
            lines += [[*line[:2], str(len(rows)), *line[2:]]] if rows else []
    return common.markdown_table(header, lines) if lines else NOTHING


TABLES = {
    "overall": ("papers/cuconv/survey", overall),
    "sizes": ("papers/cuconv/survey", sizes),
    "variants": ("papers/cuconv/survey", variants),
    "memory": ("papers/cuconv/survey", memory),
    "counters": ("papers/cuconv/counters", counters.table),
}


def said(file: File) -> str:
    """What holds of the claim: 8.31 % of 602 configurations, 1.46 times in the mean, 2.29 at most."""
    document = file("papers/cuconv/survey")
    rows = of_class(document, "ieee", "nchw") if document else []
    if not rows:
        return NOTHING
    found = wins(over_source(row, "two_stage") for row in rows)
    home = [row for row in rows if row["r"] == 1 and row["n"] <= 16]
    at_home = wins(over_source(row, "two_stage") for row in home)
    everyone = wins(over_all(row, "two_stage") for row in rows)
    chosen = wins(over_source(row, "auto") for row in rows)
    text = "`two_stage` is faster than every algorithm of cuDNN's in NCHW, the choice of its heuristics among them, on "
    text += f"{found.share * 100:.1f} % of {found.count} configurations (the source: 8.31 % of 602)"
    if found.mean is not None and found.most is not None:
        text += f", there {found.mean:.2f} times in the mean (1.46) and {found.most:.2f} at most (2.29)"
    text += f"; on 1x1 filters up to batch 16, its home in the source, on {at_home.share * 100:.1f} %"
    (r, n), most = max(_by_size(document or {}, "two_stage", "ieee").items(), key=lambda item: (item[1].share, item[0]))
    if most.won:
        text += f", most often on {r}x{r} filters at batch {n}, {most.won} of {most.count}"
    text += f"; against all rivals in both layouts on {everyone.share * 100:.1f} %"
    return f"{text}; `auto` on {chosen.share * 100:.1f} %."


def _pairs(file: File) -> list[tuple[Row, Row]]:
    """Of each layer whose counters were read: the row of two_stage, and that of PyTorch's convolution."""
    rows = [row for row in rows_in(file, "papers/cuconv/counters") if row.get("us")]
    found = {(row["layer"], row["n"], row["class"], row["algorithm"]): row for row in rows}
    pairs = ((row, found.get((row["layer"], row["n"], row["class"], "torch"))) for row in rows)
    return [(row, other) for row, other in pairs if other is not None and row["algorithm"] == "two_stage"]


def _planes(row: Row) -> float:
    """Bytes of the R S partial planes of the output."""
    layer = common.layer_of(row)
    return 4.0 * layer.r * layer.s * row["n"] * layer.k * layer.p * layer.q


def counted(file: File) -> str:
    """What the counters say of two_stage beside PyTorch's kernel: memory and planes, the L2 cache, instructions."""
    pairs, parts = _pairs(file), []
    for size, its in (
        (r, [pair for pair in pairs if pair[0]["r"] == r]) for r in sorted({row["r"] for row, _ in pairs})
    ):
        more, of_l2 = (
            [each(own, theirs) for own, theirs in its]
            for each in (
                lambda own, theirs: (own["dram_read_bytes"] - theirs["dram_read_bytes"]) / 1e6,
                lambda own, theirs: own["l2_bytes"] / theirs["l2_bytes"],
            )
        )
        issued = [own["instructions"] / theirs["instructions"] for own, theirs in its]
        text = f"on {size}x{size} filters `two_stage` issues {span(issued, '.1f')} times the instructions of "
        text += f"PyTorch's kernel and moves {span(of_l2, '.1f')} times its bytes through the L2 cache"
        if size > 1:
            planes = [_planes(own) / 1e6 for own, _ in its]
            text += f"; it reads {span(more, '.1f')} MB more of memory, and its planes have {span(planes, '.1f')} MB"
        parts.append(text)
    return f"{'; '.join(parts)}.".replace("on ", "On ", 1) if parts else NOTHING


def surveyed(file: File) -> str:
    """The layers whose counters were read, as the survey has timed them."""
    rows = {(row["layer"], row["n"], row["class"], row["layout"]): row for row in rows_in(file, "papers/cuconv/survey")}
    parts = []
    for own, _ in _pairs(file):
        row = rows.get((own["layer"], own["n"], own["class"], "nchw"))
        us, theirs = (row and row["algorithms"].get("two_stage")), (row and cudnn_us(row, "nchw"))
        if us and theirs:
            parts.append(f"{common.us(us)} against {common.us(theirs)} us on {own['layer']}")
    return ", ".join(parts) or NOTHING


def caches(file: File) -> str:
    return counters.caches(rows_in(file, "papers/cuconv/counters"))


def doubt(file: File) -> str:
    """What is wrong with the survey's rows, as long as they are those."""
    document = file("papers/cuconv/survey")
    if document is None or not document["rows"]:
        return NOTHING
    if SINGLE_CALLS not in common.commits_of(document):
        return ""
    return (
        "**cuConv's shares are too high.** When these rows were taken, a rival was given up if one call of it took "
        "three times the best, the host's gaps between launches included: in 339 of 616 configurations of `ieee`, "
        "NCHW, one that may have been faster is missing, and of the wins on 1x1 filters none is certain "
        "([132](../log/132-the-rest-of-fef9e29.md))."
    )


SENTENCES = {"counters": counted, "surveyed": surveyed, "caches": caches, "doubt": doubt}


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
    message = f"{algorithm}, class {accuracy}: faster than cuDNN in NCHW on {found.won} of {found.count} configurations"
    common.title(figure, message, document)
    save_figure(figure, path)


def plot_survey(document: Document, accuracy: str, path: Path) -> None:
    """A row per variant, a column per batch: the median of its time over the fastest of all, the darker the nearer."""
    rows = of_class(document, accuracy, "nchw")
    batches = sorted({row["n"] for row in rows})
    names = _by_wins(_ratios(rows))
    found = {n: _ratios([row for row in rows if row["n"] == n]) for n in batches}
    medians = [[_median(found[n][name]) if name in found[n] else math.nan for n in batches] for name in names]
    figure, axes = new_figure(6.5, 0.9 + 0.2 * len(names))
    from matplotlib.colors import LinearSegmentedColormap

    shades = LinearSegmentedColormap.from_list("near", [common.OURS, "white"])
    axes.imshow([[min(ratio, FAR) for ratio in line] for line in medians], cmap=shades, vmin=1, vmax=FAR, aspect="auto")
    for at, line in enumerate(medians):
        for place, ratio in enumerate(line):
            text, colour = "" if math.isnan(ratio) else _shown(ratio), "white" if ratio < DARK else "black"
            axes.text(place, at, text, ha="center", va="center", fontsize=6, color=colour)
    axes.set_xticks(range(len(batches)), batches)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("batch")
    ratios = _ratios(rows)
    said = ", ".join(
        f"{name} on {ratios[name].count(1.0)}" for name in dict.fromkeys((names[0], "two_stage")) if name in ratios
    )
    message = f"Class {accuracy}, median of each variant's time over the fastest of all; fastest of all: {said}"
    message += f" of {len(rows)} configurations"
    common.title(figure, message, document)
    save_figure(figure, path)


def figures(document: Document, prefix: str) -> dict[str, Callable[[Path], None]]:
    """<prefix>_<algorithm>_<class>.svg and <prefix>_survey_<class>.svg."""
    found: dict[str, Callable[[Path], None]] = {
        f"{prefix}_{algorithm}_{accuracy}.svg": partial(plot, document, algorithm, accuracy)
        for accuracy in CLASSES
        for algorithm in ALGORITHMS
        if _points(document, algorithm, accuracy)
    }
    surveyed = [accuracy for accuracy in CLASSES if _ratios(of_class(document, accuracy, "nchw"))]
    return found | {
        f"{prefix}_survey_{accuracy}.svg": partial(plot_survey, document, accuracy) for accuracy in surveyed
    }
