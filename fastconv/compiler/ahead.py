"""export: a model compiled ahead of time, with fastconv's convolutions, for programs without Python."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from fastconv import rewrites
from fastconv.nn import check_settings
from fastconv.rewrites import constants
from fastconv.rewrites.report import RewriteReport

__all__ = ["export"]


def export(
    model: nn.Module,
    example_inputs: Sequence[Any],
    path: str | os.PathLike[str],
    precision: str | None = None,
    *,
    algorithm: str = "auto",
    max_error: float | None = None,
    max_workspace: int | None = None,
    dynamic_shapes: Any = None,
    options: dict[str, Any] | None = None,
) -> RewriteReport:
    """Writes a package that AOTInductor's loaders run, in C++ or Python, with fastconv's library loaded beside it.

    Batch norms are folded and, where an input has one size, weights are packed: parameters are constants.

    Args:
        model: in evaluation mode, and such that `torch.export` takes it, on the device on which it is to run.
        example_inputs: positional arguments of a call. The package takes tensors in their memory formats, unchecked.
        path: of the package, which ends in ``.pt2``.
        precision, algorithm, max_error, max_workspace: as for `fastconv.compile`.
        dynamic_shapes: as for `torch.export.export`; by default every size is that of the example.
        options: Inductor's, as for ``torch.compile(options=...)``.

    Returns:
        What became of the convolutions.

    Raises:
        TypeError, ValueError: an argument that is not one of these.
        RuntimeError: the model is in training mode. What `torch.export` and AOTInductor raise, besides.
    """
    from torch._inductor import aoti_compile_and_package

    from fastconv.compiler.freezing import kept_right

    check_settings(algorithm, precision, max_error, max_workspace)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    if model.training:
        raise RuntimeError("model is in training mode; expected model.eval()")
    if not isinstance(example_inputs, (tuple, list)):  # of a tensor each image would be an argument
        raise TypeError(f"example_inputs is a {type(example_inputs).__name__}; expected a tuple of arguments")
    if not isinstance(path, (str, os.PathLike)) or Path(path).suffix != ".pt2":
        raise ValueError(f"path is {path!r}; expected one that ends in .pt2")
    asked = rewrites.Asked(algorithm, precision, max_error, max_workspace, packed=True, scatters=True)
    report = RewriteReport()
    inputs = tuple(example_inputs)
    configs = kept_right(dict(options or {}))
    with torch.no_grad():
        module, found = rewritten(model, inputs, asked, dynamic_shapes)
        report.graphs.append(found)
        program = torch.export.export(module, inputs, dynamic_shapes=dynamic_shapes, strict=False)
        aoti_compile_and_package(program, package_path=os.fspath(path), inductor_configs=configs)
    return report


def rewritten(
    model: nn.Module, inputs: tuple[Any, ...], asked: rewrites.Asked, dynamic_shapes: Any = None
) -> tuple[fx.GraphModule, list[rewrites.Record]]:
    """The model as a graph of ATen's operators with fastconv's among them, its parameters constants."""
    program = torch.export.export(model, inputs, dynamic_shapes=dynamic_shapes, strict=False)
    decompositions: dict[Any, Callable[..., Any]] = dict(torch.export.default_decompositions().items())
    program = program.run_decompositions(rewrites.table(decompositions))
    values = _constants(program)
    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    found = rewrites.rewrite(program.graph, asked, {}, {nodes[name]: value for name, (_, value) in values.items()})
    module: Any = program.module()
    fold_constants(module, {target for target, _ in values.values()})
    return module, found


def _constants(program: torch.export.ExportedProgram) -> dict[str, tuple[str, Tensor]]:
    """By the placeholder's name, the name and value of the parameters and buffers that no call writes."""
    signature = program.graph_signature
    targets = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    targets |= signature.inputs_to_lifted_tensor_constants
    tensors = {**program.state_dict, **program.constants}
    written = {tensors[target].untyped_storage().data_ptr() for target in signature.buffers_to_mutate.values()}
    return {
        name: (target, tensors[target])
        for name, target in targets.items()
        if tensors[target].untyped_storage().data_ptr() not in written
    }


@torch.no_grad()
def fold_constants(module: fx.GraphModule, names: Collection[str]) -> None:
    """Computes what depends on attributes of these names alone, once, and drops what nobody reads any more."""
    values: dict[fx.Node, Any] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr" and node.target in names:
            values[node] = constants.attribute(module, str(node.target))
        elif node.op == "call_function" and node.all_input_nodes and all(n in values for n in node.all_input_nodes):
            if not constants.is_function(node):
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    for node in list(module.graph.nodes):
        if node.op == "call_function" and isinstance(values.get(node), torch.Tensor):
            if all(user in values for user in node.users):
                continue  # a step on the way
            name = f"_folded_{node.name}"
            module.register_buffer(name, values[node].detach().clone())
            with module.graph.inserting_before(node):
                constant = module.graph.get_attr(name)
            node.replace_all_uses_with(constant)
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    module.delete_all_unused_submodules()
    used = {str(node.target) for node in module.graph.find_nodes(op="get_attr")}
    for name in [name for name, _ in (*module.named_parameters(), *module.named_buffers()) if name not in used]:
        owner, _, attribute = name.rpartition(".")
        delattr(module.get_submodule(owner), attribute)
    module.recompile()
