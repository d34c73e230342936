"""What `fastconv.compile` did to the convolutions of a model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from fastconv.rewrites.convolution import Taken
from fastconv.swap import plain_table

__all__ = ["CompileReport", "CompileRow"]


@dataclass(frozen=True)
class CompileRow:
    """Convolutions of one kind: the same weight shape, the same things fused with them, the same outcome."""

    names: tuple[str, ...]  # the modules that called them, in the order of the graph
    shape: str  # of the weight, K x C/groups x R x S
    stride: str
    groups: int
    dtype: str
    device: str
    fused: str  # "conv", "conv+bn+residual+relu", ..., or "gradients" of one
    algorithm: str  # what the planner takes at the sizes of the example; empty for gradients, and where PyTorch's stays
    reason_code: str = ""  # why PyTorch's stays, or why what follows stays apart: for programs
    reason: str = ""  # for people

    @property
    def count(self) -> int:
        return len(self.names)


class CompileReport:
    """What became of each convolution, by the graphs that were compiled so far: it grows with each one."""

    def __init__(self) -> None:
        self.graphs: list[list[Taken] | None] = []  # None: its code came from Inductor's cache, and nothing was asked
        self.following = 0  # graphs of inference that fold and pack their weights in every call

    @property
    def rows(self) -> list[CompileRow]:
        """Convolutions of one kind are one row; one that was compiled for two sizes counts twice."""
        groups: dict[tuple[Any, ...], list[str]] = {}
        for taken in (taken for graph in self.graphs for taken in graph or ()):
            key = (
                taken.shape, taken.stride, taken.groups, taken.dtype, taken.device, "+".join(taken.parts),
                taken.algorithm, *taken.obstacle,
            )  # fmt: skip
            groups.setdefault(key, []).append(taken.name)
        return [CompileRow(tuple(names), *key) for key, names in groups.items()]

    @property
    def total(self) -> int:
        """Convolutions in the graphs, gradients apart."""
        return _count(row for row in self.rows if row.fused != "gradients")

    @property
    def ours(self) -> int:
        """How many of them are fastconv's."""
        return _count(row for row in self.rows if row.algorithm not in ("", "torch"))

    @property
    def fused(self) -> int:
        """How many of them compute more than themselves."""
        return _count(row for row in self.rows if "+" in row.fused)

    @property
    def cached(self) -> int:
        """Graphs whose code came from Inductor's cache: their convolutions are not in the rows."""
        return sum(graph is None for graph in self.graphs)

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """The report as JSON text, also written to `path` if one is given."""
        document: dict[str, Any] = {"schema": 1, "graphs": len(self.graphs), "cached": self.cached}
        document |= {"total": self.total, "ours": self.ours, "fused": self.fused}
        text = json.dumps(document | {"rows": [asdict(row) | {"count": row.count} for row in self.rows]}, indent=1)
        if path is not None:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text + "\n")
        return text

    def __str__(self) -> str:
        if not self.graphs:
            return "fastconv: nothing compiled yet; call the model first"
        title = f"fastconv: {self.ours} of {self.total} convolutions, {self.fused} fused with what follows them"
        title += f", in {len(self.graphs)} graph{'s' if len(self.graphs) > 1 else ''}"
        if self.cached:
            title += f"; {self.cached} of them from Inductor's cache, without rows"
        if self.following and self.ours:
            title += "; weights that may change are folded and packed in every call: frozen=True does it once"
        cells = []
        for row in self.rows:
            name = row.names[0] + (f" and {row.count - 1} more" if row.count > 1 else "")
            reason = f"{row.reason} [{row.reason_code}]" if row.reason_code else ""
            cells.append(
                [str(row.count), name, row.shape, row.stride, str(row.groups), row.dtype, row.fused, row.algorithm,
                 reason]
            )  # fmt: skip
        headers = ["count", "layers", "weight", "stride", "groups", "dtype", "fused", "algorithm", "why not more"]
        return "\n".join([title, *plain_table(headers, cells)])

    def __repr__(self) -> str:
        return f"CompileReport(ours={self.ours}, fused={self.fused}, total={self.total}, cached={self.cached})"


def _count(rows: Iterable[CompileRow]) -> int:
    return sum(row.count for row in rows)
