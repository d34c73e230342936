"""Factors and summands of channels behind a convolution, folded into its filters and biases as a norm is.

    conv(x) * scale        conv(x) + shift        a number, or one for each channel, that no input of a call changes
    conv(x) / scale        conv(x) - shift        shift - conv(x)

So are norms that a model writes out (FrozenBatchNorm2d of detectors), layer scales, and the factors of residual
branches. Where weights are constants: in float64, together with a norm before them, and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fastconv.rewrites.constants import known
from fastconv.rewrites.convolution import Asked
from fastconv.rewrites.editor import Editor, Obstacle, read, value_of
from fastconv.rewrites.folding import Filters, double, exact, range_obstacle, rounded
from fastconv.rewrites.patterns import Match, Rewrite, grown, open_call

aten = torch.ops.aten


def constant_of(node: Any, channels: int, weight: Tensor, before: Any, after: Any) -> Any:
    """The node, if it is one number, or one for each of these channels, and a value that it is multiplied with or added
    to keeps its shape and dtype. `before` and `after`: that value; None in a graph of modules, of which the constant is
    returned itself."""
    if not isinstance(node, fx.Node) or not node.meta.get("constant"):
        return None
    c = value_of(node)
    if before is None:  # the layer looks at the shapes that come
        (node,) = (c,) = known([node]) or [None]
        is_alike = isinstance(c, Tensor) and c.dim() <= 4 and _keeps_dtype(c, weight)
    else:
        is_alike = isinstance(c, Tensor) and (before.shape, before.dtype) == (after.shape, after.dtype)
    if not is_alike or c.device != weight.device:
        return None
    return node if c.numel() == 1 or (c.dim() in (3, 4) and c.shape[-3] == c.numel() == channels) else None


def _keeps_dtype(c: Tensor, weight: Tensor) -> bool:
    """Whether the result has that of a convolution's weight, or under autocast what `FusedConv2d` makes of it."""
    return c.dtype == weight.dtype or (c.dim() == 0 and torch.result_type(weight, c) == weight.dtype)


def _find(node: fx.Node, places: Sequence[int], left: Sequence[int]) -> Match | None:
    """places: where the convolution may stand; left: numbers that are not folded."""
    _, args, kwargs = read(node)
    if len(args) != 2 or kwargs:
        return None
    for conv, other in ((args[place], args[1 - place]) for place in places):
        call = open_call(conv)
        if call is None or call.residual is not None:
            continue
        if isinstance(other, (int, float)):
            # Of a value that is read again it is a step of an activation, which nobody expects in there.
            constant = None if other in left or len(conv.users) > 1 else other
        else:
            weight = value_of(call.weight)
            constant = constant_of(other, weight.shape[0], weight, value_of(conv), value_of(node))
        if constant is not None:
            filters: tuple[Filters, ...] = conv.meta.get("filters") or ()
            # Of branches that are one convolution by now: what they were rounded to.
            fields = filters[0] if len(filters) == 1 else Filters(call.weight, call.bias)
            return Match(node, conv, {"folded": (call.weight, constant, *fields)})
    return None


def by_channel(emit: Callable[..., Any], constant: Any, channels: int, device: torch.device) -> Any:
    """A constant as a number for each of these channels, in float64."""
    if isinstance(constant, (int, float)):
        return emit(aten.full.default, [channels], float(constant), dtype=torch.float64, device=device)
    return emit(aten.expand.default, emit(aten.reshape.default, double(emit, constant), [-1]), [channels])


def _scaled(emit: Callable[..., Any], c: Any, filters: Filters) -> Filters:
    def times(value: Any, factor: Any = c) -> Any:
        return None if value is None else emit(aten.mul.Tensor, double(emit, value), factor)

    if filters.variance is not None:
        return filters._replace(gamma=c if filters.gamma is None else times(filters.gamma), beta=times(filters.beta))
    weight = times(filters.weight, emit(aten.reshape.default, c, [-1, 1, 1, 1]))
    return filters._replace(weight=weight, bias=times(filters.bias))


def _shifted(emit: Callable[..., Any], c: Any, filters: Filters) -> Filters:
    name = "bias" if filters.variance is None else "beta"
    before = getattr(filters, name)
    return filters._replace(**{name: c if before is None else emit(aten.add.Tensor, double(emit, before), c)})


def _subtracted(emit: Callable[..., Any], c: Any, filters: Filters) -> Filters:
    weight = value_of(filters.weight)
    return _shifted(emit, c, _scaled(emit, by_channel(emit, -1.0, weight.shape[0], weight.device), filters))


def _unknown_obstacle(factor: Any, dtype: torch.dtype) -> Obstacle | None:
    """Whether a factor may push filters that nobody knows out of the range of float16."""
    is_near = isinstance(factor, (int, float)) and 2**-4 <= abs(factor) <= 2**4
    return (
        None if is_near or dtype != torch.float16 else ("norm_range", f"scaled filters may leave the range of {dtype}")
    )


def _rewrite(
    part: str, target: Any, change: Callable[..., Filters], inverse: Any = None, places: Sequence[int] = (0, 1),
    left: Sequence[int] = (),
) -> Rewrite:  # fmt: skip
    """inverse: the operator that makes of a constant the one that `change` takes. places, left: as `_find` takes
    them."""

    def find(node: fx.Node, asked: Asked) -> Match | None:
        return _find(node, places, left) if asked.packed else None

    def changed(emit: Callable[..., Any], weight: Any, constant: Any, *fields: Any) -> Filters:
        w = value_of(weight)
        c = by_channel(emit, constant, w.shape[0], w.device)
        return change(emit, c if inverse is None else emit(inverse, c), Filters(*fields))

    def in_double(emit: Callable[..., Any], *arguments: Any) -> tuple[Any, Any]:
        return exact(emit, changed(emit, *arguments))

    def folded(emit: Callable[..., Any], weight: Any, *arguments: Any) -> tuple[Filters, Any, Any]:
        filters = changed(emit, weight, *arguments)
        new, bias = rounded(emit, exact(emit, filters), value_of(weight).dtype)
        return filters, new, bias

    def obstacle(match: Match, asked: Asked) -> Obstacle | None:
        weight, constant, *_ = arguments = match.found["folded"]
        dtype = value_of(weight).dtype
        if known(arguments) is not None:
            return range_obstacle(in_double, arguments, dtype)
        return _unknown_obstacle(constant, dtype) if part == "scale" else None

    def replacement(match: Match, asked: Asked, edit: Editor) -> fx.Node:
        filters, weight, bias = edit.once(folded, *match.found["folded"])
        node = grown(match, edit, part, weight=weight, bias=bias)
        node.meta["filters"] = (filters,)
        return node

    return Rewrite(part, (target,), find, obstacle, replacement)


# Left: numbers that change nothing, and a factor of zero, which filters would not make NaN of what is infinite.
SCALING = (
    _rewrite("scale", aten.mul.Tensor, _scaled, left=(0, 1)),
    _rewrite("scale", aten.div.Tensor, _scaled, aten.reciprocal.default, places=(0,), left=(0, 1)),
    _rewrite("shift", aten.add.Tensor, _shifted, left=(0,)),
    _rewrite("shift", aten.sub.Tensor, _shifted, aten.neg.default, places=(0,), left=(0,)),
    _rewrite("scale+shift", aten.sub.Tensor, _subtracted, places=(1,)),
)
