"""The table of two builds, for benchmarks.reports.documents."""

from __future__ import annotations

from benchmarks.harness.results import Document
from benchmarks.reports import common
from benchmarks.studies import builds

SLOWER = 0.97  # old over new: below it a layer is named


def table(document: Document) -> str:
    """A row per class and batch: an older build's time over this one's, and the layers that became slower."""
    lines = []
    for its in builds.summary(document):
        slower = ", ".join(f"{layer} {ratio:.2f}" for ratio, layer in its.ratios if ratio < SLOWER)
        lines.append([f"`{its.accuracy}`", str(its.n), f"{its.mean:.3f}", f"{its.ratios[-1][0]:.2f}", slower or "-"])
        lines[-1].append(f"{its.same_bits} of {len(its.ratios)}")
    header = ["class", "batch", "old over new", "most", f"below {SLOWER}", "same bits"]
    said = f"Old: commit {document['old_commit'][:12]}. {common.machine_line(document)}"
    return "\n\n".join([common.markdown_table(header, lines), said])
