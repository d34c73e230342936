"""Inductor with fastconv's rewrites in it. Imported when something is compiled: Inductor takes seconds to import."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor import config, list_mode_options
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table

from fastconv import built, measured, rewrites
from fastconv.compiler.freezing import kept_right, with_pass
from fastconv.rewrites import Asked
from fastconv.rewrites.report import RewriteReport


class Decompositions(dict[Any, Callable[..., Any]]):
    """Inductor's, without those of what the rewrites name. Its key in a cache is that it is this."""

    def __reduce__(self) -> Any:
        return decompositions, ()


def decompositions() -> Decompositions:
    return Decompositions(rewrites.table(select_decomp_table()))


@functools.cache
def _code() -> str:
    """What the rewrites are: their own text, that of the lowerings, and the library that plans for them."""
    digest = hashlib.sha256(built.version().encode())
    folder = Path(rewrites.__file__).parent
    others = ("integrations.py", "ops/scatter.py", "ops/shuffling.py")
    for file in (*sorted(folder.glob("*.py")), *map(folder.parent.joinpath, others)):
        digest.update(file.read_bytes())
    digest.update(built.digest().encode())
    return digest.hexdigest()


class RewritePass(CustomGraphPass):
    """The rewrites, where Inductor takes a pass of somebody else: before any of its own, on the joint graph of forward
    and backward in training."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.found: list[rewrites.Record] | None = None

    def __call__(self, graph: fx.Graph) -> None:
        found = rewrites.rewrite(graph, self.asked, select_decomp_table())
        self.found = (self.found or []) + found

    def uuid(self) -> Any:
        choices = hashlib.sha256(repr(sorted(measured.choices().items())).encode()).hexdigest()
        return "fastconv", _code(), self.asked.state(), choices


def compile_graph(
    graph: fx.GraphModule, inputs: Sequence[Any], asked: Asked, frozen: bool, mode: str | None,
    options: dict[str, Any], report: RewriteReport | None,
) -> Callable[..., Any]:  # fmt: skip
    """What `torch.compile` asks of a backend."""
    patches = dict(list_mode_options(mode)) if mode else {}
    patches |= {name.replace("-", "_"): value for name, value in options.items()}
    if frozen:
        patches["freezing"] = True
    freezes = patches.get("freezing", config.freezing) and not torch.is_grad_enabled()
    freezes = bool(freezes)
    mine = RewritePass(replace(asked, packed=freezes, scatters=freezes))
    patches = with_pass(patches, "joint_custom_pre_pass", mine)
    if freezes:
        patches = kept_right(patches)
    compiled: Any = compile_fx(graph, inputs, config_patches=patches, decompositions=decompositions())
    if report is not None:
        report.graphs.append(mine.found)
        report.following += not freezes and not torch.is_grad_enabled()
    return compiled  # type: ignore[no-any-return]
