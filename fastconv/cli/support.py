"""What the commands share: consoles, options, and how they read arguments and fail."""

from __future__ import annotations

import json
import math
import os
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

console = Console()
if not console.is_terminal:
    console = Console(width=120)  # a pipe has no width, and 80 columns cut the tables
errors = Console(stderr=True)

JsonOption = Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Also write the result here, as JSON.")]
DeviceOption = Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda, cuda:1, ...")]

NetworkOption = Annotated[str, typer.Option(help="all (the four main ones), or some, with commas between.")]
BatchOption = Annotated[int | None, typer.Option(min=1, help="Photographs; default the paper's 64 (DenseNet 48).")]
ImageOption = Annotated[int | None, typer.Option(min=32, help="Side of the photographs; default the network's own.")]

MaxErrorOption = Annotated[
    float | None,
    typer.Option("--max-error", help="How far auto may go: a multiple of PyTorch's own error, at least 1."),
]
MaxWorkspaceOption = Annotated[
    int | None, typer.Option("--max-workspace", help="Bytes of workspace that an algorithm may take, at least 0.")
]


class Precision(str, Enum):
    ieee = "ieee"
    fp32 = "fp32"
    tf32 = "tf32"
    fp16 = "fp16"
    bf16 = "bf16"


PrecisionOption = Annotated[Precision, typer.Option(help="Accuracy class.")]


class Commands(TyperGroup):
    """Ends what a user or a machine can cause in a message and exit code 1; FASTCONV_LOG=debug shows the traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort):  # RuntimeErrors too
            raise
        except (ValueError, TypeError, RuntimeError, ImportError, OSError) as error:
            if os.environ.get("FASTCONV_LOG") == "debug":
                raise
            raise fail(f"{error}") from None


def say(line: str) -> None:
    """Prints a line as it is."""
    console.print(line, markup=False, highlight=False)


def fail(message: str) -> typer.Exit:
    """Prints an error; the caller raises what this returns."""
    errors.print(f"[red]error:[/red] {escape(message)}", highlight=False)
    return typer.Exit(1)


def write_json(path: Path | None, content: Any) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_strict(content), indent=1, default=str) + "\n")
        console.print(f"written: {path}", highlight=False)


def _strict(value: Any) -> Any:
    """JSON knows no NaN: null."""
    if isinstance(value, dict):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def device_named(name: str) -> Any:
    """The torch device that an option names. Raises ValueError if this machine has it not."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device is {name!r}; expected auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {name!r}; expected auto, cpu or cuda")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(f"device is {name!r}; PyTorch sees {count} CUDA devices here")
    return device


def split(text: str, name: str, known: list[str]) -> list[str]:
    """The entries of a list like `a,b`; `all` is all that are known. Raises ValueError for an unknown one."""
    if text == "all":
        return known
    entries = [entry.strip() for entry in text.split(",") if entry.strip()]
    for entry in entries:
        if entry not in known:
            raise ValueError(f"{name} is {entry!r}; expected all, or some of {', '.join(known)}")
    if not entries:
        raise ValueError(f"{name} is empty; expected all, or some of {', '.join(known)}")
    return entries


def numbers(text: str, name: str) -> list[int]:
    """The entries of a list like `64,1`. Raises ValueError for one that is not a positive integer."""
    entries = [entry.strip() for entry in text.split(",")]
    for entry in entries:
        if not entry.isdecimal() or int(entry) < 1:
            raise ValueError(f"{name} is {text!r}; expected positive integers with commas between")
    return [int(entry) for entry in entries]
