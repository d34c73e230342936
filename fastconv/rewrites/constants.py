"""Parameters and buffers that stay what they are, in a graph whose weights are frozen: which values they alone decide,
and what those are."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily


def of_compilation(graph: fx.Graph) -> dict[fx.Node, Tensor]:
    """By placeholder, those of a graph that is being compiled: what Inductor's freezing makes constants. What the graph
    writes, or returns for others to write, is none."""
    context = TracingContext.try_get()
    if context is None or context.fw_metadata is None:
        return {}
    from torch._functorch._aot_autograd.schemas import MutationType

    inputs, outputs = context.fw_metadata.input_info, context.fw_metadata.output_info
    written = {i for i, each in enumerate(inputs) if each.mutation_type != MutationType.NOT_MUTATED}
    written |= {each.base_idx for each in outputs if each.base_idx is not None}
    values = enumerate(context.params_flat_unwrap_subclasses or ())
    nodes = graph.find_nodes(op="placeholder")
    return {nodes[i]: value for i, value in values if i not in written and isinstance(value, Tensor)}


def is_function(node: fx.Node) -> bool:
    """Whether the operator that a node calls computes the same of the same arguments, and does nothing else."""
    return not node.is_impure() and torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ())


_CALLS = "call_function", "call_method"


def mark(
    graph: fx.Graph, root: Any, values: Mapping[fx.Node, Tensor], is_function: Callable[[fx.Node], bool] = is_function
) -> None:
    """Leaves in each node's ``meta["constant"]`` whether these values, and tensors that `root` has, alone decide its
    own."""
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op in _CALLS:
            is_constant = bool(inputs) and is_function(node) and all(each.meta["constant"] for each in inputs)
        else:
            value = attribute(root, str(node.target)) if node.op == "get_attr" else values.get(node)
            is_constant = isinstance(value, Tensor)
            node.meta["known"] = value if is_constant else None
        node.meta["constant"] = is_constant


def unmark(graph: fx.Graph) -> None:
    for node in graph.nodes:
        node.meta.pop("constant", None)
        node.meta.pop("known", None)


def attribute(module: Any, name: str) -> Any:
    """What a node that gets an attribute gets."""
    return functools.reduce(getattr, name.split("."), module)


@contextlib.contextmanager
def computing() -> Iterator[None]:
    """What is computed, is at once, while a graph is made of fake tensors."""
    with unset_fake_temporarily(), torch.no_grad():
        yield


@computing()
def known(arguments: Sequence[Any]) -> list[Any] | None:
    """The values that arguments of a rewrite have in every call; None if inputs decide one of them."""
    found: dict[fx.Node, Any] = {}
    if not all(_is_known(arg, found) for arg in arguments):
        return None
    return [found[arg] if isinstance(arg, fx.Node) else arg for arg in arguments]


def _is_known(value: Any, found: dict[fx.Node, Any]) -> bool:
    if not isinstance(value, fx.Node) or value in found:
        return True
    if value.op not in _CALLS:
        result = value.meta.get("known")
    elif value.meta.get("constant", True) and all(_is_known(each, found) for each in value.all_input_nodes):
        args, kwargs = fx.map_arg((value.args, value.kwargs), found.__getitem__)
        call = getattr(torch.Tensor, str(value.target)) if value.op == "call_method" else value.target
        result = call(*args, **kwargs)  # type: ignore[operator]
    else:
        return False
    found[value] = result
    return result is not None and not isinstance(result, FakeTensor)
