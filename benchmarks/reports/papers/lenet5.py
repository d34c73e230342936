"""The LeNet-5 ladder: microseconds of the two layers by rung and batch, what each step of the ladder is worth, and what
each rung classifies rightly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.harness.results import CLASSES, Document, Row
from benchmarks.papers.lenet5 import RUNGS
from benchmarks.reports import common
from benchmarks.reports.networks import speedup_of
from benchmarks.reports.papers.shared import (
    BESIDE,
    NOTHING,
    File,
    beside,
    bytes_of,
    classes_of,
    of_class,
    packing_us,
    percent,
    rows_in,
    without_empty,
)
from benchmarks.studies.ladder import HALF, TILE, class_of
from benchmarks.studies.ladder import RUNGS as LADDER
from fastconv.figures import new_figure, save_figure
from fastconv.models.layers import SETS

NAME = "lenet5"
LAYERS = {layer.layer for layer in SETS["lenet5"]}
# What a step of the ladder adds, from rung, to rung; names of benchmarks/studies/ladder.py.
STEPS = [
    ("`ladder_direct`: `__restrict__`", "ladder_direct", "ladder_direct_restrict"),
    ("`ladder_direct`: filter size a constant", "ladder_direct", "ladder_direct_size"),
    ("`ladder_direct`: both", "ladder_direct", "ladder_direct_restrict_size"),
    ("`ladder_direct`: both, then constant memory", "ladder_direct_restrict_size", "ladder_direct_constant_memory"),
    ("a tiled product of the unrolled input", "ladder_direct_restrict", "ladder_unroll_restrict"),
    ("unrolled inside the product", "ladder_unroll_restrict", "ladder_fused_restrict"),
    ("`ladder_fused`: `__restrict__`", "ladder_fused", "ladder_fused_restrict"),
    ("`ladder_fused`: filter size a constant", "ladder_fused", "ladder_fused_size"),
    ("`ladder_fused`: both", "ladder_fused", "ladder_fused_restrict_size"),
    ("`ladder_fused`: both, then constant memory", "ladder_fused_restrict_size", "ladder_fused_constant_memory"),
    ("`ladder_fused`: both, then FP16 arithmetic", "ladder_fused_restrict_size", "ladder_half_fused_restrict_size"),
]
TILES = [
    (f"`ladder_fused`: both, tile of {name.removeprefix('ladder_fused_')}", "ladder_fused_restrict_size", name)
    for name, rung in LADDER.items()
    if rung.tile != TILE and not name.startswith(HALF)
]  # our own sweep
FIRST = "ladder_direct"  # what the others are compared with
ALL_STEPS = [step for step, *_ in [*STEPS, *TILES]]
LADDERS = {"ieee": "FP32", "fp16": "FP16"}  # class -> arithmetic of its rungs


def _both(rows: Sequence[Row], n: int) -> list[Row]:
    """The rows of a batch in the layers' order; none where one of the layers is missing: the sums are of both."""
    its = sorted((row for row in rows if row["n"] == n), key=lambda row: row["layer"])
    return its if {row["layer"] for row in its} >= LAYERS else []


