"""What the drawings of the five sources share."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from benchmarks.harness.results import Document, Row
from benchmarks.layers.sets import FFMA_FLOPS, bandwidth_of
from benchmarks.peers import REFUSED
from benchmarks.reports import common

NOTHING = "(not measured)"
File = Callable[[str], Document | None]


def _measured(document: Document | None) -> dict[str, set[tuple[object, ...]]]:
    """Of what a file holds numbers, by part: layer or network, batch, class, layout, form. Of a layer's algorithms and
    maps one is enough: which there are is another build's matter."""
    found: dict[str, set[tuple[object, ...]]] = {}
    for row in (document or {"rows": []})["rows"]:
        if row.get("us") or row.get("largest") is not None or (row.get("kernels") and "variant" not in row):
            key = tuple(row.get(name) for name in ("layer", "network", "n", "batch", "class", "layout", "mode"))
            found.setdefault(row.get("part", ""), set()).add(key)
    return found


def chosen(files: Mapping[str, File]) -> dict[str, File]:
    """GPU -> what is drawn of its files: an experiment, a file or a part of one, is of one GPU, the one that has
    measured most of it, and of equals the first. So the first GPU's is drawn when it is complete, and until then the
    next one's, as a whole: no table mixes two GPUs, or shows a half where there is a whole."""

    def view(gpu: str) -> File:
        @cache  # several sentences of a region are of one file
        def file(suite: str) -> Document | None:
            document = files[gpu](suite)
            if document is None or len(files) == 1:
                return document
            held = {other: _measured(its(suite)) for other, its in files.items()}
            most = {part: max(held, key=lambda other: len(held[other].get(part, ()))) for part in
                    {part for its in held.values() for part in its}}  # fmt: skip
            rows = [row for row in document["rows"] if most.get(row.get("part", ""), gpu) == gpu]
            return {**document, "rows": rows}

        return file

    return {gpu: view(gpu) for gpu in files}


def together(files: Mapping[str, File]) -> tuple[File, list[str]]:
    """For what several experiments say: a file with the rows of all, and GPUs, filled with those whose rows it gave.
    files: of `chosen`."""
    gave: list[str] = []

    def file(suite: str) -> Document | None:
        found = {gpu: document for gpu, its in files.items() if (document := its(suite)) is not None}
        filled = {gpu: document for gpu, document in found.items() if document["rows"]} or found
        gave.extend(gpu for gpu, document in filled.items() if document["rows"] and gpu not in gave)
        rows = [row for document in filled.values() for row in document["rows"]]
        return {**next(iter(filled.values())), "rows": rows} if filled else None

    return file, gave


def first(texts: Iterable[str]) -> str:
    """The first that says something; NOTHING if none does."""
    return next((text for text in texts if text != NOTHING), NOTHING)


@dataclass(frozen=True)
class Wins:
    """Of `count` comparisons: how many are won, and by how much, in the mean and at most."""

    count: int
    won: int
    mean: float | None
    most: float | None

    @property
    def share(self) -> float:
        return self.won / self.count if self.count else 0.0

    def __str__(self) -> str:
        if not self.count:
            return "-"
        if self.mean is None or self.most is None:
            return "0 %"
        return f"{self.share:.0%}, {self.mean:.2f}x, {self.most:.2f}x".replace("%", " %")


def wins(speedups: Iterable[float | None]) -> Wins:
    """None: a comparison that is lost without a time, by far. The mean is of those that are won, as in the source."""
    found = list(speedups)
    above = [value for value in found if value is not None and value > 1]
    return Wins(len(found), len(above), statistics.mean(above) if above else None, max(above, default=None))


def of_class(document: Document, accuracy: str, layout: str | None = None) -> list[Row]:
    rows = [row for row in document["rows"] if row["class"] == accuracy]
    return [row for row in rows if layout is None or row["layout"] == layout]


def rates(gpu: str) -> str:
    """What a model divides by."""
    memory, arithmetic = bandwidth_of(gpu) / 1e12, FFMA_FLOPS / 1e12
    return f"Memory reads {memory:.1f} TB/s (measured), FP32 arithmetic has {arithmetic:.1f} TFLOP/s."


def classes_of(document: Document, order: Sequence[str]) -> list[str]:
    """The classes of the rows."""
    return [name for name in order if any(row["class"] == name for row in document["rows"])]


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.1f} %"


def span(values: Iterable[float], form: str = ".2f", unit: str = "") -> str:
    """The least and the largest, or the one that both read as; NOTHING without any."""
    found = list(values)
    ends = dict.fromkeys(f"{value:{form}}" for value in (min(found), max(found))) if found else ()
    return f"{' to '.join(ends)}{unit}" if ends else NOTHING


def rows_in(file: File, suite: str) -> list[Row]:
    """Of a file; none if there is no file."""
    rows: list[Row] = (file(suite) or {"rows": []})["rows"]
    return rows


def bytes_of(row: Row, digits: int = 1, algorithm: str | None = None) -> str:
    """Workspace and packed filters of the row's algorithm, or of another that it has them of, in MiB."""
    held = row.get("workspace_bytes"), row.get("packed_bytes")
    if algorithm not in (None, row["algorithm"]):
        held = row.get("bytes", {}).get(algorithm, (None, None))
    return ", ".join(common.mib(value, digits) for value in held)


def packing_us(row: Row, algorithm: str) -> float | None:
    """Of an algorithm whose filter is packed in every call; None where that was not timed."""
    us: float | None = row.get("with_packing", {}).get(algorithm)
    return row.get("us_with_packing") if us is None and algorithm == row["algorithm"] else us


def peer_us(row: Row, *prefixes: str) -> float | None:
    """The fastest of the rivals whose names begin so."""
    refused = {name for name, note in row.get("notes", {}).items() if note.startswith(REFUSED)}
    times = (us for name, us in row["peers"].items() if us and name.startswith(prefixes) and name not in refused)
    return min(times, default=None)


BESIDE = ["`auto` us", "cuDNN us", "PyTorch us"]


def beside(row: Row) -> list[str]:
    """What `auto` takes, by which algorithm, where it was timed; cuDNN's best; PyTorch's best."""
    us = row["us"] if row["algorithm"] == row.get("auto") else None
    named = f"{common.us(us)} `{row['algorithm']}`" if us else "-"
    return [named, *(common.us(peer_us(row, prefix)) for prefix in ("cudnn_", "torch_"))]


def short_name(kernel: str) -> str:
    """A kernel's name without what it returns, its arguments, its template's and our namespaces."""
    name = kernel.removeprefix("void ").replace("(anonymous namespace)::", "")
    if library := re.match(r"cutlass::Kernel2<(\w+)>", name):
        return library[1]
    kept, depth = "", 0
    for letter in name:
        depth += (letter in "<{") - (letter in ">}")
        if letter == "(" and not depth:
            break
        kept += letter if not depth and letter not in ">}" else ""
    for prefix in ("fastconv::", "algos::", "studies::", "ladder::"):
        kept = kept.removeprefix(prefix)
    return kept.partition("_warpsize")[0]


def without_empty(table: str) -> str:
    """A Markdown table without the columns, but the first, in which every cell is `-` or empty."""
    lines = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in table.splitlines()]
    header, *rows = lines[:1] + lines[2:]
    kept = [at for at in range(len(header)) if at == 0 or any(row[at].strip() not in ("-", "") for row in rows)]
    return common.markdown_table([header[at] for at in kept], [[row[at] for at in kept] for row in rows])
