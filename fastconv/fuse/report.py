"""What `fuse` did to each convolution of a model."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Any

from fastconv.swap import plain_table

__all__ = ["FuseReport", "FuseRow"]


@dataclass(frozen=True)
class FuseRow:
    """One convolution of the model, in one of the ways that it is used: what is computed with it, and why not more."""

    name: str  # of the layer in the fused model
    shape: str  # of the weight, K x C/groups x R x S
    dtype: str
    device: str
    fused: str  # "conv", "conv+bn+relu", "conv+bn+residual+relu", ...; empty: it does not run on fastconv
    reason_code: str = ""  # why it does not, or why what follows it stays apart: for programs
    reason: str = ""  # for people
    algorithm: str | None = None  # what ran last; the algorithm asked for if nothing ran yet
    last_input_shape: tuple[int, ...] | None = None


class FuseReport:
    """The rows of a fused model as they are when asked for: ask again after a forward to see what ran."""

    def __init__(self, rows: list[FuseRow]) -> None:
        self.rows = rows

    @property
    def fused(self) -> int:
        """How many convolutions compute more than themselves."""
        return sum("+" in row.fused for row in self.rows)

    @property
    def total(self) -> int:
        """How many convolutions the model has; one that is used in two ways counts twice."""
        return len(self.rows)

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """The report as JSON text, also written to `path` if one is given."""
        document: dict[str, Any] = {"schema": 1, "fused": self.fused, "total": self.total}
        text = json.dumps(document | {"rows": [asdict(row) for row in self.rows]}, indent=1)
        if path is not None:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text + "\n")
        return text

    def __str__(self) -> str:
        title = f"fastconv: {self.fused} of {self.total} convolutions fused with what follows them"
        cells = []
        for row in self.rows:
            ran = row.algorithm or ""
            if row.last_input_shape is not None:
                ran += f" for {'x'.join(map(str, row.last_input_shape))}"
            reason = f"{row.reason} [{row.reason_code}]" if row.reason_code else ""
            cells.append([row.name or "(model)", row.shape, row.dtype, row.device, row.fused or "-", ran, reason])
        headers = ["layer", "weight", "dtype", "device", "fused", "algorithm", "why not more"]
        return "\n".join([title, *plain_table(headers, cells)])

    def __repr__(self) -> str:
        return f"FuseReport(fused={self.fused}, total={self.total})"
