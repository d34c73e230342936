"""Factors and summands of channels behind a convolution, folded into its filters and biases as a norm is.

    conv(x) * scale        conv(x) + shift        a number, or one for each channel, that no input of a call changes

So are norms that a model writes out (FrozenBatchNorm2d of detectors), layer scales, and the factors of residual
branches. Where weights are constants: in float64, together with a norm before them, and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fastconv.rewrites.constants import known
from fastconv.rewrites.convolution import Asked
from fastconv.rewrites.editor import Editor, Obstacle, value_of
from fastconv.rewrites.folding import Filters, double, exact, range_obstacle, rounded
from fastconv.rewrites.patterns import Match, Rewrite, grown, open_call

aten = torch.ops.aten


def _is_constant(node: Any, conv: fx.Node, result: Tensor) -> bool:
    """Whether it is one number, or one for each channel of a convolution, and the result has the output's dtype."""
    if not isinstance(node, fx.Node) or not node.meta.get("constant"):
        return False
    y, c = value_of(conv), value_of(node)
    if not isinstance(c, Tensor) or c.device != y.device or (result.shape, result.dtype) != (y.shape, y.dtype):
        return False
    return c.numel() == 1 or (c.dim() in (3, 4) and c.shape[-3] == c.numel() == y.shape[1])


def _find(node: fx.Node, asked: Asked) -> Match | None:
    args = node.args
    if not asked.packed or len(args) != 2 or node.kwargs:
        return None
    for conv, other in (args, args[::-1]):
        call = open_call(conv)
        if call is None or call.residual is not None or (node.target is aten.div.Tensor and conv is not args[0]):
            continue
        is_factor = isinstance(other, (int, float)) and node.target is not aten.add.Tensor and other not in (0, 1)
        if is_factor and node.target is aten.div.Tensor:
            other = 1.0 / other  # type: ignore[operator]
        if is_factor or (node.target is not aten.div.Tensor and _is_constant(other, conv, value_of(node))):  # type: ignore[arg-type]
            filters = conv.meta.get("filters", ())  # type: ignore[union-attr]
            # Of branches that are one convolution by now: what they were rounded to.
            fields = filters[0] if len(filters) == 1 else Filters(call.weight, call.bias)
            return Match(node, conv, {"folded": (call.weight, other, *fields)})  # type: ignore[arg-type]
    return None


def _by_channel(emit: Callable[..., Any], constant: Any, weight: Tensor) -> Any:
    channels = [weight.shape[0]]
    if isinstance(constant, (int, float)):
        return emit(aten.full.default, channels, float(constant), dtype=torch.float64, device=weight.device)
    return emit(aten.expand.default, emit(aten.reshape.default, double(emit, constant), [-1]), channels)


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


def _unknown_obstacle(factor: Any, dtype: torch.dtype) -> Obstacle | None:
    """Whether a factor may push filters that nobody knows out of the range of float16."""
    is_near = isinstance(factor, (int, float)) and 2**-4 <= abs(factor) <= 2**4
    return (
        None if is_near or dtype != torch.float16 else ("norm_range", f"scaled filters may leave the range of {dtype}")
    )


def _rewrite(part: str, change: Callable[..., Filters], *targets: Any) -> Rewrite:
    def changed(emit: Callable[..., Any], weight: Any, constant: Any, *fields: Any) -> Filters:
        return change(emit, _by_channel(emit, constant, value_of(weight)), Filters(*fields))

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

    return Rewrite(part, targets, _find, obstacle, replacement)


SCALING = (
    _rewrite("scale", _scaled, aten.mul.Tensor, aten.div.Tensor),
    _rewrite("shift", _shifted, aten.add.Tensor),
)
