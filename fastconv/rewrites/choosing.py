"""Which convolution runs: the rewrites after all others. The planner is asked with the whole problem: what it leaves to
PyTorch becomes `aten.convolution` again; of what is frozen the rest gets packed weights, reads through a norm that
stands before it, and writes into a range of channels."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

from fastconv import ops
from fastconv.rewrites.convolution import (
    Asked,
    Call,
    Taken,
    call_of,
    channels_around,
    is_channels_last,
    is_in_class,
    is_like_output,
    is_static,
    measure,
    plan_of,
    planned,
)
from fastconv.rewrites.editor import Editor, is_written, read, spelled, value_of
from fastconv.rewrites.folding import rounded, scale_and_shift
from fastconv.rewrites.patterns import NORM_ACTIVATIONS, Match, Rewrite, emit_activation, first_output, never
from fastconv.selection import is_librarys

aten = torch.ops.aten


def _find_call(node: fx.Node, asked: Asked) -> Match:
    """With what the planner says, which the report tells."""
    call = call_of(node)
    assert call is not None
    measure(call, ("forward",), packs=not asked.packed)
    algorithm, obstacle = planned(call, packs=not asked.packed)
    taken = node.meta.get("fastconv")
    if isinstance(taken, Taken):
        taken.algorithm = algorithm
        taken.expect(call)
        if is_librarys(algorithm):
            taken.obstacle = (
                obstacle if obstacle[0] else ("cost", "PyTorch's convolution is estimated to be the fastest")
            )
    return Match(node, node, {"call": call, "algorithm": algorithm})


def _find_pytorchs(node: fx.Node, asked: Asked) -> Match | None:
    match = _find_call(node, asked)
    own = match.taken is not None and match.taken.is_models_own  # the model calls the operator: it stays that
    return match if is_librarys(match.found["algorithm"]) and not own else None


def _as_pytorchs(match: Match, asked: Asked, edit: Editor) -> fx.Node:
    call: Call = match.found["call"]
    if not is_in_class(call):  # the operator tells PyTorch the class
        node = edit.emit(ops.conv2d_op, *call._replace(algorithm=match.found["algorithm"]))
        node.meta["fastconv"] = match.taken
        return node
    geometry = (call.stride, call.padding, call.dilation, False, [0, 0], call.groups)
    node = edit.emit(aten.convolution.default, call.input, call.weight, call.bias, *geometry)
    node.meta["fastconv"] = match.taken
    if call.residual is not None and not call.residual_after:
        node = edit.emit(aten.add.Tensor, node, call.residual)
    if call.activation != "none":
        node = emit_activation(edit, node, call.activation, call.negative_slope)
    if call.residual is not None and call.residual_after:
        node = edit.emit(aten.add.Tensor, node, call.residual)
    if call.max_pool:
        node = edit.emit(operator.getitem, edit.emit(aten.max_pool2d_with_indices.default, node, [2, 2], [2, 2]), 0)
    return node


PYTORCH = Rewrite("PyTorch's", (ops.conv2d_op,), _find_pytorchs, never, _as_pytorchs)


def _find_packed(node: fx.Node, asked: Asked) -> Match | None:
    if not asked.packed:
        return None
    match = _find_call(node, asked)
    call: Call = match.found["call"]
    # A packing is one algorithm's, which at another size may not fit.
    if is_librarys(match.found["algorithm"]):
        return None
    if is_static(call.input) and is_static(call.weight):
        return match
    if match.taken is not None:
        match.taken.packs = True
    return None


def _as_packed(match: Match, asked: Asked, edit: Editor) -> fx.Node:
    call: Call = match.found["call"]
    algorithm, weight = match.found["algorithm"], value_of(call.weight)
    packed = edit.emit(ops.pack_weight_op, call.weight, call.groups, algorithm, call.precision)
    node = edit.emit(
        ops.conv2d_packed_op, call.input, packed, list(weight.shape), call.bias, call.residual, *call.geometry,
        ops.format_of(weight) == torch.channels_last, algorithm, call.precision, call.activation, call.negative_slope,
        call.residual_after, call.max_pool,
    )  # fmt: skip
    node.meta["fastconv"] = match.taken
    return node


PACKED = Rewrite("packed", (ops.conv2d_op,), _find_packed, never, _as_packed)


# What stands around it -----------------------------------------------------------------------------------------------


class Norm(NamedTuple):
    """activation(batch norm with running statistics(x)) before convolutions."""

    x: fx.Node
    parameters: tuple[Any, ...]  # gamma, beta, mean, variance
    epsilon: float
    activation: str
    nodes: tuple[fx.Node, ...]  # the norm and the activation


_INPUT_ACTIVATIONS = {target: (name, arguments) for name, (target, *arguments) in NORM_ACTIVATIONS.items()}


def norm_before(value: fx.Node) -> Norm | None:
    """What a value is, if it is that."""
    activation, output, nodes = "none", value, [value]
    target, args, kwargs = read(value)
    if target in _INPUT_ACTIVATIONS:
        activation, arguments = _INPUT_ACTIVATIONS[target]
        output, *rest = args
        nodes.insert(0, output)
        if rest != arguments or kwargs or len(output.users) > 1:
            return None
    node: Any = output.args[0] if output.target is operator.getitem else output
    target, args, _ = read(node)
    if target is not aten._native_batch_norm_legit_no_training.default or first_output(node) is not output:
        return None
    x, *parameters, _, epsilon = args
    # The convolution reads x where it stands itself.
    if any(spelled(each).obstacle is not None for each in nodes) or is_written(x):
        return None
    return Norm(x, tuple(parameters), epsilon, activation, tuple(nodes))


def write_target(node: fx.Node) -> fx.Node | None:
    """What writes the convolution's value, which nobody else reads, into a range of channels."""
    users = list(node.users)
    is_scattered = len(users) == 1 and users[0].target is ops.channel_scatter_op and users[0].args[0] is node
    return users[0] if is_scattered else None


