"""Nodes with the values that they have: what a rewrite of an ATen graph makes, and what that changes behind it."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import make_fx

from fastconv import ops

Decompositions = dict[Any, Callable[..., Any]]
Obstacle = tuple[str, str]  # a code for programs and a text for people


class Spelled(NamedTuple):
    """What a node means that is no call of an ATen operator but of a module, a function or a method: it is left in the
    node's ``meta["spelled"]`` by whoever made the graph."""

    target: Any = None  # the operator; None: nothing that a rewrite knows
    arguments: Callable[..., tuple[Any, ...]] = lambda *inputs: inputs  # its arguments, of the nodes that the call has
    writes: bool = False  # it may write over a value that it did not make
    obstacle: Obstacle | None = None  # why it is not quite that operator
    pads: Obstacle | None = None  # of a convolution: what its padding is that the operator's is not


def spelled(node: fx.Node) -> Spelled:
    return node.meta.get("spelled", Spelled())  # type: ignore[no-any-return]


def read(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The operator that a node calls, None if it calls none, with its arguments."""
    if "spelled" in node.meta:
        target, arguments, *_ = spelled(node)
        inputs: list[fx.Node] = []
        if target:
            fx.map_arg(node.args, lambda arg: inputs.append(arg))  # also those of lists, one that stands twice twice
        return target, arguments(*inputs) if target else (), {}
    return (node.target, node.args, node.kwargs) if node.op == "call_function" else (None, (), {})


def written_between(first: fx.Node, last: fx.Node) -> fx.Node | None:
    """What stands between two nodes and may write over a value that it did not make."""
    node = first.next
    while node is not last and not spelled(node).writes:
        node = node.next
    return None if node is last else node


def is_written(node: fx.Node) -> bool:
    """Whether an operation writes over the memory in which the value stands: whoever made the graph has found out, and
    left it in ``meta["written"]``. In a functional graph none does."""
    return bool(node.meta.get("written"))


def value_of(node: Any) -> Any:
    """What the node computes, as a fake tensor; an argument that is no node is its own value."""
    return node.meta.get("val") if isinstance(node, fx.Node) else node


def same(a: Any, b: Any) -> bool:
    """Whether two sizes are equal for every input that the graph serves: never a new guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(a == b))


