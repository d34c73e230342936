"""The LeNet-5 ladder: microseconds of the two layers by rung and batch, what each step of the ladder is worth, and what
each rung classifies rightly."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness.results import CLASSES, Document, Row
from benchmarks.papers.lenet5 import RUNGS
from benchmarks.reports import common
from benchmarks.reports.networks import speedup_of
from benchmarks.reports.papers.shared import NOTHING, File, classes_of, of_class, percent
from benchmarks.studies.ladder import HALF, PREFIX, TILE, class_of
from benchmarks.studies.ladder import RUNGS as LADDER
from fastconv.models.layers import SETS

NAME = "lenet5"
LAYERS = {layer.layer for layer in SETS["lenet5"]}
# What a step of the ladder adds, from rung, to rung; names of benchmarks/studies/ladder.py.
STEPS = [
    ("`direct`: `__restrict__`", "direct", "direct_restrict"),
    ("`direct`: filter size a constant", "direct", "direct_size"),
    ("`direct`: both", "direct", "direct_restrict_size"),
    ("`direct`: both, then constant memory", "direct_restrict_size", "direct_constant_memory"),
    ("a tiled product of the unrolled input", "direct_restrict", "unroll_restrict"),
    ("unrolled inside the product", "unroll_restrict", "fused_restrict"),
    ("`fused`: `__restrict__`", "fused", "fused_restrict"),
    ("`fused`: filter size a constant", "fused", "fused_size"),
    ("`fused`: both", "fused", "fused_restrict_size"),
    ("`fused`: both, then constant memory", "fused_restrict_size", "fused_constant_memory"),
    *(
        (f"`fused`: both, tile of {name.removeprefix(f'{PREFIX}fused_')}", "fused_restrict_size", name[len(PREFIX) :])
        for name, rung in LADDER.items()
        if rung.tile != TILE and not name.startswith(HALF)
    ),
    ("`fused`: both, then FP16 arithmetic", "fused_restrict_size", "half_fused_restrict_size"),
]


def _both(rows: Sequence[Row], n: int) -> list[Row]:
    """The rows of a batch in the layers' order; none where one of the layers is missing: the sums are of both."""
    its = sorted((row for row in rows if row["n"] == n), key=lambda row: row["layer"])
    return its if {row["layer"] for row in its} >= LAYERS else []


def layers(document: Document, gpu: str, accuracy: str) -> str:
    """A row per batch and layer, then both together: op times of each rung, and of the fastest rival."""
    rows = of_class(document, accuracy)
    rungs = [rung for rung in RUNGS if any(row["algorithms"].get(rung) for row in rows)]
    header = ["batch", "layer", *(f"`{rung}` us" for rung in rungs), "best peer us", "peer", "best rung's gain"]
    lines = []
    for n in sorted({row["n"] for row in rows}):
        its = sorted((row for row in rows if row["n"] == n), key=lambda row: row["layer"])
        for row in its:
            best = min((us for rung in rungs if (us := row["algorithms"].get(rung))), default=None)
            cells = [common.us(row["algorithms"].get(rung)) for rung in rungs]
            cells += [common.us(row["best_peer_us"]), f"`{row['best_peer']}`"]
            lines.append([str(n), row["layer"], *cells, common.times(speedup_of(best, row["best_peer_us"]))])
        if not _both(its, n):
            continue
        totals = [_total([row["algorithms"].get(rung) for row in its]) for rung in rungs]
        peer = _total([row["best_peer_us"] for row in its])
        best = min((us for us in totals if us), default=None)
        cells = [*map(common.us, totals), common.us(peer), ""]
        lines.append([str(n), "both", *cells, common.times(speedup_of(best, peer))])
    return common.markdown_table(header, lines) if lines else NOTHING


def totals(document: Document, rung: str) -> dict[int, float]:
    """Batch -> microseconds of all layers by a rung, in its class, where each was timed."""
    rows = of_class(document, class_of(rung))
    found = {n: _total([row["algorithms"].get(rung) for row in _both(rows, n)]) for n in {row["n"] for row in rows}}
    return {n: us for n, us in sorted(found.items()) if us}


def _batches(document: Document) -> list[int]:
    """Those at which any rung of the ladder was timed."""
    return sorted({n for rung in LADDER for n in totals(document, rung)})


