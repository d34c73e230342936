"""What all reports share: tables in Markdown, how numbers read, colours, and of which commits the rows are."""

from __future__ import annotations

import collections
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.harness.results import Document, Row, slug
from benchmarks.layers.sets import floor_us
from benchmarks.layers.suite import geometric_mean
from fastconv.models.layers import Layer

# Colours mean the same in all figures: what it is about, or a win, is blue; a loss is red; the rest of ours light blue;
# others' grey. Where a colour only tells lines or classes apart it is one of matplotlib's, in its order.
OURS, ALSO_OURS, LOSS, NEUTRAL = "#2a6f97", "#9cc5dc", "#c44536", "#8d99ae"
EM = 0.6  # the mean width of a letter of a figure's font, in its size, rounded up


def win_or_loss(speedup: float) -> str:
    """The colour of a bar."""
    return OURS if speedup >= 1 else LOSS


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all but the first column aligned to the right."""
    lines = ["| " + " | ".join(header) + " |", "|---|" + "---:|" * (len(header) - 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def layer_of(row: Row) -> Layer:
    return Layer(**{name: row[name] for name in Layer.__dataclass_fields__})


def floor_of(row: Row, document: Document) -> float | None:
    """On the GPU of the document, whatever was assumed when the row was measured."""
    return floor_us(layer_of(row), row["n"], row["class"], slug(document["gpu"])) if document["cuda"] else None


def us(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def ms(us: float | None) -> str:
    return "-" if us is None else f"{us / 1e3:.2f}"


def mib(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value / 2**20:.{digits}f}"


def times(value: float | None) -> str:
    """A ratio to the rival; below one it is a loss, and in bold, also where it reads as 1.00."""
    if value is None:
        return "-"
    return f"{value:.2f}x" if value >= 1 else f"**{value:.2f}x**"


def scientific(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def mean(values: Iterable[float | None]) -> float | None:
    return geometric_mean([value for value in values if value])


def commits_of(document: Document, rows: Sequence[Row] | None = None) -> list[str]:
    """The commits of the rows, the document's own first, each by twelve digits."""
    found = dict.fromkeys(str(row.get("commit") or document["commit"])[:12] for row in rows or document["rows"])
    own = document["commit"][:12]
    return sorted(found, key=lambda commit: commit != own)


def other_commits(document: Document, rows: Sequence[Row]) -> list[str]:
    """A loud sentence where the rows are not all of one commit; the files say which row is of which."""
    counts = collections.Counter(str(row.get("commit") or document["commit"])[:12] for row in rows)
    if len(counts) < 2:
        return [] if document["commit"][:12] in counts or not counts else [f"Of commit {next(iter(counts))}."]
    said = ", ".join(f"{count} rows of {commit}" for commit, count in counts.most_common())
    return [f"**Of several commits, not to be compared row by row: {said}.**"]


def mixed(commits: dict[str, list[str]]) -> list[str]:
    """The same for several files. commits: file -> those of its rows."""
    found: dict[str, list[str]] = {}
    for suite, its in commits.items():
        for commit in its:
            found.setdefault(commit, []).append(suite)
    if len(found) < 2:
        return [f"All of commit {commit}." for commit in found]
    said = "; ".join(f"{commit}: {', '.join(suites)}" for commit, suites in found.items())
    return [f"**Of several commits: {said}.**"]


def machine_line(document: Document) -> str:
    """One line: what the file was measured on."""
    parts = [document["gpu"], f"driver {document['driver']}" if document["driver"] else ""]
    parts += [f"CUDA {document['cuda']}" if document["cuda"] else "", f"torch {document['torch']}"]
    parts += [f"cuDNN {document['cudnn']}" if document["cudnn"] else "", f"commit {document['commit'][:12]}"]
    if not document["cuda"]:  # a file of the CPU
        parts[1:1] = [f"{document['threads']} threads", document["instruction_set"].upper()]
    return ", ".join(part for part in [*parts, document["date"][:10]] if part) + "."


def title(figure: Any, message: str, document: Document, size: float = 8.0) -> None:
    """The message of a figure and its GPU, at the left, in as many lines as its width asks for."""
    letters = int(figure.get_figwidth() * 72 / (size * EM))
    lines = textwrap.wrap(f"{message} ({document['gpu']})", letters)
    figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=size)
