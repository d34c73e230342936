"""Tables of training steps, for benchmarks.reports.documents."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness.results import TRAINING_CLASSES, Document, Row
from benchmarks.reports import common
from benchmarks.reports.networks import TITLES, speedup_of

HOST_BOUND = 1.1  # a step longer than its kernels by more than this is bound by the host
GROUPS = ("convolution", "conversion", "norm", "elementwise", "pool", "linear", "optimizer", "other")


def ordered(document: Document, accuracy: str | None = None) -> list[Row]:
    """By class, else as the file has them."""
    classes = [accuracy] if accuracy else TRAINING_CLASSES
    return [row for cls in classes for row in document["rows"] if row["class"] == cls]


def table(document: Document, accuracy: str | None = None) -> str:
    """A row per network, class and mode: the step and its kernels on both sides, memory, errors. A step that takes more
    than a tenth longer than its kernels is marked: the host is what it waits for."""
    rows = ordered(document, accuracy)
    header = ["network", "batch", "class", "mode", "ours ms", "its kernels ms", "PyTorch ms", "its form"]
    header += [
        "its kernels ms",
        "speedup",
        "over TF32",
        "MiB",
        "PyTorch's",
        "loss error",
        "gradient error",
        "PyTorch's",
    ]
    lines = []
    for row in rows:
        us, peer_us = row["us"], row["best_peer_us"]
        tf32 = speedup_of(us, row.get("best_tf32_peer_us"))
        line = [name_of(row), str(row["batch"]), f"`{row['class']}`", row["mode"]]
        line += [_step(us, row["kernels_us"]), common.ms(row["kernels_us"]), _step(peer_us, row["peer_kernels_us"])]
        line += [f"`{row['best_peer']}`" if row["best_peer"] else "-", common.ms(row["peer_kernels_us"])]
        line += [common.times(speedup_of(us, peer_us)), common.times(tf32)]
        line += [common.mib(row["peak_bytes"]), common.mib(row["peer_peak_bytes"])]
        line += [common.scientific(row.get(f"{key}_error")) for key in ("loss", "gradient", "peer_gradient")]
        lines.append(line)
    below = ["(h): more than a tenth longer than its kernels."] if any("(h)" in "".join(line) for line in lines) else []
    return "\n\n".join([common.markdown_table(header, lines), *below, *common.other_commits(document, rows)])


def groups_table(document: Document, accuracy: str | None = None) -> str:
    """Milliseconds of a step's kernels by group, ours and, in brackets, the best peer's."""
    rows = ordered(document, accuracy)
    lines = []
    for row in rows:
        theirs = row.get("peer_groups", {}).get(row["best_peer"])
        cells = [_pair(row["groups"], theirs, [group]) for group in GROUPS]
        cells.append(_pair(row["groups"], theirs, GROUPS))
        lines.append([name_of(row), f"`{row['class']}`", row["mode"], *cells])
    drawn = common.markdown_table(["network", "class", "mode", *GROUPS, "all"], lines)
    return "\n\n".join([drawn, *common.other_commits(document, rows)])


def name_of(row: Row) -> str:
    name: str = row["network"]
    return TITLES.get(name, name)


def _step(us: float | None, kernels_us: float | None) -> str:
    return common.ms(us) + (" (h)" if us and kernels_us and us > HOST_BOUND * kernels_us else "")


def _pair(ours: dict[str, float] | None, theirs: dict[str, float] | None, names: Sequence[str]) -> str:
    cells = [None if its is None else sum(its.get(name, 0.0) for name in names) for its in (ours, theirs)]
    return f"{common.ms(cells[0])} ({common.ms(cells[1])})"