def hint_of(size: Any) -> int | None:
    """The size of the example that the graph was made from; None where it depends on data."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return None if hint is None else int(hint)


class Editor:
    """Makes nodes of one graph. Every node has a ``meta["val"]``, as AOTAutograd and torch.export leave it. (A graph of
    modules has an editor of its own, in `fastconv.fuse`.)"""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        values = [value for node in graph.nodes for value in _flat(node.meta.get("val")) if isinstance(value, Tensor)]
        self.fake_mode = detect_fake_mode(values)
        self.stale: set[fx.Node] = set()  # their values have other strides than what was computed from them
        self.made: dict[tuple[Any, ...], tuple[Any, Any]] = {}  # by `once`

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        shapes = getattr(self.fake_mode, "shape_env", None)
        with contextlib.ExitStack() as stack:
            if self.fake_mode is not None:
                stack.enter_context(self.fake_mode)
            if shapes is not None:
                stack.enter_context(enable_python_dispatcher())
                stack.enter_context(shapes.suppress_guards())
            stack.enter_context(torch.no_grad())
            yield

    def evaluate(self, target: Any, args: Any, kwargs: Any) -> Any:
        values, named = fx.map_arg((args, kwargs), value_of)
        with self._computing():
            return target(*values, **named)

    def evaluate_call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """The value that a node of `emit` would have."""
        return self.evaluate(target, args, kwargs)

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call of an operator where the graph inserts."""
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = self.evaluate(target, node.args, node.kwargs)
        return node

    def expect_channels_last(self, node: fx.Node, *images: Any) -> None:
        """Has Inductor bring those inputs of an operator into channels_last where it computes them: else they keep the
        strides that they had in eager mode, contiguous behind a group norm or an upsampling, or those that Inductor
        likes, and the operator copies them. (Inductor reads `eager_input_vals`.)"""

        def expected(arg: fx.Node) -> Any:
            value = value_of(arg)
            is_fixed = arg not in images or arg.op in ("get_attr", "placeholder")
            if is_fixed or ops.format_of(value) == torch.channels_last:  # of a range of channels that, too
                return value
            with self._computing():
                return torch.empty_like(value, memory_format=torch.channels_last)

        node.meta["eager_input_vals"] = fx.map_arg((node.args, node.kwargs), expected)

    def convolution(self, conv: fx.Node, by: fx.Node, call: Sequence[Any]) -> fx.Node:
        """`call`, in the place of a convolution of ours that has taken `by` in."""
        return self.emit(ops.conv2d_op, *call)

    def empty_channels(self, like: Tensor, channels: int) -> fx.Node:
        """A tensor in channels_last that nobody has written yet, of the pictures that `like` has."""
        n, _, h, w = like.shape
        aten = torch.ops.aten
        empty = self.emit(aten.empty.memory_format, [n, h, w, channels], dtype=like.dtype, device=like.device)
        return self.emit(aten.permute.default, empty, [0, 3, 1, 2])

    def around(self, conv: fx.Node, around: Any, target: fx.Node | None, operator: Callable[[], fx.Node]) -> fx.Node:
        """A convolution of ours with what stands around it, `choosing.Around`: `target` writes its value into a range.
        In a graph of operators what `operator` makes."""
        return operator()

    def operand(self, x: fx.Node, constants: Sequence[Any], weight: Any) -> fx.Node:
        """x in the dtype and of the shape that arithmetic with these constants gave it. In a graph of operators those
        who take them away know that it is so."""
        return x

    def can_widen(self, conv: fx.Node) -> bool:
        """Whether the weight of a convolution of ours is a constant. In a graph of operators those who ask know."""
        return True

    def padded(self, value: fx.Node, channels: int) -> fx.Node:
        """An image in channels_last with channels of zeros behind its own, so many in all: as ranges of a tensor, for
        to pad it, some releases of Inductor copy it."""
        x = value_of(value)
        # Before the value: what computes it may write it there.
        inputs = max(self.graph.find_nodes(op="placeholder"), default=next(iter(self.graph.nodes)))
        with self.graph.inserting_before(max(inputs.next, value)):
            empty = self.empty_channels(x, channels)
        return self.cleared(self.emit(ops.channel_scatter_op, value, empty, 0), x.shape[1])

    def cleared(self, tensor: fx.Node, begin: int) -> fx.Node:
        """The tensor with zeros in its channels from `begin` on, which nobody has written yet."""
        x = value_of(tensor)
        n, k, *size = x.shape
        zeros = self.emit(torch.ops.aten.full.default, [n, k - begin, *size], 0.0, dtype=x.dtype, device=x.device)
        return self.emit(ops.channel_scatter_op, zeros, tensor, begin)

    def widened(self, conv: fx.Node, x: fx.Node, residual: fx.Node | None, operator: Callable[[], fx.Node]) -> fx.Node:
        """A convolution of ours of wide images (`widening`). In a graph of operators what `operator` makes."""
        return operator()

    def max_pool(self, node: fx.Node, *arguments: Any) -> fx.Node:
        """A max-pool of fastconv's in the place of a node: kernel, stride, padding, dilation and ceil_mode."""
        return self.emit(ops.max_pool2d_op, node.args[0], *arguments)

    def upsampling(self, node: fx.Node, scales: Sequence[float]) -> fx.Node:
        """A nearest-neighbour upsampling of fastconv's in the place of a node, by integers for height and width."""
        return self.emit(ops.upsample_nearest2d_op, node.args[0], *map(int, scales))

    def once(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(emit, *args)``; where it was made of the same before, that."""
        key = (function, *(arg if isinstance(arg, (int, float)) else id(arg) for arg in args))
        if key not in self.made:
            self.made[key] = args, function(self.emit, *args)  # the arguments: as long as they live, ids are theirs
        return self.made[key][1]

    def replace(self, old: fx.Node, new: fx.Node, readers: Sequence[fx.Node] | None = None) -> None:
        """Every reader of `old`, or these of them, read `new`."""
        for key in ("nn_module_stack", "stack_trace", "fwd_nn_module_stack"):
            if key in old.meta:
                new.meta.setdefault(key, old.meta[key])
        if not _alike(value_of(old), value_of(new)):
            self.stale.add(new)
        old.replace_all_uses_with(new, lambda user: readers is None or user in readers)

    def inline(self, node: fx.Node, decomposition: Callable[..., Any], table: Decompositions) -> None:
        """What the decomposition does, in the node's place."""
        nodes = [arg for arg in node.all_input_nodes]
        place = {arg: index for index, arg in enumerate(nodes)}

        def of_inputs(*inputs: Any) -> Any:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: inputs[place[arg]])
            return decomposition(*args, **kwargs)

        with self._computing():
            traced = make_fx(of_inputs, table, tracing_mode="real")(*map(value_of, nodes))
        inner = dict(zip(traced.graph.find_nodes(op="placeholder"), nodes, strict=True))
        with self.graph.inserting_before(node):
            result = self.graph.graph_copy(traced.graph, inner)
        if isinstance(result, fx.Node):
            self.replace(node, result)
        else:
            assert isinstance(result, (list, tuple))
            for user in list(node.users):
                assert user.target is operator.getitem
                self.replace(user, result[user.args[1]])  # type: ignore[index]
                self.graph.erase_node(user)
        self.graph.erase_node(node)

    def erase(self, *nodes: fx.Node) -> None:
        """Erases the nodes, the last one of a chain first, as far as nobody reads them."""
        for node in nodes:
            if not node.users:
                self.graph.erase_node(node)

    def refresh(self) -> None:
        """Computes again what was computed from values that now have other strides."""
        if not self.stale:
            return
        for node in self.graph.nodes:
            if node.op != "call_function" or not any(arg in self.stale for arg in node.all_input_nodes):
                continue
            if not isinstance(node.target, torch._ops.OpOverload) and node.target is not operator.getitem:
                continue  # a higher-order operator, a size: nothing that has strides of its own
            try:
                new = self.evaluate(node.target, node.args, node.kwargs)
            except (RuntimeError, ValueError):
                if node.target is not torch.ops.aten.view.default:
                    raise
                node.target = torch.ops.aten.reshape.default
                new = self.evaluate(node.target, node.args, node.kwargs)
            if not _alike(node.meta.get("val"), new):
                node.meta["val"] = new
                self.stale.add(node)
        self.stale.clear()


def _flat(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def _alike(a: Any, b: Any) -> bool:
    """Whether two values have one shape, dtype and strides."""
    first, second = _flat(a), _flat(b)
    if len(first) != len(second):
        return False
    for x, y in zip(first, second, strict=True):
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            continue
        if x.dim() != y.dim() or x.dtype != y.dtype:
            return False
        if not all(same(m, n) for m, n in zip([*x.shape, *x.stride()], [*y.shape, *y.stride()], strict=True)):
            return False
    return True
