"""The rewrites, in the order in which they are tried on a node. Each one is a declaration: the operators where it
begins, what it finds there, what forbids it, and what takes the place of what it found."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fastconv import _C, ops, settings
from fastconv.rewrites.convolution import (
    Asked,
    Call,
    Obstacle,
    Taken,
    activates_inside,
    call_of,
    describe,
    obstacle_of,
    plan_of,
    pools_inside,
)
from fastconv.rewrites.editor import Editor, hint_of, read, same, spelled, value_of, written_between
from fastconv.rewrites.folding import Filters, folded, norm_obstacle, range_obstacle, rounded

aten = torch.ops.aten


@dataclass
class Match:
    """What a rewrite found at a node."""

    node: fx.Node  # whose value is replaced
    conv: fx.Node | None = None  # of ours, which takes it in
    found: dict[str, Any] = field(default_factory=dict)
    taken: Taken | None = None  # what the report will say of the convolution
    gone: tuple[fx.Node, ...] = ()  # what else nobody reads any more, the last one first

    def __post_init__(self) -> None:
        if self.conv is not None:
            self.taken = self.conv.meta.get("fastconv")


@dataclass(frozen=True)
class Rewrite:
    name: str
    targets: tuple[Any, ...]
    match: Callable[[fx.Node, Asked], Match | None]
    obstacle: Callable[[Match, Asked], Obstacle | None]
    replacement: Callable[[Match, Asked, Editor], fx.Node]


def never(match: Match, asked: Asked) -> None:
    return None


# aten.convolution -> conv2d ------------------------------------------------------------------------------------------


def _find_convolution(node: fx.Node, asked: Asked) -> Match | None:
    _, weight, _, stride, _, _, _, _, groups = node.args
    return Match(node, taken=describe(node, weight, stride, groups, "conv"))  # type: ignore[arg-type]


def _convolution_obstacle(match: Match, asked: Asked) -> Obstacle | None:
    x, weight, _, *geometry = match.node.args
    obstacle = obstacle_of(value_of(x), value_of(weight), *geometry)
    if obstacle is not None or value_of(x).dim() == 4:
        return obstacle
    return "dimensions", f"its input has {value_of(x).dim()} dimensions"


def new_call(
    asked: Asked, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: Any
) -> Call:
    def pair(values: Any) -> list[int]:
        return list(values) * 2 if len(values) == 1 else list(values)

    precision = settings.resolve_precision(asked.precision, value_of(x).is_cuda)
    return Call(
        x, weight, bias, None, pair(stride), pair(padding), pair(dilation), groups, asked.resolved_algorithm(),
        precision, "none", 0.0, settings.switches.backend_flags, *asked.limits(),
    )  # fmt: skip


def _as_conv2d(match: Match, asked: Asked, edit: Editor) -> fx.Node:
    x, weight, bias, stride, padding, dilation, _, _, groups = match.node.args
    call = new_call(asked, x, weight, bias, stride, padding, dilation, groups)
    node = edit.emit(ops.conv2d_op, *call)
    node.meta["fastconv"] = match.taken
    return node


CONVOLUTION = Rewrite("convolution", (aten.convolution.default,), _find_convolution, _convolution_obstacle, _as_conv2d)


# What follows a convolution ------------------------------------------------------------------------------------------


def open_call(node: Any) -> Call | None:
    """The call, if its epilogue can still take something in."""
    call = call_of(node)
    return call if call is not None and call.activation == "none" and not call.max_pool else None


def between_obstacle(match: Match) -> Obstacle | None:
    """What keeps anything from going into a convolution that stands before it: the convolution then runs where that
    was, nobody finds the value between, and what it reads must not have been written over."""
    conv, node = match.conv, match.node
    if conv is None or conv is node:
        return None
    for told in (spelled(conv).obstacle, spelled(node).obstacle):
        if told is not None:
            return told
    if len(conv.users) > 1:
        return "users", f"{len(conv.users)} operations read what it would be fused with"
    if spelled(node).writes and node.args[0] is not conv:
        return "in_place", "the sum is written over another value"
    other = written_between(conv, node)
    return None if other is None else ("in_place", f"{other.name}, which works in place, stands between them")


def grown(match: Match, edit: Editor, part: str, **arguments: Any) -> fx.Node:
    """The convolution with something more in it, where that was."""
    assert match.conv is not None
    call = call_of(match.conv)
    assert call is not None
    node = edit.convolution(match.conv, match.node, call._replace(**arguments))
    if match.taken is not None:
        match.taken.parts.append(part)
    node.meta |= {"fastconv": match.taken, "filters": match.conv.meta.get("filters")}
    return node


def first_output(node: fx.Node) -> fx.Node | None:
    """The first output of an operator that has several; None if others are read, too."""
    if "spelled" in node.meta:
        return node  # a module's only one
    outputs = [user for user in node.users if user.target is operator.getitem]
    return outputs[0] if [user.args[1] for user in outputs] == [0] else None


def _find_norm(node: fx.Node, asked: Asked) -> Match | None:
    x, *numbers = read(node)[1]
    call, output = open_call(x), first_output(node)
    if call is None or call.residual is not None or output is None:
        return None
    gamma, beta, mean, variance, _, epsilon = numbers
    return Match(output, x, {"folded": (call.weight, call.bias, gamma, beta, mean, variance, epsilon)})


def _norm_obstacle(match: Match, asked: Asked) -> Obstacle | None:
    weight, _, *parameters, _ = match.found["folded"]
    obstacle = norm_obstacle(value_of(weight), parameters)
    return obstacle or range_obstacle(folded, match.found["folded"], value_of(weight).dtype)


def _rounded(emit: Callable[..., Any], weight: Any, *others: Any) -> list[Any]:
    return rounded(emit, folded(emit, weight, *others), value_of(weight).dtype)


def _fold(match: Match, asked: Asked, edit: Editor) -> fx.Node:
    weight, bias = edit.once(_rounded, *match.found["folded"])
    node = grown(match, edit, "bn", weight=weight, bias=bias)
    node.meta["filters"] = (Filters(*match.found["folded"]),)
    return node


BATCH_NORM = Rewrite(
    "batch norm", (aten._native_batch_norm_legit_no_training.default,), _find_norm, _norm_obstacle, _fold
)


def _added_us(call: Call) -> float:
    """What the planner expects a sum to add to the convolution; 0 where sizes are not known."""
    if value_of(call.input) is None:
        return 0.0
    alone, summed = plan_of(call), plan_of(call._replace(residual=call.input))
    return 0.0 if alone is None or summed is None else summed["cost_us"] - alone["cost_us"]


def _find_sum(node: fx.Node, asked: Asked) -> Match | None:
    _, args, kwargs = read(node)
    if len(args) != 2 or kwargs.get("alpha", 1) != 1 or args[0] is args[1]:
        return None
    calls = {arg: call for arg in args if (call := call_of(arg)) is not None}
    found = [arg for arg, call in calls.items() if call.residual is None and not call.max_pool]
    # Of two convolutions that are added, one that nobody else reads; of two such, the one that the sum is written over,
    # or one that can still take an activation in; of two such, the one to which it adds less, or the later one.
    alone = [arg for arg in found if len(arg.users) == 1] or found
    if not alone:
        return None
    over = args[0] if spelled(node).writes else None
    conv = alone[0]
    if len(alone) > 1:
        conv = max(alone, key=lambda arg: (arg is over, open_call(arg) is not None, -_added_us(calls[arg]), arg))
    other = args[1] if args[0] is conv else args[0]
    return Match(node, conv, {"other": other}) if isinstance(other, fx.Node) else None


def _sum_obstacle(match: Match, asked: Asked) -> Obstacle | None:
    y, other = value_of(match.conv), value_of(match.found["other"])
    if y is None:
        return None  # a graph without shapes: the layer looks at those that come
    if not isinstance(other, torch.Tensor):
        return "residual", "a number is added"
    if other.dtype != y.dtype or other.device != y.device:
        return "residual", f"what is added is {other.dtype} on {other.device}"
    if other.dim() != 4 or not all(same(a, b) for a, b in zip(other.shape, y.shape, strict=True)):
        return "residual", "what is added has another shape"
    call = call_of(match.conv)
    assert call is not None
    if activates_inside(call._replace(residual=match.found["other"], residual_after=True), not asked.packed):
        return None
    return "residual", f"its kernels add nothing behind {call.activation}"


def _add(match: Match, asked: Asked, edit: Editor) -> fx.Node:
    after = open_call(match.conv) is None
    return grown(match, edit, "residual", residual=match.found["other"], residual_after=after)


RESIDUAL = Rewrite("sum", (aten.add.Tensor,), _find_sum, _sum_obstacle, _add)

# The kernels' activations: the operator, and its arguments behind the tensor; those of leaky ReLU are its slope. What
# GELU approximates by stands where the operator has a keyword.
ACTIVATIONS: dict[str, tuple[Any, ...]] = {
    "relu": (aten.relu.default,),
    "silu": (aten.silu.default,),
    "relu6": (aten.hardtanh.default, 0.0, 6.0),
    "leaky_relu": (aten.leaky_relu.default,),
    "gelu": (aten.gelu.default,),
    "gelu_tanh": (aten.gelu.default, "tanh"),
    "hardswish": (aten.hardswish.default,),
    "sigmoid": (aten.sigmoid.default,),
}
# Those of group norms and of affine inputs.
NORM_ACTIVATIONS = {name: ACTIVATIONS[name] for name in ("relu", "silu", "relu6")}


def activation_of(target: Any, arguments: Sequence[Any], keywords: dict[str, Any]) -> tuple[str, float] | None:
    """The name of what an operator computes with these arguments behind its tensor, and leaky ReLU's slope."""
    if target is aten.leaky_relu.default:
        slope = arguments[0] if arguments else 0.01
        return ("leaky_relu", float(slope)) if isinstance(slope, (int, float)) and not keywords else None
    if target is aten.gelu.default:
        arguments = [how for how in (*arguments, *keywords.values()) if how != "none"]
    elif keywords:
        return None
    names = [name for name, found in ACTIVATIONS.items() if found == (target, *arguments)]
    return (names[0], 0.0) if names else None


