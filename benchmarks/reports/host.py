"""The table of the host's times, for benchmarks.reports.documents."""

from __future__ import annotations

from benchmarks.harness.results import CLASSES, Document, Row
from benchmarks.reports import common
from benchmarks.reports.networks import TITLES, speedup_of

CALLS = ("no_grad", "forward", "forward_backward", "compile")
THREADS = ("threads_1", "threads_2", "threads_8")
# What a sentence has of a layer's rows: (form, call) -> in words.
SAID = {
    ("swapped", "no_grad"): "no gradients",
    ("frozen", "no_grad"): "frozen",
    ("swapped", "forward"): "recording them",
    ("swapped", "forward_backward"): "forward and backward",
    ("swapped", "compile"): "compiled",
    ("functional", "no_grad"): "`fastconv.conv2d`",
}


def table(document: Document) -> str:
    """A row per layer, class and form: microseconds of a call, ours and, in brackets, PyTorch's, in bold where ours
    takes longer; of a call of each of several threads, if any was timed; what the GPU has to do for a call without
    gradients; and an operator that does nothing."""
    calls = [*CALLS, *(call for call in THREADS if any(row["call"] == call for row in document["rows"]))]
    found: dict[tuple[str, str, str], dict[str, Row]] = {}
    for cls in CLASSES:
        for row in document["rows"]:
            if row["class"] == cls:
                found.setdefault((row["layer"], cls, row["form"]), {})[row["call"]] = row
    header = ["layer", "class", "ours", "beside it", *(f"`{call}`" for call in calls)]
    header += ["kernels (`no_grad`)", "empty operator"]
    lines = []
    for (layer, cls, form), its in found.items():
        first = next(iter(its.values()))
        cells = [_pair(its.get(call), "us", "torch_us") for call in calls]
        cells.append(_pair(its.get("no_grad"), "kernels_us", "torch_kernels_us"))
        line = [TITLES.get(layer, layer), f"`{cls}`", form, first.get("peer", "-"), *cells]
        lines.append([*line, common.us(first["empty_operator_us"])])
    drawn = common.markdown_table(header, lines)
    return "\n\n".join([drawn, *common.other_commits(document, document["rows"])])


def sentence(document: Document, layer: str, accuracy: str) -> str:
    """Microseconds of a layer's calls, ours and, in brackets, PyTorch's; "" if none was measured."""
    rows = [row for row in document["rows"] if (row["layer"], row["class"]) == (layer, accuracy)]
    its = {(row["form"], row["call"]): row for row in rows}
    parts = []
    for key, words in SAID.items():
        if (row := its.get(key)) and row["us"] and row["torch_us"]:
            parts.append(f"{words} {row['us']:.0f} ({row['torch_us']:.0f})")
    return ", ".join(parts)


def _pair(row: Row | None, ours: str, theirs: str) -> str:
    if row is None or (row.get(ours) is None and row.get(theirs) is None):
        return "-"
    text = f"{common.us(row.get(ours))} ({common.us(row.get(theirs))})"
    ratio = speedup_of(row.get(ours), row.get(theirs))
    return f"**{text}**" if ratio and ratio < 1 else text
