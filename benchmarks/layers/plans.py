"""cuDNN's plans that earlier runs found to be the fastest of all: a search builds and runs some fifty for each layer,
which takes seconds, and of two searches the one or the other is the luckier (docs/log/138-interrupted.md)."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import results
from fastconv.models.layers import Layer


def check(paths: Sequence[Path | str], head: Mapping[str, Any]) -> None:
    """Raises ValueError if a result file is of another cuDNN than `head`, a file's own: its engines and knobs have
    other numbers. Of another GPU they are candidates like others, and what that one lacks is not built."""
    for path in paths:
        found = results.read(Path(path)).get("cudnn")
        if found != head["cudnn"]:
            raise ValueError(f"plans: {path} has the cudnn {found!r}; expected {head['cudnn']!r}")


def known(paths: Sequence[str], layer: Layer, n: int, accuracy: str, direction: str) -> Mapping[str, Sequence[str]]:
    """cudnn_graph_<layout> -> how searches found its plan, in the files' words. accuracy: a class, of which
    `ieee` and `fp32` have the same rivals."""
    shape = tuple(getattr(layer, name) for name in results.GEOMETRY)
    return _read(tuple(paths)).get((*shape, n, _rivals_of(accuracy), direction), {})


@functools.lru_cache(maxsize=4)
def _read(paths: tuple[str, ...]) -> dict[tuple[Any, ...], dict[str, list[str]]]:
    found: dict[tuple[Any, ...], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for row in (row for path in paths for row in results.read(Path(path))["rows"]):
        key = (*(row[name] for name in results.GEOMETRY), row["n"], _rivals_of(row["class"]), row["pass"])
        for name, words in row.get("peer_plans", {}).items():
            if name.startswith("cudnn_graph_"):
                found[key][name].append(words)
    return found


def _rivals_of(accuracy: str) -> str:
    return "fp32" if accuracy == "ieee" else accuracy