def layers(document: Document, gpu: str, accuracy: str) -> str:
    """A row per batch and layer, then both together: op times of each rung, and of the fastest rival; what the fastest
    rung takes with packing, and keeps; our choice, cuDNN's best, PyTorch's."""
    rows = of_class(document, accuracy)
    rungs = [rung for rung in RUNGS if any(row["algorithms"].get(rung) for row in rows)]
    header = ["batch", "layer", *(f"`{rung}` us" for rung in rungs), "best peer us", "peer", "best rung's gain"]
    header += ["it with packing us", "its workspace, packed MiB", *BESIDE]
    lines = []
    for n in sorted({row["n"] for row in rows}):
        its = sorted((row for row in rows if row["n"] == n), key=lambda row: row["layer"])
        for row in its:
            best, rung = min(((us, rung) for rung in rungs if (us := row["algorithms"].get(rung))), default=(None, ""))
            cells = [common.us(row["algorithms"].get(rung)) for rung in rungs]
            cells += [common.us(row["best_peer_us"]), f"`{row['best_peer']}`"]
            cells.append(common.times(speedup_of(best, row["best_peer_us"])))
            cells += [common.us(packing_us(row, rung)), bytes_of(row, 2, rung), *beside(row)]
            lines.append([str(n), row["layer"], *cells])
        if not _both(its, n):
            continue
        totals = [_total([row["algorithms"].get(rung) for row in its]) for rung in rungs]
        peer = _total([row["best_peer_us"] for row in its])
        best = min((us for us in totals if us), default=None)
        cells = [*map(common.us, totals), common.us(peer), ""]
        lines.append([str(n), "both", *cells, common.times(speedup_of(best, peer)), *[""] * (2 + len(BESIDE))])
    return without_empty(common.markdown_table(header, lines)) if lines else NOTHING


def totals(document: Document, rung: str) -> dict[int, float]:
    """Batch -> microseconds of all layers by a rung, in its class, where each was timed."""
    rows = of_class(document, class_of(rung))
    found = {n: _total([row["algorithms"].get(rung) for row in _both(rows, n)]) for n in {row["n"] for row in rows}}
    return {n: us for n, us in sorted(found.items()) if us}


def of_ladder(accuracy: str) -> list[str]:
    return [rung for rung in LADDER if class_of(rung) == accuracy]


def _batches(document: Document) -> list[int]:
    """Those at which any rung of the ladder was timed."""
    return sorted({n for rung in LADDER for n in totals(document, rung)})


def ladder(document: Document, gpu: str, accuracy: str) -> str:
    """A row per rung of the source: what it has, both layers' times at each batch, and its error."""
    batches, rows, lines = _batches(document), of_class(document, accuracy), []
    first = totals(document, FIRST)
    for name, rung in LADDER.items():
        found = totals(document, name) if class_of(name) == accuracy else {}
        if not found:
            continue
        line = [f"`{name}`", "yes" if rung.restrict else "no", "yes" if rung.size else "no"]
        line += ["constant" if rung.constant_memory else "global"]
        line += ["16x16 pixels" if rung.form == "direct" else "{}x{}".format(*rung.tile)]
        for n in batches:
            its = sorted((row for row in rows if row["n"] == n), key=lambda row: row["layer"])
            both = " + ".join(common.us(row["algorithms"].get(name)) for row in its)
            line.append(f"{both} = {common.us(found[n])}" if n in found else "-")
        last = max(found)
        line.append(common.times(first[last] / found[last]) if last in first else "-")
        errors = [row["errors"][name]["l2"] for row in rows if name in row.get("errors", {})]
        lines.append([*line, common.scientific(max(errors, default=None))])
    header = ["rung", "`__restrict__`", "size constant", "filters", "tile", *(f"batch {n} us" for n in batches)]
    if not lines:
        return NOTHING
    image = f"![Ladder, class {accuracy}](../figures/{gpu}_paper_lenet5_ladder_{accuracy}.svg)"
    return f"{image}\n\n{common.markdown_table([*header, f'over `{FIRST}`', 'error'], lines)}"


def step_gains(document: Document) -> dict[str, dict[int, float]]:
    """Step -> batch -> how many times as fast both layers are with it."""
    found = {}
    for step, before, after in [*STEPS, *TILES]:
        first, second = totals(document, before), totals(document, after)
        if gains := {n: first[n] / us for n, us in second.items() if n in first}:
            found[step] = gains
    return found


def library(document: Document, n: int, accuracy: str) -> list[tuple[float, str]]:
    """Microseconds of both layers by each of the library's algorithms, the fastest first."""
    rows = _both(of_class(document, accuracy), n)
    found = [(_total([row["algorithms"].get(rung) for row in rows]), rung) for rung in RUNGS]
    return sorted((us, rung) for us, rung in found if us)


