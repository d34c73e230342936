"""The command `fastconv bench`: the benchmarks are no part of the package, but of its source tree."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import typer

import fastconv

# Whatever follows `bench` is for the benchmarks' own command line, `--help` too.
SETTINGS: dict[str, Any] = {
    "name": "bench",
    "add_help_option": False,
    "context_settings": {
        "ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False
    },
}  # fmt: skip


def bench(context: typer.Context) -> None:
    """Time ours against PyTorch and cuDNN, and draw what was measured (from fastconv's source tree)."""
    command_line().app(context.args, prog_name="fastconv bench")


def command_line() -> Any:
    """The module `benchmarks.cli` of the source tree in the current folder, else of the one that holds this package.

    Whichever it is, it measures the fastconv that is running, in the processes that it starts, too.
    Raises ImportError where there is none, saying where to get it.
    """
    beside = Path(fastconv.__file__).resolve().parents[1]
    for root in (Path.cwd(), beside):
        if is_source_tree(root):
            break
    else:
        raise ImportError(
            f"the benchmarks are in fastconv's source tree, not in the installed package, and {Path.cwd()} is no such "
            "tree: run this command in a checkout, or in the unpacked source distribution "
            f"(pip download --no-deps --no-binary fastconv fastconv=={fastconv.__version__})"
        )
    sys.path[:0] = dict.fromkeys([str(beside), str(root)])  # the running fastconv before that of the tree
    module = importlib.import_module("benchmarks.cli")
    if not Path(module.__file__ or "").resolve().is_relative_to(root.resolve()):
        raise ImportError(f"a package of another origin hides {root / 'benchmarks'}: {module.__file__}")
    return module


def is_source_tree(root: Path) -> bool:
    """Whether the folder is a checkout, or an unpacked source distribution, of fastconv."""
    return (root / "benchmarks" / "cli.py").is_file() and (root / "fastconv" / "__init__.py").is_file()
