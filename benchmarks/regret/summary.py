"""What the rows of a regret run say, per class, pass, layout and split."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from rich.table import Table

from benchmarks.harness import results
from benchmarks.regret import contest

PARTS = ("class", "pass", "layout", "split")


@dataclass(frozen=True)
class Summary:
    """Of `count` rows: the regret's geometric mean, 95th percentile and worst; `slower`: share of those with a time of
    PyTorch's where `auto` takes more than 1.03 of it."""

    count: int
    mean: float
    percentile_95: float
    worst: float
    slower: float


def summary(rows: Sequence[results.Row]) -> Summary | None:
    """None if no row has a regret."""
    regrets = [regret for row in rows if (regret := contest.regret(row)) is not None]
    if not regrets:
        return None
    compared = [row for row in rows if contest.against_torch(row) is not None]
    return Summary(
        len(regrets),
        math.exp(sum(map(math.log, regrets)) / len(regrets)),
        float(numpy.quantile(regrets, 0.95)),
        max(regrets),
        sum(map(contest.is_slower, compared)) / max(1, len(compared)),
    )


def table(rows: Sequence[results.Row], title: str = "") -> Table:
    """A line per class, pass, layout and split, and one of all. title: what comes before the table's own."""
    own = "time of auto over the best of ours and PyTorch's"
    found = Table(*PARTS, title=f"{title}: {own}" if title else own)
    columns = ("mean", "95 %", "worst", "> 3 % slower than PyTorch")
    for column in ("problems", *columns, *(f"measured: {column}" for column in columns if is_measured(rows))):
        found.add_column(column, justify="right")
    parts = sorted({tuple(row[name] for name in PARTS) for row in rows})
    for part in parts:
        _line(found, part, [row for row in rows if tuple(row[name] for name in PARTS) == part])
    if len(parts) > 1:
        _line(found, ("all", "", "", ""), rows)
    return found


def _line(found: Table, part: tuple[str, ...], rows: Sequence[results.Row]) -> None:
    its, measured = summary(rows), summary([contest.as_measured(row) for row in rows])
    cells = numbers(measured) if len(found.columns) > len(PARTS) + 5 else []
    found.add_row(*part, str(its.count if its else 0), *numbers(its), *cells)


def numbers(its: Summary | None) -> list[str]:
    """Its cells: mean, 95th percentile, worst, slower."""
    if its is None:
        return ["-"] * 4
    return [f"{its.mean:.3f}", f"{its.percentile_95:.2f}", f"{its.worst:.2f}", f"{100 * its.slower:.1f} %"]


def is_measured(rows: Sequence[results.Row]) -> bool:
    """Whether they say what `auto` takes where it measures."""
    return any(row.get("measured_us") for row in rows)