def fastest_rung(document: Document, n: int, accuracy: str) -> tuple[str, float] | None:
    """The fastest of the source's rungs of a class at a batch, and microseconds of both layers."""
    found = [(us, rung) for rung in of_ladder(accuracy) if (us := totals(document, rung).get(n))]
    return (min(found)[1], min(found)[0]) if found else None


def best_of_each(document: Document, n: int, accuracy: str) -> tuple[list[str], float] | None:
    """The fastest rung of either layer, the source's combination, and microseconds of both."""
    found = []
    for row in _both(of_class(document, accuracy), n):
        found.append(
            min(((us, rung) for rung in of_ladder(accuracy) if (us := row["algorithms"].get(rung))), default=None)
        )
    known = [pair for pair in found if pair is not None]
    if not known or len(known) != len(found):
        return None
    return [rung for _, rung in known], sum(us for us, _ in known)


def steps(document: Document, gpu: str) -> str:
    """A row per step, a column per batch: times faster with it; last, by arithmetic, the fastest rung of all over the
    first, and the fastest of either layer."""
    batches, gains = _batches(document), step_gains(document)
    lines = [[step, *(common.times(its.get(n)) for n in batches)] for step, its in gains.items()]
    first = totals(document, FIRST)
    for accuracy, arithmetic in LADDERS.items():
        one: list[str] = []
        each: list[str] = []
        for n in batches:
            for cells, best in (
                (one, fastest_rung(document, n, accuracy)),
                (each, best_of_each(document, n, accuracy)),
            ):
                names, us = best or ("", None)
                shown = ", ".join(f"`{name}`" for name in ([names] if isinstance(names, str) else names))
                cells.append(f"{common.times(first[n] / us)} {shown}" if us and n in first else "-")
        lines += [[f"{arithmetic}: {what} over `{FIRST}`", *cells] for what, cells in (
            ("the fastest rung", one), ("the fastest of either layer", each)
        ) if set(cells) != {"-"}]  # fmt: skip
    return common.markdown_table(["step", *(f"batch {n}" for n in batches)], lines) if gains else NOTHING


def sweep(document: Document, gpu: str) -> str:
    """The figure of the tiles."""
    return f"![Tiles](../figures/{gpu}_paper_lenet5_tiles.svg)" if _tiles(document) else NOTHING


def _total(times: list[float | None]) -> float | None:
    known = [us for us in times if us is not None]
    return sum(known) if known and len(known) == len(times) else None


def network(document: Document, gpu: str) -> str:
    """A row per class and rung: how many of the test images are classified rightly, beside PyTorch and float64."""
    lines = []
    for accuracy in classes_of(document, CLASSES):
        for row in of_class(document, accuracy):
            line = [f"`{accuracy}`", f"`{row['mode']}`", percent(row["accuracy"]), percent(row["torch_accuracy"])]
            line += [percent(row["float64_accuracy"]), percent(row["top1_agreement"])]
            line += [common.scientific(row["logits_error"]), common.scientific(row["peer_error"])]
            lines.append([*line, common.us(row["us"]), common.us(row["best_peer_us"])])
    header = ["class", "rung", "right", "PyTorch", "float64", "same answer as float64", "error of scores", "PyTorch's"]
    return common.markdown_table([*header, "network us", "PyTorch us"], lines)


TABLES = {
    "layers": ("papers/lenet5/layers", layers),
    "ladder": ("papers/lenet5/layers", ladder),
    "steps": ("papers/lenet5/layers", steps),
    "sweep": ("papers/lenet5/layers", sweep),
    "network": ("papers/lenet5/network", network),
}