def emit_activation(edit: Editor, x: fx.Node, name: str, slope: float) -> fx.Node:
    target, *arguments = ACTIVATIONS[name]
    if name == "leaky_relu":
        arguments = [slope]
    return edit.emit(target, x, approximate="tanh") if name == "gelu_tanh" else edit.emit(target, x, *arguments)


def _find_activation(node: fx.Node, asked: Asked) -> Match | None:
    target, (x, *rest), kwargs = read(node)
    found = activation_of(target, rest, kwargs)
    if found is None or open_call(x) is None:
        return None
    if found[0] == "sigmoid" and len(x.users) > 1:
        return None  # SiLU in two steps, which nobody expects in there
    return Match(node, x, dict(zip(("activation", "slope"), found, strict=True)))


def _activation_obstacle(match: Match, asked: Asked) -> Obstacle | None:
    call = call_of(match.conv)
    assert call is not None
    name = match.found["activation"]
    if value_of(match.conv) is None or activates_inside(call._replace(activation=name), not asked.packed):
        return None  # a graph without shapes: the layer has a pass follow kernels that do not end with it
    return "activation", f"its kernels do not end with {name}"


def _activate(match: Match, asked: Asked, edit: Editor) -> fx.Node:
    name = match.found["activation"]
    return grown(match, edit, name, activation=name, negative_slope=match.found["slope"])


