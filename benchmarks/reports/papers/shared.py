"""What the drawings of the five sources share."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.harness.results import Document, Row
from benchmarks.layers.sets import FFMA_FLOPS, bandwidth_of

NOTHING = "(not measured)"
File = Callable[[str], Document | None]


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
