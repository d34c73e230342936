"""Channels that fill whole accesses. Kernels read and write 16 bytes at once, and most fit no problem whose channels
are not a multiple of that. A frozen convolution with other numbers of channels gets filters and biases of zeros where
the planner expects it to be faster so: its value has channels of zeros behind its own, which convolutions behind it
read, and add, with theirs; everybody else reads the range before them. In graphs that Inductor or `fastconv.fuse`
lowers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fastconv import _C, ops
from fastconv.rewrites.choosing import norm_before
from fastconv.rewrites.concatenation import is_made_there, takes_strides
from fastconv.rewrites.convolution import Asked, Call, call_of, is_channels_last, is_like_output, is_static, plan_of
from fastconv.rewrites.editor import Editor, is_written, value_of

aten = torch.ops.aten


def widen(graph: fx.Graph, asked: Asked, edit: Editor) -> None:
    """Rewrites the graph in place: before anything is packed, after concatenations, whose ranges are whole accesses."""
    if not (asked.packed and asked.scatters):
        return
    wide: dict[fx.Node, fx.Node] = {}  # by value: the one with channels of zeros behind its own
    for node in list(graph.nodes):
        call = call_of(node)
        if call is None or not edit.can_widen(node) or not _can_widen(node, call):
            continue
        emit = edit.evaluate_call
        images = (None if value is None else padded(emit, value, 1) for value in (call.input, call.residual))
        if not _pays(node, call, _wider(emit, call, *images), wide):
            continue
        with graph.inserting_before(node):
            x, residual = _widened(edit, call.input, wide), call.residual
            residual = None if residual is None else _widened(edit, residual, wide)
            make = functools.partial(_emit, edit, call, x, residual)
            y = edit.widened(node, x, residual, make)
            y.meta["fastconv"] = node.meta.get("fastconv")
            k = value_of(node).shape[1]
            new_value = y if value_of(y).shape[1] == k else edit.emit(aten.slice.Tensor, y, 1, 0, k)
        if new_value is not y:
            wide[new_value] = y
        edit.replace(node, new_value)
        edit.erase(node)
    edit.refresh()


def missing_channels(x: Tensor, dim: int = 1) -> int:
    """How many are missing behind what it has along a dimension to be whole accesses."""
    return int(-x.shape[dim] % max(1, 16 // x.element_size()))


def padded(emit: Callable[..., Any], value: Any, dim: int) -> Any:
    """With zeros behind what it has along a dimension, so many that they are whole accesses."""
    x = value_of(value)
    missing = missing_channels(x, dim)
    return emit(aten.constant_pad_nd.default, value, [0, 0] * (x.dim() - 1 - dim) + [0, missing]) if missing else value


def filters(emit: Callable[..., Any], weight: Any, bias: Any) -> tuple[Any, Any]:
    """Filters and biases of a wide convolution."""
    return padded(emit, padded(emit, weight, 1), 0), None if bias is None else padded(emit, bias, 0)


def _wider(emit: Callable[..., Any], call: Call, x: Any, residual: Any) -> Call:
    weight, bias = filters(emit, call.weight, call.bias)
    return call._replace(input=x, residual=residual, weight=weight, bias=bias)


def _emit(edit: Editor, call: Call, x: Any, residual: Any) -> fx.Node:
    return edit.emit(ops.conv2d_op, *_wider(edit.emit, call, x, residual))


def _widened(edit: Editor, value: fx.Node, wide: dict[fx.Node, fx.Node]) -> fx.Node:
    missing = missing_channels(value_of(value))
    if missing and value not in wide:
        wide[value] = edit.padded(value, value_of(value).shape[1] + missing)
    return wide.get(value, value)


def _can_widen(node: fx.Node, call: Call) -> bool:
    images = [node, call.input, *([call.residual] if call.residual is not None else [])]
    if call.groups != 1 or not all(map(is_static, (*images, call.weight))) or value_of(node).dim() != 4:
        return False
    if call.residual is not None and not is_like_output(call, value_of(call.residual)):
        return False  # broadcast, or promoted, by PyTorch
    if not is_channels_last(call) or value_of(call.input).numel() == 0 or any(map(is_written, images)):
        return False
    if missing_channels(value_of(node)) and any(user.op == "output" for user in node.users):
        return False  # whoever gets it expects a tensor of its own
    # A norm that the kernels can read through stays before the convolution.
    return call.residual is not None or norm_before(call.input) is None


def _pays(node: fx.Node, call: Call, new: Call, wide: dict[fx.Node, fx.Node]) -> bool:
    """Whether the planner expects it to be faster, with the passes that widen what no convolution has, and those of who
    cannot read a range; for convolutions behind it, or where it adds what is wide, slower by less than the pass that it
    spares."""
    if value_of(new.weight).shape == value_of(call.weight).shape:
        return False
    before, after = plan_of(call), plan_of(new)
    assert before is not None
    assert after is not None
    values = dict.fromkeys(value for value in (call.input, call.residual) if value is not None)
    us = after["cost_us"] + sum(_pass_us(value, wide) for value in values)
    if missing_channels(value_of(node)):
        us += _copy_us(value_of(node)) * sum(call_of(user) is None and not takes_strides(user) for user in node.users)
    is_wanted = call.residual in wide or any(map(call_of, node.users))
    return bool(us < before["cost_us"] or (is_wanted and us <= before["cost_us"] + _copy_us(value_of(node))))


def _pass_us(value: fx.Node, wide: dict[fx.Node, fx.Node]) -> float:
    if value in wide or not missing_channels(value_of(value)) or is_made_there(value):
        return 0.0
    return _copy_us(value_of(value))


def _copy_us(x: Tensor) -> float:
    size = x.numel() * x.element_size()
    return _C.pass_us(size, size, ops.device_info(x.device))