def ladder(document: Document, gpu: str, accuracy: str) -> str:
    """A row per rung of the source: what it has, both layers' times at each batch, and its error."""
    batches, rows, lines = _batches(document), of_class(document, accuracy), []
    first = totals(document, f"{PREFIX}direct")
    for name, rung in LADDER.items():
        found = totals(document, name) if class_of(name) == accuracy else {}
        if not found:
            continue
        line = [f"`{name.removeprefix(PREFIX)}`", "yes" if rung.restrict else "no", "yes" if rung.size else "no"]
        line += ["constant" if rung.constant_memory else "global"]
        line += ["16x16 pixels" if rung.form == "direct" else "{}x{}".format(*rung.tile)]
        for n in batches:
            its = sorted((row for row in rows if row["n"] == n), key=lambda row: row["layer"])
            line.append(" + ".join(common.us(row["algorithms"].get(name)) for row in its) if n in found else "-")
        last = max(found)
        line.append(common.times(first[last] / found[last]) if last in first else "-")
        errors = [row["errors"][name]["l2"] for row in rows if name in row.get("errors", {})]
        lines.append([*line, common.scientific(max(errors, default=None))])
    header = ["rung", "`__restrict__`", "size constant", "filters", "tile", *(f"batch {n} us" for n in batches)]
    return common.markdown_table([*header, "over `direct`", "error"], lines) if lines else NOTHING


def step_gains(document: Document) -> dict[str, dict[int, float]]:
    """Step -> batch -> how many times as fast both layers are with it."""
    found = {}
    for step, before, after in STEPS:
        first, second = totals(document, PREFIX + before), totals(document, PREFIX + after)
        if gains := {n: first[n] / us for n, us in second.items() if n in first}:
            found[step] = gains
    return found


def fastest_rung(document: Document, n: int) -> tuple[str, float] | None:
    """The fastest of the source's rungs at a batch, and microseconds of both layers."""
    found = [(us, rung) for rung in LADDER if (us := totals(document, rung).get(n))]
    return (min(found)[1], min(found)[0]) if found else None


def steps(document: Document, gpu: str) -> str:
    """A row per step, a column per batch: times faster with it; last, the fastest rung of all over the first."""
    batches, gains = _batches(document), step_gains(document)
    lines = [[step, *(common.times(its.get(n)) for n in batches)] for step, its in gains.items()]
    first, winners = totals(document, f"{PREFIX}direct"), []
    for n in batches:
        best = fastest_rung(document, n) if n in first else None
        name, us = best or ("", None)
        winners.append(f"{common.times(first[n] / us)} `{name.removeprefix(PREFIX)}`" if us else "-")
    lines.append(["the fastest rung over `direct`", *winners])
    return common.markdown_table(["step", *(f"batch {n}" for n in batches)], lines) if gains else NOTHING


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
    "layers": ("paper_lenet5", layers),
    "ladder": ("paper_lenet5", ladder),
    "steps": ("paper_lenet5", steps),
    "network": ("paper_lenet5_network", network),
}


def said(file: File) -> str:
    """What holds of the claims: each rung is faster than the one below, and none changes the accuracy."""
    parts = []
    document = file("paper_lenet5") or {"rows": []}
    rows = of_class(document, "ieee")
    if n := max((row["n"] for row in rows if _both(rows, row["n"])), default=0):
        its = _both(rows, n)
        totals = {rung: total for rung in RUNGS if (total := _total([row["algorithms"].get(rung) for row in its]))}
        order = sorted(totals, key=lambda rung: totals[rung])
        said = ", ".join(f"`{rung}` {common.us(totals[rung])} us" for rung in order)
        if said:
            parts.append(f"at batch {n} both layers take, the fastest rung first, {said}")
        gains = {step: its[n] for step, its in step_gains(document).items() if n in its}
        if gains:
            most = max(gains, key=lambda step: gains[step])
            lost = sum(gain < 1 for gain in gains.values())
            text = f"of the source's {len(gains)} steps the one worth most there is {most}, {gains[most]:.2f} times"
            parts.append(f"{text}; {lost} cost time" if lost else text)
    network = (file("paper_lenet5_network") or {"rows": []})["rows"]
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
            text = f"FP16 arithmetic costs {percent(min(costs))} to {percent(max(costs))} of the images"
            parts.append(f"{text} (the source gains 0.02 %)")
    said = "; ".join(parts)
    return f"{said[0].upper()}{said[1:]}." if parts else NOTHING
