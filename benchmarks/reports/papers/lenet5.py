"""The LeNet-5 ladder: microseconds of the two layers by rung and batch, and what each rung classifies rightly."""

from __future__ import annotations

from benchmarks.harness.results import CLASSES, Document
from benchmarks.papers.lenet5 import RUNGS
from benchmarks.reports import common
from benchmarks.reports.networks import speedup_of
from benchmarks.reports.papers.shared import NOTHING, File, classes_of, of_class, percent

NAME = "lenet5"


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
        totals = [_total([row["algorithms"].get(rung) for row in its]) for rung in rungs]
        peer = _total([row["best_peer_us"] for row in its])
        best = min((us for us in totals if us), default=None)
        cells = [*map(common.us, totals), common.us(peer), ""]
        lines.append([str(n), "both", *cells, common.times(speedup_of(best, peer))])
    return common.markdown_table(header, lines) if lines else NOTHING


def _total(times: list[float | None]) -> float | None:
    known = [us for us in times if us is not None]
    return sum(known) if len(known) == len(times) else None


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


TABLES = {"layers": ("paper_lenet5", layers), "network": ("paper_lenet5_network", network)}


def said(file: File) -> str:
    """What holds of the claims: each rung is faster than the one below, and none changes the accuracy."""
    parts = []
    document = file("paper_lenet5") or {"rows": []}
    rows = of_class(document, "ieee")
    if rows:
        n = max(row["n"] for row in rows)
        its = [row for row in rows if row["n"] == n]
        totals = {rung: total for rung in RUNGS if (total := _total([row["algorithms"].get(rung) for row in its]))}
        order = sorted(totals, key=lambda rung: totals[rung])
        said = ", ".join(f"`{rung}` {common.us(totals[rung])} us" for rung in order)
        if said:
            parts.append(f"at batch {n} both layers take, the fastest rung first, {said}")
    network = (file("paper_lenet5_network") or {"rows": []})["rows"]
    if network:
        changed = [row for row in network if row["accuracy"] != row["torch_accuracy"]]
        which = ", ".join(f"`{row['mode']}` in `{row['class']}`" for row in changed)
        same = len(network) - len(changed)
        text = (
            f"{same} of {len(network)} pairs of rung and class classify exactly as many test images rightly as PyTorch"
        )
        parts.append(text + (f" (not {which})" if changed else ""))
    said = "; ".join(parts)
    return f"{said[0].upper()}{said[1:]}." if parts else NOTHING
