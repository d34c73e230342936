"""The graph of a fused model for inputs that are known: concatenations along channels become ranges of one tensor,
which convolutions write and read, norms before convolutions their affine input, and channels whole accesses.

What the rewrites of `fastconv.compile` decide, with the planner's costs for these inputs, is done here in eager calls.
The sizes are in none of them, so that the code serves others as well. `fastconv.fuse`'s own graph, without any of this,
stays for everything else: gradients, transforms, what PyTorch traces and compiles.
"""

from __future__ import annotations

import copy
import itertools
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensorMode
from torch.nn.modules import module as modules
from torch.utils._pytree import tree_leaves

from fastconv import ops, rewrites, settings
from fastconv.eager import is_eager
from fastconv.fuse import graph as graphs
from fastconv.fuse import ranges
from fastconv.nn import Conv2d
from fastconv.norm import InputNorm
from fastconv.rewrites import choosing, concatenation, widening
from fastconv.rewrites.convolution import Concatenation, Record, Taken, call_of
from fastconv.rewrites.editor import Editor, Spelled, read, spelled, value_of
from fastconv.rewrites.widening import missing_channels

aten = torch.ops.aten
_log = logging.getLogger("torch._subclasses.fake_tensor")

# The operators that the rewrites know and that have no one shape in and out.
_SHAPED = (
    aten.cat.default, aten.max_pool2d_with_indices.default, aten.upsample_nearest2d.vec,
    *graphs.ARITHMETIC.values(),
)  # fmt: skip
# The planner is asked for so many inputs that differ in batch and image size alone, and for so many in all. Those after
# them are served as the latest of their like was.
_SIZES, _INPUTS = 8, 64


@dataclass
class Lowered:
    """The code for some inputs, and what the report tells of it."""

    forward: Callable[..., Any] | None  # of the fused module; None: its own graph's
    layers: dict[str, tuple[Taken, dict[str, Any]]]  # by name: what stands around them, as `problem_of` takes it
    concatenations: list[Concatenation]
    norms: set[str]  # nodes that are gone: norms, and activations behind them
    wide: set[str]  # the layers that have channels of zeros
    channels: tuple[int, ...]  # of the values of four dimensions: the code has them, and has no other sizes


class Lowerings:
    """Of a fused model, by the inputs that it was called with. A copy or a pickle has none."""

    def __init__(self) -> None:
        self.exact: dict[Any, Lowered] = {}
        self.alike: dict[Any, list[Lowered]] = defaultdict(list)  # inputs that differ in batch and image size alone
        self.latest: Lowered | None = None
        self.lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return Lowerings, ()

    def find(self, model: fx.GraphModule, args: tuple[Any, ...], found: Iterable[Record]) -> Lowered | None:
        """What serves a call; None where that is not for here."""
        key = _key(model, args)
        if key is None:
            return None
        exact, alike = key
        lowered = self.exact.get(exact)
        if lowered is None:
            with self.lock:
                lowered = self.exact.get(exact) or self._new(exact, alike, model, args, found)
        self.latest = lowered
        return lowered

    def _new(self, exact: Any, alike: Any, model: fx.GraphModule, args: tuple[Any, ...], found: Any) -> Lowered | None:
        others = self.alike[alike]
        if len(others) < _SIZES and len(self.exact) < _INPUTS:
            others.append(_lowered(model, args, found))
            self.exact[exact] = others[-1]
            return others[-1]
        # Where channels are a matter of sizes, as in a correlation volume, code serves the inputs that it was made for.
        return others[-1] if len({each.channels for each in others}) == 1 else None


def is_candidate(graph: fx.Graph, root: nn.Module) -> bool:
    """Whether a fused model has what could become a range, an affine input, or wider."""
    for module in root.modules():
        is_narrow = isinstance(module, Conv2d) and missing_channels(module.weight, 0) > 0
        if is_narrow or isinstance(module, InputNorm):
            return True
    return any(graph.find_nodes(op="call_function", target=cat) for cat in graphs.CONCATENATIONS)


def _key(model: fx.GraphModule, args: tuple[Any, ...]) -> tuple[Any, Any] | None:
    """Of a plain call in inference: what inputs it has, and what of that is not batch and image size."""
    if settings.disabled or "_is_replica" in model.__dict__ or torch._C._is_any_autocast_enabled():
        return None
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if not tensors or not is_eager(*tensors) or modules._has_any_global_hook():
        return None
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in itertools.chain(tensors, model.parameters())):
        return None
    exact: list[Any] = []
    alike: list[Any] = []
    for arg in args:
        if not isinstance(arg, Tensor):
            if not isinstance(arg, (bool, int, float, str, type(None))):
                return None
            exact.append((type(arg), arg))
            alike.append(exact[-1])
            continue
        if arg.numel() == 0:
            return None
        exact.append((arg.shape, arg.stride(), arg.dtype, arg.device))
        if arg.dim() == 4:
            alike.append((arg.shape[1], ops.format_of(arg), arg.dtype, arg.device))
        else:
            alike.append(exact[-1])
    return tuple(exact), tuple(alike)


