"""Hardware counters of the sources' kernels (benchmarks/studies/counters.py), as a table."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness.results import Document, Row
from benchmarks.reports import common
from benchmarks.reports.papers.shared import NOTHING, without_empty


def table(document: Document, gpu: str) -> str:
    """A row per layer, class, algorithm and variant; where the counters could not be read, why."""
    rows = [row for row in document["rows"] if row.get("us")]
    if not rows:
        reasons = dict.fromkeys(note for row in document["rows"] for note in row["notes"].values())
        return "; ".join(reasons) or NOTHING
    header = ["layer", "batch", "class", "algorithm", "", "kernels", "us", "memory read MB", "written MB", "L2 MB"]
    header += ["L2 hits", "L1 hits", "instructions, millions", "warps at work"]
    lines = []
    for row in rows:
        sizes = [f"{row[name] / 1e6:.1f}" for name in ("dram_read_bytes", "dram_write_bytes", "l2_bytes")]
        shares = [f"{row[name]:.0f} %" for name in ("l2_hit_percent", "l1_hit_percent")]
        line = [row["layer"], str(row["n"]), f"`{row['class']}`", f"`{row['algorithm']}`", row["variant"]]
        line += [str(row["kernels"]), common.us(row["us"]), *sizes, *shares, f"{row['instructions'] / 1e6:.2f}"]
        lines.append([*line, f"{row['warps_percent']:.0f} %"])
    return without_empty(common.markdown_table(header, lines))


def caches(rows: Sequence[Row]) -> str:
    """How the profiler ran the calls: rows that hold a call's kernels (`parts`) had them one after the other."""
    counted = [row for row in rows if row.get("us")]
    if not counted:
        return NOTHING
    if all("parts" in row for row in counted):
        return "The profiler starts every call from cold caches: what a kernel leaves in them the next one finds."
    return (
        "The profiler started every kernel from cold caches: those of a call of several kernels read from memory what "
        "one kernel, or a call outside of the profiler, finds in the L2 cache, so the two are not to be compared."
    )
