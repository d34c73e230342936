"""Rewrites of ATen graphs: convolutions become fastconv's operators, and take in what follows them.

    convolution -> [batch norm] -> [+ residual] -> [activation]     or     ... -> activation -> + residual
                                                                    or     ... -> [activation] -> max-pool

and, with frozen weights, constants or a norm with an activation before them, and the range of a concatenation that they
write into. A group norm with an activation behind it becomes an operator of fastconv's where it has kernels.

A rewrite is a declaration in `patterns`; `apply` goes through a graph with a list of them. The graph of `rewrite` is a
functional one, as AOTAutograd and torch.export make it, whose nodes have a fake tensor each: `table` says which
operators have to be in it undecomposed; `rewrite` changes it in place, decomposes what is left of those, and returns
what became of each convolution. The graph of `fastconv.fuse` is one of modules: its nodes say in ``meta["spelled"]``
what they mean.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from fastconv import ops
from fastconv.rewrites import (
    branches,
    choosing,
    concatenation,
    constants,
    gradients,
    patterns,
    preceding,
    scaling,
    shuffling,
    widening,
)
from fastconv.rewrites.convolution import Asked as Asked
from fastconv.rewrites.convolution import Concatenation as Concatenation
from fastconv.rewrites.convolution import GroupNorm as GroupNorm
from fastconv.rewrites.convolution import Left as Left
from fastconv.rewrites.convolution import Pool as Pool
from fastconv.rewrites.convolution import Record as Record
from fastconv.rewrites.convolution import Taken as Taken
from fastconv.rewrites.convolution import Upsampling as Upsampling
from fastconv.rewrites.convolution import call_of, describe
from fastconv.rewrites.editor import Decompositions, Editor, Obstacle, read, value_of
from fastconv.rewrites.patterns import Rewrite

aten = torch.ops.aten

_GROUP_NORM = aten.native_group_norm.default  # kept on CUDA alone, where a kernel may take its place
# What the patterns name, and decompositions would take apart: into what depends on the release.
_KEPT = (
    _GROUP_NORM,
    aten._native_batch_norm_legit_no_training.default,
    aten.silu.default,
    aten.hardtanh.default,
    aten.leaky_relu.default,
    aten.gelu.default,
    aten.hardswish.default,
)
_MAX_POOL = aten.max_pool2d_with_indices.default  # kept if it is one that a convolution can end in


def table(decompositions: Decompositions) -> Decompositions:
    """The decompositions without those of the operators that the patterns know; every batch norm that takes running
    statistics becomes one operator, whichever library would compute it."""
    result = {operator: how for operator, how in decompositions.items() if operator not in _KEPT}
    for operator in (aten.native_batch_norm.default, aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default):
        if operator in result:
            result[operator] = functools.partial(_batch_norm, result[operator])
    if _MAX_POOL in result:
        result[_MAX_POOL] = functools.partial(_max_pool, result[_MAX_POOL])
    if _GROUP_NORM in decompositions:
        result[_GROUP_NORM] = functools.partial(_group_norm, decompositions[_GROUP_NORM])
    return result


def _group_norm(otherwise: Callable[..., Any], input: Any, *args: Any) -> Any:
    """The decomposition of a group norm, which leaves those on CUDA alone. As an operator its value is contiguous: the
    CPU's is not."""
    return NotImplemented if input.is_cuda else otherwise(input, *args)


