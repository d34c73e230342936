"""What reports have in common: tables as wide as they must be, and JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from io import StringIO
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


def plain_table(headers: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of a table; none without rows."""
    if not rows:
        return []
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for header in headers:
        table.add_column(header, no_wrap=True)
    for cells in rows:
        table.add_row(*map(Text, cells))
    out = StringIO()
    console = Console(file=out, width=100_000, color_system=None, force_terminal=False, legacy_windows=False)
    console.print(table)
    lines = (line.rstrip() for line in out.getvalue().splitlines())
    return [line for line in lines if line]


def by(sizes: Iterable[Any]) -> str:
    """Sizes as people write them: 3x3."""
    return "x".join(map(str, sizes))


def json_text(document: dict[str, Any], path: str | os.PathLike[str] | None) -> str:
    """The document as JSON text, also written to `path` if one is given."""
    text = json.dumps({"schema": 1} | document, indent=1)
    if path is not None:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    return text
