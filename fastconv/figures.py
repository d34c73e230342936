"""Figures that are the same file whenever they are drawn from the same numbers. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def new_figure(width: float, height: float) -> tuple[Any, Any]:
    """A figure of that size in inches, and its axes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # Text as text and a fixed salt: the same file from the same numbers.
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "fastconv", "font.size": 8})
    figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save_figure(figure: Any, path: Path) -> None:
    """Writes the figure, by the ending of `path`, and closes it."""
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {"Software": None}, dpi=150)
    plt.close(figure)