def _lowered(model: fx.GraphModule, args: tuple[Any, ...], found: Iterable[Record]) -> Lowered:
    graph = copy.deepcopy(model.graph)
    edit, concatenations = rewritten(model, graph, args, found)
    values = [value_of(node) for node in graph.nodes]
    channels = tuple(value.shape[1] for value in values if isinstance(value, Tensor) and value.dim() == 4)
    if edit is None or not edit.finish():
        return Lowered(None, {}, concatenations, set(), set(), channels)
    graph.lint()
    forward = type(fx.GraphModule(model, graph)).forward
    return Lowered(forward, edit.layers, concatenations, edit.norms, edit.wide, channels)


def rewritten(
    model: fx.GraphModule, graph: fx.Graph, args: tuple[Any, ...], found: Iterable[Record]
) -> tuple[_Ranges | None, list[Concatenation]]:
    """Rewrites a copy of the model's graph for these inputs, in place, with values and records in its nodes. Returns
    None and nothing where that is not to be."""
    of_model = dict(model.named_modules(remove_duplicate=False))
    if any(graphs.is_altered(inner) for name, inner in of_model.items() if name):
        return None, []  # hooks, which would see the values that follow
    _spell(graph, of_model)
    try:
        _evaluate(model, graph, args)
    except Exception:  # of a function that is not for tensors without values: what it computes is not known before
        return None, []
    _mark_written(graph)
    records = {record.name: record for record in found if isinstance(record, Taken)}
    for node in graph.find_nodes(op="call_module"):
        node.meta.pop("fastconv", None)
        if (record := records.get(str(node.target))) is not None and call_of(node) is not None:
            node.meta["fastconv"] = replace(record, parts=list(record.parts))
    asked = rewrites.Asked(packed=True, scatters=True)
    edit = _Ranges(graph, of_model)
    concatenations = concatenation.concatenate(graph, asked, edit)
    widening.widen(graph, asked, edit)
    rewrites.apply(graph, (choosing.AROUND,), asked, edit)
    return edit, concatenations


def _spell(graph: fx.Graph, of_model: dict[str, nn.Module]) -> None:
    """As for the rewrites before, with the layers that these have made, and without what is not quite an operator."""
    graphs.spell(graph, of_model, fused=True)
    for node in graph.nodes:
        if spelled(node).obstacle is not None:
            node.meta["spelled"] = Spelled(writes=spelled(node).writes)


class _Evaluation(fx.Interpreter):
    """Leaves in each node's ``meta["val"]`` a fake tensor of what it computes."""

    def run_node(self, n: fx.Node) -> Any:
        value = _value_like(n)
        n.meta["val"] = super().run_node(n) if value is None else value
        return n.meta["val"]


