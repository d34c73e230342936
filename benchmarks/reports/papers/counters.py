"""Hardware counters of the sources' kernels (benchmarks/studies/counters.py), as a table."""

from __future__ import annotations

from benchmarks.harness.results import Document
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
