"""What `fastconv.compile` and `fastconv.fuse` make of a network, on a GPU that need not be there: every convolution with
what is fused with it and the planner's time, and every pass that is left around them with the bytes that it moves.

usage: python tools/compare_front_ends.py efficientnet_b0 hrnet_w18 [--gpu h100] [--batch 64] [--class fp16] [--list]

Networks are the corpus's, or timm's. The passes of `compile` are those of the graph that Inductor gets, which makes one
kernel of several: their bytes are an upper bound. Its input is copied, besides, where mode is "reduce-overhead".
"""

from __future__ import annotations

import argparse
import collections
import copy
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
import golden_plans  # noqa: E402

import fastconv  # noqa: E402
from fastconv import ops, rewrites  # noqa: E402
from fastconv.fuse import lowering  # noqa: E402
from fastconv.rewrites import Asked, Taken  # noqa: E402
from fastconv.rewrites.convolution import layer_call, plan_of  # noqa: E402

aten = torch.ops.aten
CLASSES = {"fp16": (torch.float16, None), "bf16": (torch.bfloat16, None), "tf32": (torch.float32, "tf32"),
           "fp32": (torch.float32, "fp32")}  # fmt: skip


@dataclass(frozen=True)
class Step:
    """A convolution, or a pass over memory between them."""

    what: str  # "conv+bn+silu", "mean"
    name: str
    shape: str  # of the value
    algorithm: str = ""
    us: float = 0.0
    bytes: int = 0  # read and written, of a pass


def fake_parameters(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Parameters and buffers of a model in channels_last on a GPU, by name, without values. Under a FakeTensorMode."""
    found = {}
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        given = torch.empty(each.shape, dtype=dtype if each.is_floating_point() else each.dtype, device="cuda")
        found[name] = given.to(memory_format=torch.channels_last) if given.dim() == 4 else given
    return found


def picture(shape: Iterable[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="cuda").to(memory_format=torch.channels_last)


def compiled_graph(model: nn.Module, shape: Iterable[int], dtype: torch.dtype, asked: Asked) -> fx.Graph:
    """What `compile` gives Inductor for frozen weights."""
    from torch._inductor import lowering as _  # noqa: F401  (max-pools are decomposed by it)
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    with FakeTensorMode(), torch.no_grad():
        x, named = picture(shape, dtype), fake_parameters(model, dtype)
        table = rewrites.table(select_decomp_table())
        call = torch.func.functionalize(lambda x, named: torch.func.functional_call(model, named, (x,)))
        graph = make_fx(call, table)(x, named).graph
    graph.eliminate_dead_code()
    rewrites.rewrite(graph, asked, select_decomp_table())
    return graph
