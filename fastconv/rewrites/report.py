"""What became of the convolutions of a model that `compile`, `export` or `fuse` has rewritten."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TypeVar

from fastconv.reports import by, json_text, plain_table
from fastconv.rewrites.convolution import Concatenation, GroupNorm, Left, Pool, Record, Taken, Upsampling

__all__ = ["RewriteReport", "RewriteRow"]

_Kind = TypeVar("_Kind", Taken, Left, Pool, Upsampling, GroupNorm, Concatenation)

# Why a concatenation along channels was left, by its code.
_LEFT_CONCATENATIONS = {
    "alignment": "their ranges do not begin at multiples of 16 bytes",
    "dtype": "their values differ in dtype",
    "in_place": "an operation in place writes over them, or over what is in them",
    "layout": "they are not in channels_last",
    "producers": "nothing in them is computed by kernels that write a range",
    "readers": "those who read them read no range, or they are returned",
    "sizes": "a size is dynamic, or zero",
    "twice": "a value stands in them twice",
}


@dataclass(frozen=True)
class RewriteRow:
    """Convolutions of one kind: the same weight and input shapes, the same things fused with them, the same outcome."""

    names: tuple[str, ...]  # the modules that called them, in the order of the model
    shape: str  # of the weight, K x C/groups x R x S
    stride: str
    groups: int
    dtype: str
    device: str
    fused: str  # "conv", "conv+bn+residual+relu", "bn+relu+conv+cat" (it writes into a concatenation), ..., or
    # "gradients" of one; empty: `fuse` left PyTorch's module
    algorithm: str  # the planner's for the example, or what ran last; empty where PyTorch's stays; of gradients
    # "input: phases direct, weight: torch" (`fastconv.selection` explains the names)
    reason_code: str  # why PyTorch's stays, or why what follows stays apart: for programs
    reason: str  # for people
    last_input_shape: tuple[int, ...] | None  # of the example, or of the most recent call; None if nothing ran yet
    us: float | None  # what the planner expects each to take for that input
    epilogue_us: float  # of that, for what is computed with the convolution

    @property
    def name(self) -> str:
        """The first of the names."""
        return self.names[0]

    @property
    def count(self) -> int:
        return len(self.names)

    @property
    def is_ours(self) -> bool:
        return self.algorithm not in ("", "torch")


class RewriteReport:
    """What became of each convolution, by the graphs that were rewritten so far: `compile`'s grows with each one; that
    of `fuse`, whose model is one graph, has what ran until it was asked for."""

    def __init__(self, graphs: Iterable[list[Record] | None] = ()) -> None:
        self.graphs = list(graphs)  # None: its code came from Inductor's cache, and nothing was asked
        self.following = 0  # graphs of inference that fold and pack their weights in every call
        self.advice = ""  # of `fuse`: what channels_last is expected to spare the layers that were called in NCHW

    def _records(self, kind: type[_Kind]) -> list[_Kind]:
        return [record for graph in self.graphs for record in graph or () if isinstance(record, kind)]

    @property
    def rows(self) -> list[RewriteRow]:
        """Convolutions of one kind are one row; one that was compiled for two sizes, or is used in two ways, counts
        twice."""
        groups: dict[RewriteRow, list[str]] = {}
        for taken in self._records(Taken):
            kind = RewriteRow(
                (), taken.shape, taken.stride, taken.groups, taken.dtype, taken.device, "+".join(taken.parts),
                taken.algorithm, *taken.obstacle, taken.input_shape, taken.us, taken.epilogue_us,
            )  # fmt: skip
            groups.setdefault(kind, []).append(taken.name)
        return [RewriteRow(tuple(names), *list(vars(kind).values())[1:]) for kind, names in groups.items()]

    @property
    def total(self) -> int:
        """Convolutions in the graphs, gradients apart."""
        return sum(row.count for row in self.rows if row.fused != "gradients")

    @property
    def ours(self) -> int:
        """How many of them are fastconv's."""
        return sum(row.count for row in self.rows if row.is_ours and row.fused != "gradients")

    @property
    def fused(self) -> int:
        """How many of them compute more than themselves."""
        return sum(row.count for row in self.rows if "+" in row.fused)

    @property
    def left(self) -> dict[str, dict[str, int]]:
        """How many of each kind of operator that convolutions take in ("batch norm", "sum", ...) were left apart, by
        the reason's code: those of the rows, and "alone" where no convolution of fastconv's stands before it that still
        has room for it. (A backward pass has sums, too.)"""
        counts: dict[str, dict[str, int]] = {}
        for left in self._records(Left):
            of_code = counts.setdefault(left.code, {})
            of_code[left.what] = of_code.get(left.what, 0) + 1
        return counts

    @property
    def packing(self) -> int:
        """How many of fastconv's convolutions pack a frozen weight in every call, as their sizes are dynamic."""
        return sum(taken.packs for taken in self._records(Taken))

    @property
    def pools(self) -> int:
        """How many max-pools that no convolution took in are `fastconv.nn.MaxPool2d`, a kernel of fastconv's on a GPU:
        `fuse` puts it there. They are not among those that are `left`."""
        return len(self._records(Pool))

    @property
    def upsamplings(self) -> int:
        """How many nearest-neighbour upsamplings by integers are `fastconv.nn.Upsample`, a kernel of fastconv's on a
        GPU in channels_last: `fuse` puts it there."""
        return len(self._records(Upsampling))

    @property
    def group_norms(self) -> int:
        """How many group norms, with ReLU, ReLU6 or SiLU behind them, are kernels of fastconv's: `compile` puts them
        there for inputs in channels_last on a GPU."""
        return len(self._records(GroupNorm))

    @property
    def concatenations(self) -> dict[str, int]:
        """How many concatenations along channels there are, by the code of what kept each one from vanishing: those of
        the empty code are ranges of one tensor. Empty where nothing is frozen; of `fuse` those of the latest call."""
        counts: dict[str, int] = {}
        for each in self._records(Concatenation):
            counts[each.code] = counts.get(each.code, 0) + 1
        return counts

    @property
    def cached(self) -> int:
        """Graphs whose code came from Inductor's cache: their convolutions are not in the rows."""
        return sum(graph is None for graph in self.graphs)

    @property
    def expected_us(self) -> dict[str, float]:
        """The planner's estimate by part, for the input shapes of the rows: `convolutions` of fastconv's, the
        `epilogues` in them, `pytorch` (its convolutions, with what a row has fused with them). What stands between
        convolutions, and gradients, are in none."""
        parts = {"convolutions": 0.0, "epilogues": 0.0, "pytorch": 0.0}
        for row in self.rows:
            us, epilogue = row.count * (row.us or 0.0), row.count * row.epilogue_us
            if row.is_ours:
                parts["convolutions"] += us - epilogue
                parts["epilogues"] += epilogue
            else:
                parts["pytorch"] += us
        return parts

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """The report as JSON text, also written to `path` if one is given."""
        document = {
            "graphs": len(self.graphs), "cached": self.cached, "total": self.total, "ours": self.ours,
            "fused": self.fused, "expected_us": self.expected_us, "advice": self.advice,
            "left": self.left, "packing": self.packing,
            "pools": self.pools, "upsamplings": self.upsamplings, "group_norms": self.group_norms,
            "concatenations": self.concatenations,
            "rows": [asdict(row) | {"count": row.count} for row in self.rows],
        }  # fmt: skip
        return json_text(document, path)

    def __str__(self) -> str:
        if not self.graphs:
            return "fastconv: nothing compiled yet; call the model first"
        lines = [f"fastconv: {self.ours} of {self.total} convolutions, {self.fused} fused with what follows them"]
        if len(self.graphs) > 1:
            lines[0] += f", in {len(self.graphs)} graphs"
        if self.cached:
            lines[0] += f"; {self.cached} from Inductor's cache, without rows"
        if self.following and self.ours:
            lines.append("weights that may change are folded and packed in every call: frozen=True does it once")
        if self.packing:
            lines.append(f"{self.packing} frozen weights packed in every call: sizes are dynamic")
        if any(row.us for row in self.rows):
            us = self.expected_us
            ours = f"{us['convolutions']:.0f} us in fastconv's convolutions, {us['epilogues']:.0f} us in what is fused"
            lines.append(f"expected: {ours} with them, {us['pytorch']:.0f} us in PyTorch's")
        if self.advice:
            lines.append(self.advice)
        for code, kinds in self.left.items():
            lines.append(f"left apart [{code}]: {', '.join(f'{count} {what}' for what, count in kinds.items())}")
        if self.pools:
            lines.append(f"max-pools that stand alone: {self.pools} ours, on a GPU")
        if self.upsamplings:
            lines.append(f"upsamplings by integers: {self.upsamplings} ours, on a GPU in channels_last")
        if self.group_norms:
            lines.append(f"group norms: {self.group_norms} ours")
        for code, count in self.concatenations.items():
            why = f"left [{code}]: {count}; {_LEFT_CONCATENATIONS[code]}" if code else f"without a copy: {count}"
            lines.append(f"concatenations {why}")
        cells = []
        for row in self.rows:
            name = (row.name or "(model)") + (f" and {row.count - 1} more" if row.count > 1 else "")
            cells.append([
                str(row.count), name, row.shape, row.stride, str(row.groups), row.dtype, by(row.last_input_shape or ()),
                row.fused or "-", row.algorithm, "" if row.us is None else f"{row.us:.1f}",
                f"{row.reason} [{row.reason_code}]" if row.reason_code else "",
            ])  # fmt: skip
        headers = [
            "count", "layers", "weight", "stride", "groups", "dtype", "input", "fused", "algorithm", "us each",
            "why not more",
        ]  # fmt: skip
        return "\n".join([*lines, *plain_table(headers, cells)])

    def __repr__(self) -> str:
        return f"RewriteReport(ours={self.ours}, fused={self.fused}, total={self.total}, cached={self.cached})"