ACTIVATION = Rewrite(
    "activation",
    tuple({target: None for target, *_ in ACTIVATIONS.values()}),
    _find_activation,
    _activation_obstacle,
    _activate,
)


def is_our_pool(
    x: Any, kernel: Any, stride: Any = (), padding: Any = (0,), dilation: Any = (1,), ceil: Any = False
) -> bool:
    """Whether a max-pool with these arguments is the one that a convolution can end in."""
    return [set(kernel), set(stride or kernel), set(padding), set(dilation), ceil] == [{2}, {2}, {0}, {1}, False]


def _find_max_pool(node: fx.Node, asked: Asked) -> Match | None:
    _, args, kwargs = read(node)
    call, output = call_of(args[0]), first_output(node)
    if output is None or not is_our_pool(*args, **kwargs):
        return None
    if call is None or call.residual is not None or call.max_pool or len(args[0].users) > 1:
        return None  # what is read again, as in a U-Net, nobody expects in there
    return Match(output, args[0])


def _max_pool_obstacle(match: Match, asked: Asked) -> Obstacle | None:
    call = call_of(match.conv)
    assert call is not None
    if value_of(match.conv) is None or pools_inside(call._replace(max_pool=True), not asked.packed):
        return None  # a graph without shapes: the layer pools behind kernels that have none
    return "max_pool", "its kernels have no max-pool"


def _max_pool(match: Match, asked: Asked, edit: Editor) -> fx.Node:
    return grown(match, edit, "max_pool", max_pool=True)


MAX_POOL = Rewrite("max-pool", (aten.max_pool2d_with_indices.default,), _find_max_pool, _max_pool_obstacle, _max_pool)


def _find_pool(node: fx.Node, asked: Asked) -> Match | None:
    """Any max-pool of one output, by numbers."""
    numbers = read(node)[1][1:]
    known = all(isinstance(n, int) for pair in numbers for n in (pair if isinstance(pair, tuple) else [pair]))
    return Match(node) if known and spelled(node).obstacle is None else None


