"""Parallel branches: a sum of convolutions of one input, and of that input itself, is one convolution.

    [norm](conv 3x3 (x)) + [norm](conv 1x1 (x)) + [norm](x)      ->      conv 3x3 (x)

Convolution is linear in its filters. Those of a smaller kernel whose centre is that of the largest one are padded with
zeros; the input itself is a 1x1 kernel of unit filters. So are the blocks of RepVGG, ACNet and MobileOne as they were
trained. Where weights are constants: the sum is computed once, in float64, with the norms folded, and rounded once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

from fastconv.rewrites.convolution import Asked, Call, Taken, call_of
from fastconv.rewrites.editor import Editor, read, spelled, value_of, written_between
from fastconv.rewrites.folding import Filters, exact, norm_obstacle, range_obstacle, rounded
from fastconv.rewrites.patterns import Match, Rewrite, first_output, never

aten = torch.ops.aten


class _Branches(NamedTuple):
    """A convolution and what is added to it, before and now."""

    node: fx.Node
    call: Call
    filters: tuple[Filters, ...]


def _branches(node: Any) -> _Branches | None:
    """What a convolution sums up already, if nobody else reads it and there is room for more."""
    call = call_of(node)
    if call is None or call.activation != "none" or call.max_pool or len(node.users) > 1:
        return None
    if spelled(node).obstacle is not None or spelled(node).pads is not None:
        return None
    filters = node.meta.get("filters") or (Filters(call.weight, call.bias),)
    if call.residual is not None:
        if call.residual is not call.input or not _keeps_size(call):
            return None
        filters += (Filters(),)
    return _Branches(node, call._replace(residual=None, residual_after=False), filters)


def _keeps_size(call: Call) -> bool:
    """Whether the input itself, 1x1 at stride 1, has the kernel's centre and the output's channels."""
    k, c_per_group, *kernel = value_of(call.weight).shape
    centred = all(
        size % 2 == 1 and 2 * padding == dilation * (size - 1)
        for size, padding, dilation in zip(kernel, call.padding, call.dilation, strict=True)
    )
    return centred and k == c_per_group * call.groups and list(call.stride) == [1, 1]


def _is_inside(inner: Call, outer: Call) -> bool:
    """Whether the kernels have one centre, and the outer one all taps of the inner one, in a call that is the same."""
    a, b = value_of(inner.weight), value_of(outer.weight)
    if (a.shape[:2], a.dtype, a.device) != (b.shape[:2], b.dtype, b.device):
        return False
    for i, (small, large) in enumerate(zip(a.shape[2:], b.shape[2:], strict=True)):
        margin, rest = divmod(large - small, 2)
        same_taps = small == 1 or inner.dilation[i] == outer.dilation[i]
        if margin < 0 or rest or not same_taps or outer.padding[i] - inner.padding[i] != margin * outer.dilation[i]:
            return False
    shared = {"weight": outer.weight, "bias": outer.bias, "padding": outer.padding, "dilation": outer.dilation}
    return inner._replace(**shared) == outer  # type: ignore[arg-type]


def _input_branch(node: Any, call: Call) -> tuple[Filters, tuple[fx.Node, ...]] | None:
    """The filters of a branch that is the convolution's input, or a norm of it that nobody else reads; and its
    nodes."""
    if not isinstance(node, fx.Node) or not _keeps_size(call):
        return None
    if node is call.input:
        return Filters(), ()
    norm: Any = node.args[0] if node.target is operator.getitem else node
    target, args, _ = read(norm)
    if target is not aten._native_batch_norm_legit_no_training.default or first_output(norm) is not node:
        return None
    x, *parameters, _, epsilon = args
    if x is not call.input or len(node.users) > 1 or spelled(norm).obstacle is not None:
        return None
    if norm_obstacle(value_of(call.weight), parameters) is not None:
        return None
    gamma, beta, mean, variance = parameters
    return Filters(None, None, gamma, beta, mean, variance, epsilon), (node, norm)


def _find(node: fx.Node, asked: Asked) -> Match | None:
    _, args, kwargs = read(node)
    if not asked.packed or len(args) != 2 or kwargs.get("alpha", 1) != 1 or args[0] is args[1]:
        return None
    found = [branches for arg in args if (branches := _branches(arg)) is not None]
    gone: tuple[fx.Node, ...]
    if len(found) == 2:
        found.sort(key=lambda each: value_of(each.call.weight).numel(), reverse=True)
        outer, inner = found
        fits, added, gone = _is_inside(inner.call, outer.call), inner.filters, (inner.node,)
    elif len(found) == 1:
        outer = found[0]
        other = _input_branch(args[1] if args[0] is outer.node else args[0], outer.call)
        if other is None:
            return None
        fits, added, gone = True, other[:1], other[1]
    else:
        return None
    filters = (*outer.filters, *added)
    # A convolution and its input alone are a residual, which costs little and is not rounded with the filters.
    if not fits or sum(not each.is_input for each in filters) < 2:
        return None
    first = min(outer.node, *gone) if gone else outer.node
    over_input = spelled(node).writes and args[0] is outer.call.input
    if over_input or written_between(first, node) is not None:
        return None
    arguments = (outer.call.weight, outer.call.groups, *(each for one in filters for each in one))
    if range_obstacle(_sum, arguments, value_of(outer.call.weight).dtype) is not None:
        return None
    taken: Taken | None = outer.node.meta.get("fastconv")
    return Match(node, taken=taken, found={"outer": outer, "filters": filters}, gone=(outer.node, *gone))


def _sum(emit: Callable[..., Any], weight: Any, groups: int, *fields: Any) -> tuple[Any, Any]:
    """Filters and biases in float64 of branches whose largest kernel is that of `weight`; `fields`: of each branch's
    `Filters`, one after the other."""
    count = len(Filters._fields)
    total: list[Any] = [None, None]
    c_per_group, *kernel = value_of(weight).shape[1:]
    for i in range(0, len(fields), count):
        branch = Filters(*fields[i : i + count])
        if branch.weight is None:
            ones = emit(aten.new_ones.default, weight, [c_per_group], dtype=torch.float64)
            unit = emit(aten.reshape.default, emit(aten.diag_embed.default, ones), [c_per_group, c_per_group, 1, 1])
            branch = branch._replace(weight=emit(aten.repeat.default, unit, [groups, 1, 1, 1]))
        weight_and_bias = exact(emit, branch)
        own = value_of(branch.weight).shape[2:]
        margin = [(large - small) // 2 for large, small in zip(kernel, own, strict=True) for _ in range(2)]
        if any(margin):
            padded = emit(aten.constant_pad_nd.default, weight_and_bias[0], margin[::-1])
            weight_and_bias = padded, weight_and_bias[1]
        total = [
            new if old is None else old if new is None else emit(aten.add.Tensor, old, new)
            for old, new in zip(total, weight_and_bias, strict=True)
        ]
    return total[0], total[1]


def _rounded(emit: Callable[..., Any], weight: Any, *rest: Any) -> list[Any]:
    return rounded(emit, _sum(emit, weight, *rest), value_of(weight).dtype)


def _merge(match: Match, asked: Asked, edit: Editor) -> fx.Node:
    outer: _Branches = match.found["outer"]
    filters: tuple[Filters, ...] = match.found["filters"]
    fields = (each for one in filters for each in one)
    weight, bias = edit.once(_rounded, outer.call.weight, outer.call.groups, *fields)
    node = edit.convolution(outer.node, match.node, outer.call._replace(weight=weight, bias=bias))
    node.meta["filters"] = filters
    node.meta["adds_input"] = any(one.weight is None for one in filters)
    if match.taken is not None:
        match.taken.parts[:] = [
            part
            for one in filters
            for part in ("identity" if one.weight is None else "conv", *(["bn"] if one.variance is not None else []))
        ]
    node.meta["fastconv"] = match.taken
    return node


BRANCHES = Rewrite("branches", (aten.add.Tensor,), _find, never, _merge)
