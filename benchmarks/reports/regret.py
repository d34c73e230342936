"""The table of a regret run, for benchmarks.reports.documents."""

from __future__ import annotations

from benchmarks.harness.results import CLASSES, Document
from benchmarks.regret import summary
from benchmarks.reports import common


def table(document: Document) -> str:
    """A row per class, pass, layout and split: the time of `auto` over the best of all that was timed, and how often it
    is more than 3 % slower than PyTorch's."""
    parts = {tuple(row[name] for name in summary.PARTS): None for row in document["rows"]}
    lines = []
    for part in sorted(parts, key=lambda part: (CLASSES.index(part[0]), *part[1:])):
        rows = [row for row in document["rows"] if tuple(row[name] for name in summary.PARTS) == part]
        if (its := summary.summary(rows)) is not None:
            numbers = [f"{its.mean:.3f}", f"{its.percentile_95:.2f}", f"{its.worst:.2f}"]
            lines.append([f"`{part[0]}`", *part[1:], str(its.count), *numbers, f"{100 * its.slower:.1f} %"])
    header = [*summary.PARTS, "problems", "mean", "95 %", "worst", "slower than PyTorch"]
    return "\n\n".join([common.markdown_table(header, lines), *common.other_commits(document, document["rows"])])