def _pool(match: Match, asked: Asked, edit: Editor) -> fx.Node:
    return edit.max_pool(match.node, *read(match.node)[1][1:])


# Of what is left apart, in a graph of modules: Inductor's pools write values alone, too.
POOL = Rewrite("pool", (aten.max_pool2d_with_indices.default,), _find_pool, never, _pool)


def _find_upsampling(node: fx.Node, asked: Asked) -> Match | None:
    return Match(node) if spelled(node).obstacle is None else None


def _upsampling(match: Match, asked: Asked, edit: Editor) -> fx.Node:
    _, _, scales = read(match.node)[1]
    return edit.upsampling(match.node, scales)


# By integers, in a graph of modules: Inductor reads such a value through its index.
UPSAMPLING = Rewrite("upsampling", (aten.upsample_nearest2d.vec,), _find_upsampling, never, _upsampling)


# Group norms ---------------------------------------------------------------------------------------------------------


def _find_group_norm(node: fx.Node, asked: Asked) -> Match | None:
    x, weight, bias, _, _, _, groups, epsilon = node.args
    output = first_output(node)
    while isinstance(x, fx.Node) and x.target is aten.clone.default:  # PyTorch's kernel for GPUs reads NCHW
        x = x.args[0]
    return None if output is None else Match(output, found={"call": (x, weight, bias, groups, epsilon)})


def _group_norm_obstacle(match: Match, asked: Asked) -> Obstacle | None:
    x, *parameters = (value_of(each) for each in match.found["call"][:3])
    if x.dim() != 4 or not x.is_cuda or ops.format_of(x) != torch.channels_last:
        return "layout", "its kernels are for images in channels_last, on a GPU"
    if any(parameter is not None and parameter.dtype != x.dtype for parameter in parameters):
        return "dtype", "input, weight and bias differ in dtype"
    sizes = [size for size in map(hint_of, x.shape) if size is not None]
    fits = len(sizes) == 4 and _C.has_group_norm(*sizes, ops.dtype_name(x.dtype), ops.device_info(x.device))  # type: ignore[call-arg, arg-type]
    return None if fits else ("no_kernel", "its kernels do not fit the sizes")


def _as_group_norm(match: Match, asked: Asked, edit: Editor) -> fx.Node:
    return edit.emit(ops.group_norm_op, *match.found["call"], "none")


GROUP_NORM = Rewrite(
    "group norm", (aten.native_group_norm.default,), _find_group_norm, _group_norm_obstacle, _as_group_norm
)


def _find_norm_activation(node: fx.Node, asked: Asked) -> Match | None:
    x, *rest = node.args
    if not isinstance(x, fx.Node) or x.target is not ops.group_norm_op or len(x.users) > 1 or x.args[-1] != "none":
        return None
    name = next(name for name, (operator, *_) in NORM_ACTIVATIONS.items() if operator is node.target)
    return Match(node, x, {"name": name}) if tuple(rest) == NORM_ACTIVATIONS[name][1:] else None


def _norm_activation(match: Match, asked: Asked, edit: Editor) -> fx.Node:
    assert match.conv is not None
    return edit.emit(ops.group_norm_op, *match.conv.args[:-1], match.found["name"])


NORM_ACTIVATION = Rewrite(
    "group norm's activation", tuple(target for target, *_ in NORM_ACTIVATIONS.values()), _find_norm_activation,
    never, _norm_activation,
)  # fmt: skip


def _find_nothing(node: fx.Node, asked: Asked) -> Match | None:
    target, (x, number), _ = read(node)
    does_nothing = not isinstance(number, fx.Node) and number == (0 if target is aten.add.Tensor else 1)
    alone = does_nothing and call_of(x) is not None and len(x.users) == 1
    return Match(node, found={"value": x}) if alone else None


def _same_value(match: Match, asked: Asked, edit: Editor) -> fx.Node:
    return match.found["value"]  # type: ignore[no-any-return]


# Models that scale a residual sum divide by one where they do not, and sums of branches begin or end with zero: a pass
# over memory between two of our operators.
NOTHING = Rewrite("nothing", (aten.div.Tensor, aten.mul.Tensor, aten.add.Tensor), _find_nothing, never, _same_value)

EPILOGUE = (BATCH_NORM, RESIDUAL, ACTIVATION, MAX_POOL)
BEHIND = (GROUP_NORM, NORM_ACTIVATION, NOTHING)