def said(file: File) -> str:
    """What holds of the claims: each rung is faster than the one below, and none changes the accuracy."""
    parts = []
    document = file("papers/lenet5/layers") or {"rows": []}
    rows = of_class(document, "ieee")
    if n := max((row["n"] for row in rows if _both(rows, row["n"])), default=0):
        order = library(document, n, "ieee")
        if said := ", ".join(f"`{rung}` {common.us(us)} us" for us, rung in order):
            said += f", the best rival {common.us(rival)} us" if (rival := _rival(document, "ieee", n)) else ""
            parts.append(f"at batch {n} the library's algorithms take for both layers, the fastest first, {said}")
        names = [step for step, *_ in STEPS]
        gains = {step: its[n] for step, its in step_gains(document).items() if n in its and step in names}
        if gains:
            most = max(gains, key=lambda step: gains[step])
            lost = sum(gain < 1 for gain in gains.values())
            text = f"of the ladder's {len(gains)} steps, tiles aside, the one worth most there is {most}, "
            text += f"{gains[most]:.2f} times"
            parts.append(f"{text}; {lost} cost time" if lost else text)
        if beside := beside_rivals(file):
            parts.append(beside)
    network = rows_in(file, "papers/lenet5/network")
    if network:
        halves = [row for row in network if row["mode"].startswith(HALF)]
        network = [row for row in network if row not in halves]
        changed = [row for row in network if row["accuracy"] != row["torch_accuracy"]]
        which = ", ".join(f"`{row['mode']}` in `{row['class']}`" for row in changed)
        same = len(network) - len(changed)
        text = (
            f"{same} of {len(network)} pairs of rung and class classify exactly as many test images rightly as PyTorch"
        )
        parts.append(text + (f" (not {which})" if changed else ""))
        if halves:
            costs = [row["torch_accuracy"] - row["accuracy"] for row in halves]
            span = " to ".join(dict.fromkeys(map(percent, (min(costs), max(costs)))))
            text = f"FP16 arithmetic costs {span} of the images"
            parts.append(f"{text} (the source gains 0.02 %)")
    said = "; ".join(parts)
    return f"{said[0].upper()}{said[1:]}." if parts else NOTHING


def beside_rivals(file: File) -> str:
    """At the largest batch, both layers: the fastest rung of the ladder for either, and the best rival."""
    document = file("papers/lenet5/layers") or {"rows": []}
    parts = []
    for accuracy, arithmetic in LADDERS.items():
        n = _last(document, accuracy)
        best, rival = best_of_each(document, n, accuracy), _rival(document, accuracy, n)
        if best and rival:
            parts.append(f"{best[1] / 1e3:.1f} ms in {arithmetic} against {rival / 1e3:.1f} ms of the best rival")
    return f"the ladder's fastest rung for either layer takes {', '.join(parts)}" if parts else ""


def _rival(document: Document, accuracy: str, n: int) -> float | None:
    return _total([row["best_peer_us"] for row in _both(of_class(document, accuracy), n)])


def verdict(document: Document, accuracy: str) -> str:
    """At the largest batch: the ladder's fastest rung for either layer, and the library's fastest algorithm for both,
    against the best rival; "" without any of them."""
    n = _last(document, accuracy)
    best, rival = best_of_each(document, n, accuracy), _rival(document, accuracy, n)
    ours = library(document, n, accuracy)
    if not best or not rival or not ours:
        return ""
    us, name = ours[0]
    of = "" if us > rival else " of"
    return f"ladder {_beside(best[1], rival)}, `{name}` {_beside(us, rival)}{of} rivals"


def _beside(us: float, rival: float) -> str:
    return f"{us / rival:.2f}x behind" if us > rival else f"{rival / us:.2f}x ahead"


SENTENCES: dict[str, Callable[[File], str]] = {}


def _last(document: Document, accuracy: str) -> int:
    """The largest batch at which a rung of the ladder has both layers; 0 if none has."""
    return max((n for rung in of_ladder(accuracy) for n in totals(document, rung)), default=0)