class Around(NamedTuple):
    """How a frozen convolution runs that its kernels have read through a norm, or write into a range, or both."""

    norm: Norm | None
    y_channels: int  # of the tensor with the range; 0: none
    algorithm: str = ""

    def arguments(self) -> dict[str, Any]:
        """As `problem_of` takes them."""
        return {"input_activation": self.norm.activation if self.norm else None, "y_channels": self.y_channels}

    def call(self, call: Call) -> Call:
        return call._replace(input=self.norm.x) if self.norm else call


def can_stand_around(call: Call | None) -> bool:
    """Whether the operator that has something around it does all of the call."""
    if call is None or call.max_pool or not is_static(call.input):
        return False
    return call.residual is None or is_like_output(call, value_of(call.residual))


def _around(call: Call, norm: Norm | None, y_channels: int) -> Around | None:
    """With what of both the planner's choice has kernels for; None: with neither."""
    if norm is None and y_channels == 0:
        return None
    around = Around(norm, y_channels)
    if y_channels != 0 and not is_channels_last(around.call(call)):
        return _around(call, norm, 0)
    row = plan_of(around.call(call), **around.arguments())
    assert row is not None
    if norm is not None and (is_librarys(row["algorithm"]) or row["norms_apart"] or row["activates_apart"]):
        return _around(call, None, y_channels)
    if y_channels != 0 and (is_librarys(row["algorithm"]) or row["copies_y"]):
        return _around(call, norm, 0)
    return around._replace(algorithm=row["algorithm"])


def _norm_of(call: Call) -> Norm | None:
    """The norm through which all who read the normed value can read."""
    norm = norm_before(call.input) if call.residual is None else None
    if norm is None or any(p is not None and value_of(p).device != value_of(norm.x).device for p in norm.parameters):
        return None
    return norm if all(_reads_through(user, norm) for user in call.input.users) else None


def is_read_through(norm: fx.Node) -> bool:
    """Whether the convolutions behind a norm of a graph of modules will compute it."""
    readers = list(norm.users)
    if len(readers) == 1 and read(readers[0])[0] in _INPUT_ACTIVATIONS:
        readers = list(readers[0].users)
    call = call_of(readers[0]) if readers else None
    found = _norm_of(call) if call is not None else None
    return found is not None and found.nodes[0] is norm


