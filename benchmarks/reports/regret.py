"""The table of a regret run, for benchmarks.reports.documents."""

from __future__ import annotations

from benchmarks.harness.results import CLASSES, Document
from benchmarks.regret import contest, summary
from benchmarks.reports import common


def table(document: Document) -> str:
    """A row per class, pass, layout and split: the time of `auto` over the best of all that was timed, and how often it
    is more than 3 % slower than PyTorch's; by cost, and where it measures as PyTorch does."""
    measures = summary.is_measured(document["rows"])
    parts = {tuple(row[name] for name in summary.PARTS): None for row in document["rows"]}
    lines = []
    for part in sorted(parts, key=lambda part: (CLASSES.index(part[0]), *part[1:])):
        rows = [row for row in document["rows"] if tuple(row[name] for name in summary.PARTS) == part]
        if (its := summary.summary(rows)) is not None:
            measured = summary.summary([contest.as_measured(row) for row in rows])
            cells = summary.numbers(measured) if measures else []
            lines.append([f"`{part[0]}`", *part[1:], str(its.count), *summary.numbers(its), *cells])
    columns = ["mean", "95 %", "worst", "slower than PyTorch"]
    header = [*summary.PARTS, "problems", *columns, *(f"measured: {name}" for name in columns if measures)]
    return "\n\n".join([common.markdown_table(header, lines), *common.other_commits(document, document["rows"])])