def _max_pool(otherwise: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The decomposition of a max-pool, which leaves those alone that a convolution can end in."""
    return NotImplemented if patterns.is_our_pool(*args, **kwargs) else otherwise(*args, **kwargs)


def _batch_norm(
    otherwise: Callable[..., Any], input: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool,
    momentum: float, epsilon: float,
) -> Any:  # fmt: skip
    """The decomposition of an operator that `otherwise` decomposes, where that may take running statistics."""
    found = otherwise(input, weight, bias, mean, variance, training, momentum, epsilon)
    if training or mean is None or variance is None:
        return found
    normed = aten._native_batch_norm_legit_no_training.default(input, weight, bias, mean, variance, momentum, epsilon)
    return (*normed, *found[3:])


# A node meets those of a list whose targets have its operator; lists are gone through one after the other.
_FUSING = (*patterns.EPILOGUE, gradients.GRADIENTS, *patterns.BEHIND)


def apply(graph: fx.Graph, rewrites: Sequence[Rewrite], asked: Asked, edit: Editor) -> list[Left]:
    """Goes once through the graph and rewrites, in place, what the rewrites find. Returns what those of
    `patterns.EPILOGUE` left where it was. What `constants.mark` left in the nodes is gone."""
    left = _apply(graph, rewrites, asked, edit)
    constants.unmark(graph)
    for node in graph.nodes:
        node.meta.pop("filters", None)
    edit.refresh()
    names = {node.name for node in graph.nodes}
    return [each for each in left if each.name in names]


def _apply(graph: fx.Graph, rewrites: Sequence[Rewrite], asked: Asked, edit: Editor) -> list[Left]:
    left: list[Left] = []
    by_target: dict[Any, list[Rewrite]] = defaultdict(list)
    for rewrite in rewrites:
        for target in rewrite.targets:
            by_target[target].append(rewrite)
    for node in list(graph.nodes):
        refused: tuple[str, str] | None = None  # the rewrite's name, and the code
        for rewrite in by_target.get(read(node)[0], ()):
            match = rewrite.match(node, asked)
            obstacle = _obstacle(rewrite, match, asked)
            if match is None or obstacle is not None:
                is_left = rewrite in patterns.EPILOGUE and obstacle is not None and not node.meta.get("constant")
                if is_left and _is_image(read(node)[1][0]):
                    refused = rewrite.name, obstacle[0]  # type: ignore[index]
                continue
            with graph.inserting_before(node):
                new = rewrite.replacement(match, asked, edit)
            if match.node.users:
                edit.replace(match.node, new)
            gone = dict.fromkeys(n for n in (match.node, node, match.conv, *match.gone) if n is not None)
            if any("needs_batch" in each.meta for each in gone):
                new.meta["needs_batch"] = True
            edit.erase(*gone)
            refused = None
            break
        if refused is not None:
            left.append(Left(refused[0], node.name, refused[1]))
    return left


def _is_image(argument: Any) -> bool:
    """Whether it is an input such as convolutions have; in a graph without values it may be."""
    value = value_of(argument)
    return value is None or (isinstance(value, Tensor) and value.dim() == 4)


def _obstacle(rewrite: Rewrite, match: patterns.Match | None, asked: Asked) -> Obstacle | None:
    """Why not; the convolution's record learns of it."""
    if match is None:
        return "alone", "there is no convolution that could take it in"
    obstacle = patterns.between_obstacle(match) or rewrite.obstacle(match, asked)
    if obstacle is not None:
        if match.taken is not None:
            match.taken.obstacle = obstacle
        if match.conv is None:
            match.node.meta["fastconv"] = match.taken
    return obstacle


def rewrite(
    graph: fx.Graph, asked: Asked, decompositions: Decompositions, frozen: Mapping[fx.Node, Tensor] | None = None
) -> list[Record]:
    """Rewrites the graph in place. Returns a record of each convolution in it, of each one's gradients, and of what
    could have gone into one and is left.

    Args:
        graph: traced with `table(decompositions)`.
        asked: algorithm, precision and limit of all convolutions that are none of fastconv's yet.
        decompositions: what takes apart the operators that `table` kept whole, as far as they are left.
        frozen: by placeholder, the parameters and buffers that are constants; by default those of the compilation in
            which this is called.
    """
    edit = Editor(graph)
    outputs: list[fx.Node] = []
    fx.map_arg(graph.output_node().args, outputs.append)
    returned, roots = [value_of(node) for node in outputs], [_root(node) for node in outputs]
    for node in graph.nodes:
        if (call := call_of(node)) is not None:
            taken = describe(node, call.weight, call.stride, call.groups, "conv")
            taken.is_models_own = True
            node.meta["fastconv"] = taken
    if frozen is None:
        frozen = constants.of_compilation(graph)
    constants.mark(graph, graph.owning_module, frozen if asked.packed else {})
    _apply(graph, (patterns.CONVOLUTION,), asked, edit)
    left = apply(graph, (preceding.PRECEDING, branches.BRANCHES, *scaling.SCALING, *_FUSING), asked, edit)
    constants.mark(graph, graph.owning_module, frozen if asked.packed else {})
    concatenations = concatenation.concatenate(graph, asked, edit)
    widening.widen(graph, asked, edit)
    apply(graph, (shuffling.SHUFFLED,), asked, edit)
    graph.eliminate_dead_code()  # what stood between a convolution and its shuffle: nobody is to plan for it
    apply(graph, choosing.CHOOSING, asked, edit)
    graph.eliminate_dead_code()  # norms before convolutions
    names = {node.name for node in graph.nodes}
    left = [each for each in left if each.name in names]
    for node in list(graph.nodes):
        is_kept = node.target in _KEPT or (node.target is _MAX_POOL and patterns.is_our_pool(*node.args, **node.kwargs))
        if node.op == "call_function" and is_kept and node.target in decompositions:
            edit.inline(node, decompositions[node.target], decompositions)
    edit.refresh()
    images: dict[Any, tuple[int, ...]] = {
        ops.conv2d_op: (0, 3), ops.conv2d_packed_op: (0, 4), ops.conv2d_packed_scatter_op: (0, 3),
        ops.group_norm_op: (0,),
    }  # fmt: skip
    for operator, places in images.items():
        for node in graph.find_nodes(op="call_function", target=operator):
            if ops.format_of(value_of(node)) == torch.channels_last:
                edit.expect_channels_last(node, *(node.args[place] for place in places))
    _return_formats(graph, returned, roots if concatenations else [], edit)
    graph.eliminate_dead_code()
    graph.lint()
    found = [node.meta["fastconv"] for node in graph.nodes if isinstance(node.meta.get("fastconv"), Taken)]
    norms = [GroupNorm(node.name) for node in graph.find_nodes(op="call_function", target=ops.group_norm_op)]
    return [*{id(taken): taken for taken in found}.values(), *left, *norms, *concatenations]


def _root(node: fx.Node) -> fx.Node:
    """What a value is a view of, at last."""
    while True:
        schema = getattr(node.target, "_schema", None)
        views = schema is not None and any(each.alias_info and not each.alias_info.is_write for each in schema.returns)
        if not views and node.target is not getitem:
            return node
        node = node.args[0]  # type: ignore[assignment]


def _return_formats(graph: fx.Graph, values: list[Any], roots: list[fx.Node], edit: Editor) -> None:
    """Has the graph return images in the memory formats of these values, in which eager mode returns them: whoever gets
    them may take a view. Where there are ranges, of which a view may be returned, all in their strides, and those that
    had different roots as different memory, which may be written to."""
    output, before = graph.output_node(), iter(values)
    seen: list[fx.Node] = []

    def returned(arg: fx.Node) -> fx.Node:
        old, new, place = next(before), value_of(arg), len(seen)
        seen.append(root := _root(arg))
        if not isinstance(old, Tensor):
            return arg
        how: dict[str, Any] = {}
        if old.dim() == 4 and ops.format_of(old) != ops.format_of(new):
            how = {"memory_format": ops.format_of(old)}
        elif not roots or not (
            _strides_differ(old, new) or any(seen[i] is root and roots[i] is not roots[place] for i in range(place))
        ):
            return arg
        with graph.inserting_before(output):
            return edit.emit(aten.clone.default, arg, **how)

    output.args = fx.map_arg(output.args, returned)


def _strides_differ(a: Tensor, b: Tensor) -> bool:
    sizes = [*a.shape, *a.stride(), *b.stride()]
    if not all(isinstance(size, int) for size in sizes):
        return False
    return any(x != y for size, x, y in zip(a.shape, a.stride(), b.stride(), strict=True) if size > 1)