def _reads_through(node: fx.Node, norm: Norm) -> bool:
    call = call_of(node)
    if call is None or call.residual is not None or not can_stand_around(call):
        return False
    around = _around(call, norm, _y_channels(node))
    return around is not None and around.norm is not None


def _y_channels(node: fx.Node) -> int:
    target, call = write_target(node), call_of(node)
    if target is None or call is None:
        return 0
    channels = int(value_of(target).shape[1])
    # Kernels read a residual where they write.
    is_beside = call.residual is None or channels_around(value_of(call.residual)) == channels
    return channels if is_beside else 0


def writes_range(node: fx.Node, channels: int) -> bool:
    """Whether the kernels of a convolution will write into a range of so many channels; of one with a residual, if that
    is such a range, too."""
    call = call_of(node)
    around = _around(call, _norm_of(call), channels) if call is not None and can_stand_around(call) else None
    return around is not None and around.y_channels != 0


def _find_around(node: fx.Node, asked: Asked) -> Match | None:
    call = call_of(node)
    if not asked.scatters or call is None or not can_stand_around(call):
        return None
    around = _around(call, _norm_of(call), _y_channels(node))
    if around is None:
        return None
    target = write_target(node) if around.y_channels else None
    match = Match(target or node, node, {"call": call, "around": around, "target": target})
    if match.taken is not None:
        match.taken.algorithm = around.algorithm
        match.taken.expect(around.call(call), **around.arguments())
    return match


def factors(emit: Callable[..., Any], gamma: Any, beta: Any, mean: Any, variance: Any, epsilon: float) -> list[Any]:
    """scale and shift of a norm in float32."""
    return rounded(emit, scale_and_shift(emit, gamma, beta, mean, variance, epsilon), torch.float32)


def _as_scatter(match: Match, asked: Asked, edit: Editor) -> fx.Node:
    around: Around = match.found["around"]
    target: fx.Node | None = match.found["target"]
    if match.taken is not None:
        if around.norm is not None:
            match.taken.parts[:0] = ["bn", around.norm.activation][: len(around.norm.nodes)]
        if target is not None:
            match.taken.parts.append("cat")
    assert match.conv is not None
    node = edit.around(match.conv, around, target, lambda: _scatter_operator(match, edit))
    node.meta["fastconv"] = match.taken
    return node


def _scatter_operator(match: Match, edit: Editor) -> fx.Node:
    call: Call = match.found["call"]
    around: Around = match.found["around"]
    target: fx.Node | None = match.found["target"]
    y, weight, scale, shift, input_activation = value_of(match.conv), value_of(call.weight), None, None, "none"
    channels_last = is_channels_last(around.call(call))
    packed = edit.emit(ops.pack_weight_op, call.weight, call.groups, around.algorithm, call.precision)
    if target is not None:
        _, buffer, begin = target.args
    elif channels_last:
        buffer, begin = edit.empty_channels(y, y.shape[1]), 0
    else:
        buffer, begin = edit.emit(aten.empty.memory_format, list(y.shape), dtype=y.dtype, device=y.device), 0
    if around.norm is not None:
        scale, shift = edit.once(factors, *around.norm.parameters, around.norm.epsilon)
        input_activation = around.norm.activation
    stride, padding, dilation, groups = call.geometry
    return edit.emit(
        ops.conv2d_packed_scatter_op, around.call(call).input, packed, call.bias, call.residual, scale, shift, buffer,
        begin, [*weight.shape, *stride, *padding, *dilation, groups], channels_last, around.algorithm, call.precision,
        call.activation, call.negative_slope, input_activation, call.residual_after,
    )  # fmt: skip


AROUND = Rewrite("around", (ops.conv2d_op,), _find_around, never, _as_scatter)

# A node meets them in this order.
CHOOSING = (AROUND, PYTORCH, PACKED)