def _value_like(node: fx.Node) -> Tensor | None:
    """Of the operators that the rewrites know, without going through them."""
    target, args, _ = read(node)
    if "spelled" not in node.meta or target is None or not args or not isinstance(x := value_of(args[0]), Tensor):
        return None
    if target is ops.conv2d_op:
        call = call_of(node)
        assert call is not None
        weight, residual = value_of(call.weight), value_of(call.residual)
        if x.dim() != 4 or x.dtype != weight.dtype:
            return None
        p, q = ops.output_size(x.shape, weight.shape, call.stride, call.padding, call.dilation)
        shape = (x.shape[0], weight.shape[0], *((p // 2, q // 2) if call.max_pool else (p, q)))
        if residual is not None and (residual.shape != shape or residual.dtype != x.dtype):
            return None
        return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=ops.format_of(x, weight))
    if target in _SHAPED:
        return None
    return x if spelled(node).writes else torch.empty_like(x)  # a norm, an activation


def _evaluate(model: fx.GraphModule, graph: fx.Graph, args: tuple[Any, ...]) -> None:
    mode = detect_fake_mode(args) or FakeTensorMode(allow_non_fake_inputs=True)
    inputs = [mode.from_tensor(arg) if isinstance(arg, Tensor) else arg for arg in args]
    _log.disabled = True  # what goes wrong the call itself says
    try:
        with torch.inference_mode(False), torch.no_grad(), mode:
            _Evaluation(model, graph=graph).run(*inputs)
    finally:
        _log.disabled = False


def _mark_written(graph: fx.Graph) -> None:
    def memory(node: fx.Node) -> set[int]:
        values = tree_leaves(value_of(node))
        return {value.untyped_storage()._cdata for value in values if isinstance(value, Tensor)}

    written: set[int] = set()
    for node in graph.nodes:
        if spelled(node).writes:
            written.update(*map(memory, node.all_input_nodes))
    for node in graph.nodes:
        node.meta["written"] = not written.isdisjoint(memory(node))


class _Ranges(Editor):
    """The nodes that rewrites make, in a graph of modules; `finish` makes eager calls of the operators among them."""

    def __init__(self, graph: fx.Graph, modules: dict[str, nn.Module]) -> None:
        super().__init__(graph)
        self.modules = modules
        self.new: dict[fx.Node, int] = {}  # tensors that nobody has written yet: their channels
        self.taken: dict[fx.Node, None] = {}  # norms and activations that convolutions compute
        self.norms: set[str] = set()  # the names of those that are gone
        self.layers: dict[str, tuple[Taken, dict[str, Any]]] = {}
        self.wide: set[str] = set()

    def empty_channels(self, like: Tensor, channels: int) -> fx.Node:
        node = super().empty_channels(like, channels)
        self.new[node] = channels
        return node

    def around(self, conv: fx.Node, around: Any, target: fx.Node | None, operator: Callable[[], fx.Node]) -> fx.Node:
        norm: choosing.Norm | None = around.norm
        before: list[Any] = []
        if norm is not None:
            first, *rest = norm.nodes
            activation = self.graph.get_attr(str(rest[0].target)) if rest and rest[0].op == "call_module" else None
            before = [self.graph.get_attr(str(first.target)), norm.activation, activation]
            self.taken |= dict.fromkeys(norm.nodes)
        layer: Any
        if conv.op == "call_module":
            layer, (x, *others) = self.graph.get_attr(str(conv.target)), conv.args
        else:  # of `widened`
            layer, x, *others, _ = conv.args
        residual = others[0] if others else None
        arguments = (layer, norm.x if norm else x, residual, before)
        if target is None:
            node = self.graph.call_function(ranges.convolve, arguments)
        else:
            node = self.graph.call_function(ranges.convolve_into, (*arguments, *target.args[1:]))
        node.meta["val"] = value_of(target or conv)
        if (taken := conv.meta.get("fastconv")) is not None:
            self.layers[taken.name] = taken, around.arguments()
        return node

    def can_widen(self, conv: fx.Node) -> bool:
        return conv.op == "call_module" and ranges.has_constants(self.modules[str(conv.target)])

    def cleared(self, tensor: fx.Node, begin: int) -> fx.Node:
        node = self.graph.call_function(ranges.cleared, (tensor, begin))
        node.meta["val"] = value_of(tensor)
        return node

    def widened(self, conv: fx.Node, x: fx.Node, residual: fx.Node | None, operator: Callable[[], fx.Node]) -> fx.Node:
        call = call_of(conv)
        assert call is not None
        name, (k, c) = str(conv.target), value_of(call.weight).shape[:2]
        layer = self.graph.call_function(ranges.wide, (self.graph.get_attr(name), c, k))
        node = self.graph.call_function(ranges.convolve, (layer, x, residual, []))
        weight, bias = widening.filters(self.evaluate_call, call.weight, call.bias)
        wide = call._replace(weight=weight, bias=bias)
        node.meta["spelled"] = Spelled(
            ops.conv2d_op, lambda _, x, residual=None: wide._replace(input=x, residual=residual)
        )
        node.meta["val"] = self.evaluate_call(
            ops.conv2d_op, *wide._replace(input=value_of(x), residual=value_of(residual))
        )
        self.wide.add(name)
        return node

    def _write(self, node: fx.Node) -> None:
        """What writes a range, by a call: a sum or an upsampling that nobody else reads is computed there."""
        value, *where = node.args
        node.target = ranges.copy_into
        assert isinstance(value, fx.Node)
        if list(value.users) != [node]:
            return
        if concatenation.is_sum(value):
            node.target, node.args = ranges.add_into, (*read(value)[1], *where)
            self.erase(value)
        elif concatenation.is_upsampling(value):
            with self.graph.inserting_before(node):
                layer = self.graph.get_attr(str(value.target))
            node.target, node.args = ranges.upsample_into, (layer, *value.args, *where)
            self.erase(value)

    def finish(self) -> bool:
        """Whether there was anything."""
        for node in list(self.graph.nodes):
            if node.target is ops.channel_scatter_op:
                self._write(node)
            if node.target in (ranges.copy_into, ranges.add_into, ranges.convolve_into, ranges.upsample_into):
                node.args = tuple(self.new.get(arg, arg) if isinstance(arg, fx.Node) else arg for arg in node.args)
            if node.target is aten.slice.Tensor:
                tensor, dim, begin, end = node.args
                with self.graph.inserting_before(node):
                    new = self.graph.call_method("narrow", (tensor, dim, begin, end - begin))  # type: ignore[operator]
                new.meta["val"] = value_of(node)
                node.replace_all_uses_with(new)
                self.erase(node, new)
        for node in self.new:
            self.erase(node, node.args[0])  # type: ignore[arg-type]
        for node in reversed(self.taken):
            if not node.users:
                self.norms.add(node.name)
                self.erase(node)
        return bool(self.layers) or bool(self.new) or bool(self.wide)