def plot_ladder(document: Document, accuracy: str, path: Path) -> None:
    """Both layers at the largest batch: the source's rungs, the library's algorithms, the best rival."""
    n = _last(document, accuracy)
    rows = _both(of_class(document, accuracy), n)
    times = {rung: _total([row["algorithms"].get(rung) for row in rows]) for rung in [*of_ladder(accuracy), *RUNGS]}
    bars = [(rung, us, common.OURS if rung in LADDER else common.ALSO_OURS) for rung, us in times.items() if us]
    if rival := _rival(document, accuracy, n):
        bars.append(("best rival of each layer", rival, common.NEUTRAL))
    figure, axes = new_figure(6.5, 0.8 + 0.17 * len(bars))
    axes.barh([name for name, *_ in bars], [us / 1e3 for _, us, _ in bars], color=[bar[2] for bar in bars], height=0.7)
    for at, (_, us, _) in enumerate(bars):
        axes.text(us / 1e3, at, f" {us / 1e3:.1f}", va="center", fontsize=6)
    axes.set_xscale("log")
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=6)
    axes.set_xlabel(f"both layers at batch {n}, ms")
    axes.margins(x=0.1, y=0.01)
    best = fastest_rung(document, n, accuracy)
    fastest = f": {best[0]} is its fastest rung" if best else ""
    common.title(figure, f"LeNet-5's ladder, {LADDERS[accuracy]} arithmetic{fastest}", document)
    save_figure(figure, path)


def _tiles(document: Document) -> dict[str, dict[str, list[float]]]:
    """Arithmetic -> tile -> microseconds of each layer, at the largest batch, of `fused` with both steps."""
    found: dict[str, dict[str, list[float]]] = {}
    for accuracy, arithmetic in LADDERS.items():
        rows = _both(of_class(document, accuracy), _last(document, accuracy))
        for name in of_ladder(accuracy):
            rung = LADDER[name]
            times = [us for row in rows if (us := row["algorithms"].get(name))]
            is_swept = rung.form == "fused" and rung.restrict and rung.size and not rung.constant_memory
            if is_swept and rows and len(times) == len(rows):
                found.setdefault(arithmetic, {})["{}x{}".format(*rung.tile)] = times
    return {arithmetic: its for arithmetic, its in found.items() if len(its) > 1}


def plot_tiles(document: Document, path: Path) -> None:
    """A panel per arithmetic: each layer's time over its best, by tile."""
    found = _tiles(document)
    layers = sorted(LAYERS)
    figure, first = new_figure(6.5, 2.6)
    first.remove()
    panels = figure.subplots(1, len(found), squeeze=False, sharey=True)[0]
    said = []
    for axes, (arithmetic, its) in zip(panels, found.items(), strict=True):
        tiles = sorted(its, key=lambda tile: [int(part) for part in tile.split("x")])
        for index, layer in enumerate(layers):
            least = min(its[tile][index] for tile in tiles)
            heights = [its[tile][index] / least for tile in tiles]
            places = [place + 0.4 * (index - 0.5) for place in range(len(tiles))]
            axes.bar(places, heights, width=0.38, color=f"C{index}", label=layer)
            for place, height in zip(places, heights, strict=True):
                axes.text(place, height, f"{height:.2f}", ha="center", va="bottom", fontsize=5)
            said.append(f"{tiles[heights.index(min(heights))]} for {layer} in {arithmetic}")
        axes.set_xticks(range(len(tiles)), tiles)
        axes.set_xlabel(f"tile, filters x pixels, {arithmetic} arithmetic")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("time / the best tile's")
    panels[0].legend(frameon=False, fontsize=7)
    common.title(figure, f"The fastest tile: {', '.join(said)}", document)
    save_figure(figure, path)


def figures(document: Document, prefix: str) -> dict[str, Callable[[Path], None]]:
    """<prefix>_ladder_<class>.svg and <prefix>_tiles.svg."""
    found: dict[str, Callable[[Path], None]] = {
        f"{prefix}_ladder_{accuracy}.svg": partial(plot_ladder, document, accuracy)
        for accuracy in LADDERS
        if _last(document, accuracy)
    }
    return found | ({f"{prefix}_tiles.svg": partial(plot_tiles, document)} if _tiles(document) else {})
