"""Constants before a convolution, folded into its filters and biases.

    conv(x * scale)        conv(x + shift)        a number, or one for each channel, that no input of a call changes
    conv(x / scale)        conv(x - shift)
    conv(batch norm(x))                           with running statistics

What shifts goes into a convolution without padding alone: its zeros would not be shifted; and not in class tf32, which
would round x to ten bits where it rounds what a subtraction leaves. So are the normalisation of
images and the factors of networks without norms. Where weights are constants and nobody else reads the values between:
in float64, rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fastconv import ops, settings
from fastconv.rewrites.choosing import norm_before
from fastconv.rewrites.constants import computing, known
from fastconv.rewrites.convolution import Asked, Call, call_of
from fastconv.rewrites.editor import Editor, read, spelled, value_of, written_between
from fastconv.rewrites.folding import Filters, double, norm_obstacle, range_obstacle, rounded, scale_and_shift
from fastconv.rewrites.patterns import Match, Rewrite, never
from fastconv.rewrites.scaling import by_channel, constant_of

aten = torch.ops.aten

_PARTS = {aten.mul.Tensor: "scale", aten.div.Tensor: "scale", aten.add.Tensor: "shift", aten.sub.Tensor: "shift"}
# The most that a norm may subtract, in standard deviations: kernels round what they then read to as many digits as what
# it would have left.
_SHIFT_LIMIT = 8


class _Step(NamedTuple):
    """A value before a convolution, computed of x and constants."""

    x: fx.Node
    part: str
    target: Any  # the operator; None: a norm
    numbers: tuple[Any, ...]  # its constant; of a norm gamma, beta, mean, variance and epsilon


def _step(value: Any, call: Call) -> _Step | None:
    if not isinstance(value, fx.Node) or spelled(value).obstacle is not None or spelled(value).writes:
        return None
    weight = value_of(call.weight)
    channels = weight.shape[1] * call.groups
    norm = norm_before(value)
    if norm is not None:
        _, _, mean, variance = norm.parameters
        fits = norm.activation == "none" and norm_obstacle(weight, norm.parameters, channels) is None
        fits = fits and _is_near(mean, variance, norm.epsilon)
        return _Step(norm.x, "bn", None, (*norm.parameters, norm.epsilon)) if fits else None
    target, args, kwargs = read(value)
    if target not in _PARTS or len(args) != 2 or kwargs:
        return None
    for x, other in (args, args[::-1])[: 1 if target in (aten.div.Tensor, aten.sub.Tensor) else 2]:
        if not isinstance(x, fx.Node) or x.meta.get("constant"):
            continue
        before, after = value_of(x), value_of(value)
        constant = other if isinstance(other, (int, float)) else constant_of(other, channels, weight, before, after)
        if before is None:
            # x may be integers, of which only a quotient, or what is computed with a fraction, is a fraction.
            is_fraction = constant.is_floating_point() if isinstance(constant, Tensor) else isinstance(constant, float)
            is_alike = is_fraction or target is aten.div.Tensor
        else:
            is_alike = (before.shape, before.dtype) == (after.shape, after.dtype)
        if constant is not None and is_alike:
            return _Step(x, _PARTS[target], target, (constant, None, None, None, None))
    return None


@computing()
def _is_near(mean: Any, variance: Any, epsilon: float) -> bool:
    values = known((mean, variance))
    return values is not None and bool((values[0].abs() <= _SHIFT_LIMIT * (values[1] + epsilon).sqrt()).all())


def _by_input(emit: Callable[..., Any], w: Any, c: Any, groups: int) -> Any:
    """Filters times a number for each channel of the input."""
    k, of_group, r, s = value_of(w).shape
    grouped = emit(aten.reshape.default, w, [groups, k // groups, of_group, r, s])
    product = emit(aten.mul.Tensor, grouped, emit(aten.reshape.default, c, [groups, 1, of_group, 1, 1]))
    return emit(aten.reshape.default, product, [k, of_group, r, s])


def _factors(emit: Callable[..., Any], weight: Tensor, groups: int, target: Any, *numbers: Any) -> tuple[Any, Any]:
    """scale and shift of a step, None for those that it has not."""
    if target is None:
        return scale_and_shift(emit, *numbers)
    c = by_channel(emit, numbers[0], weight.shape[1] * groups, weight.device)
    if target is aten.div.Tensor:
        c = emit(aten.reciprocal.default, c)
    if target is aten.sub.Tensor:
        c = emit(aten.neg.default, c)
    return (c, None) if _PARTS[target] == "scale" else (None, c)


def _exact(emit: Callable[..., Any], weight: Any, bias: Any, groups: int, *fields: Any) -> tuple[Any, Any]:
    """Filters and biases in float64; `fields`: operator and numbers of each step, one after the other, the last step
    first."""
    w, b = double(emit, weight), None if bias is None else double(emit, bias)
    for i in range(0, len(fields), 6):
        scale, shift = _factors(emit, value_of(weight), groups, *fields[i : i + 6])
        if shift is not None:
            added = emit(aten.sum.dim_IntList, _by_input(emit, w, shift, groups), [1, 2, 3])
            b = added if b is None else emit(aten.add.Tensor, b, added)
        if scale is not None:
            w = _by_input(emit, w, scale, groups)
    return w, b


def _folded(emit: Callable[..., Any], weight: Any, *arguments: Any) -> tuple[Filters, Any, Any]:
    filters = Filters(*_exact(emit, weight, *arguments))
    new, bias = rounded(emit, filters[:2], value_of(weight).dtype)
    return filters, new, bias


def _may_round(call: Call) -> bool:
    """Whether x is rounded to TF32, here or on the GPU that a module from the CPU may be moved to."""
    weight = value_of(call.weight)
    moves = not weight.is_cuda and torch.cuda.is_available()
    return weight.dtype is torch.float32 and "tf32" in (call.precision, settings.cuda_precision() if moves else "")


def _find(node: fx.Node, asked: Asked) -> Match | None:
    call = call_of(node)
    if not asked.packed or call is None or spelled(node).obstacle is not None:
        return None
    shifts = not (any(call.padding) or spelled(node).pads is not None or _may_round(call))
    x, steps, gone = call.input, list[_Step](), list[fx.Node]()
    arguments: tuple[Any, ...] = (call.weight, call.bias, call.groups)
    while x is not call.residual and len(x.users) == 1 and written_between(x, node) is None:
        step = _step(x, call)
        if step is None or not (shifts or step.part == "scale"):
            break
        if any(spelled(user).writes and user.args[0] is step.x for user in step.x.users):
            break  # the convolution would keep it for its gradient
        more = (*arguments, step.target, *step.numbers)
        if known(more) is None or range_obstacle(_exact, more, value_of(call.weight).dtype) is not None:
            break
        steps.append(step)
        gone.append(x)
        x, arguments = step.x, more
    found = {"call": call, "x": x, "steps": steps, "folded": arguments}
    return Match(node, found=found, taken=node.meta.get("fastconv"), gone=tuple(gone)) if steps else None


def _fold(match: Match, asked: Asked, edit: Editor) -> fx.Node:
    call: Call = match.found["call"]
    steps: list[_Step] = match.found["steps"]
    filters, weight, bias = edit.once(_folded, *match.found["folded"])
    x = edit.operand(match.found["x"], [step.numbers[0] for step in steps if step.target is not None], call.weight)
    new = edit.convolution(match.node, match.node, call._replace(input=x, weight=weight, bias=bias))
    if match.taken is not None:
        match.taken.parts[:0] = [step.part for step in reversed(steps)]
    new.meta |= {"fastconv": match.taken, "filters": (filters,)}
    return new


PRECEDING = Rewrite("preceding", (ops.conv2d_op,), _find, never, _fold)
