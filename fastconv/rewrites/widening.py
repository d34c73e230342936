"""Channels that fill whole accesses. Kernels read and write 16 bytes at once, and most fit no problem whose channels
are not a multiple of that. A frozen convolution with other numbers of channels gets filters and biases of zeros where
the planner expects it to be faster so: its value has channels of zeros behind its own, which convolutions behind it
read, and add, with theirs; everybody else reads the range before them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fastconv import ops
from fastconv.rewrites.choosing import norm_before
from fastconv.rewrites.concatenation import is_made_there
from fastconv.rewrites.convolution import Asked, Call, call_of, is_channels_last, is_static, plan_of
from fastconv.rewrites.editor import Editor, value_of

aten = torch.ops.aten

_LAUNCH_US = 2.0  # of a pass that nothing else is in


def widen(graph: fx.Graph, asked: Asked, edit: Editor) -> None:
    """Rewrites the graph in place: before anything is packed, after concatenations, whose ranges are whole accesses."""
    if not (asked.packed and asked.scatters):
        return
    wide: dict[fx.Node, fx.Node] = {}  # by value: the one with channels of zeros behind its own
    for node in list(graph.nodes):
        call = call_of(node)
        if call is None or not _can_widen(node, call):
            continue
        new = call._replace(**_operands(edit.evaluate_call, call, lambda value: _padded(edit.evaluate_call, value, 1)))
        if not _pays(node, call, new, wide):
            continue

        def widened(value: fx.Node) -> fx.Node:
            if _channels(value) == value_of(value).shape[1]:
                return value
            if value not in wide:
                wide[value] = _written(edit, value)
            return wide[value]

        with graph.inserting_before(node):
            y = edit.emit(ops.conv2d_op, *call._replace(**_operands(edit.emit, call, widened)))
            y.meta["fastconv"] = node.meta.get("fastconv")
            k = value_of(node).shape[1]
            new_value = y if value_of(y).shape[1] == k else edit.emit(aten.slice.Tensor, y, 1, 0, k)
        if new_value is not y:
            wide[new_value] = y
        edit.replace(node, new_value)
        edit.erase(node)
    edit.refresh()


def _can_widen(node: fx.Node, call: Call) -> bool:
    tensors = [call.input, call.weight, *([call.residual] if call.residual is not None else [])]
    if call.groups != 1 or not all(map(is_static, tensors)) or not is_channels_last(call):
        return False
    is_returned = any(user.op == "output" for user in node.users)
    if value_of(call.input).numel() == 0 or (is_returned and _channels(node) != value_of(node).shape[1]):
        return False  # whoever gets it expects a tensor of its own
    # A norm that the kernels can read through stays before the convolution.
    return call.residual is not None or norm_before(call.input) is None


def _channels(value: Any) -> int:
    """The next number of channels that is whole accesses."""
    x = value_of(value)
    step = max(1, 16 // x.element_size())
    return int(-(-x.shape[1] // step) * step)


def _padded(emit: Callable[..., Any], value: Any, dim: int) -> Any:
    """With zeros behind what it has along a dimension, so many that they are whole accesses."""
    x = value_of(value)
    step = max(1, 16 // x.element_size())
    missing = -x.shape[dim] % step
    return emit(aten.constant_pad_nd.default, value, [0, 0] * (x.dim() - 1 - dim) + [0, missing]) if missing else value


def _written(edit: Editor, value: fx.Node) -> fx.Node:
    """The same of an image, as ranges of a tensor in channels_last: to pad it, some releases of Inductor copy it."""
    x = value_of(value)
    (n, k, *size), channels = x.shape, _channels(value)
    zeros = edit.emit(aten.full.default, [n, channels - k, *size], 0.0, dtype=x.dtype, device=x.device)
    written = edit.emit(ops.channel_scatter_op, value, edit.empty_channels(x, channels), 0)
    return edit.emit(ops.channel_scatter_op, zeros, written, k)


def _operands(emit: Callable[..., Any], call: Call, widened: Callable[[Any], Any]) -> dict[str, Any]:
    weight = _padded(emit, _padded(emit, call.weight, 1), 0)
    bias = None if call.bias is None else _padded(emit, call.bias, 0)
    residual = None if call.residual is None else widened(call.residual)
    return {"input": widened(call.input), "weight": weight, "bias": bias, "residual": residual}


def _pays(node: fx.Node, call: Call, new: Call, wide: dict[fx.Node, fx.Node]) -> bool:
    """Whether the planner expects it to be faster, with the passes that widen what no convolution has; for convolutions
    behind it, or where it adds what is wide, slower by less than the pass that it spares."""
    if value_of(new.weight).shape == value_of(call.weight).shape:
        return False
    before, after = plan_of(call), plan_of(new)
    assert before is not None
    assert after is not None
    values = dict.fromkeys(value for value in (call.input, call.residual) if value is not None)
    us = after["cost_us"] + sum(_pass_us(value, wide) for value in values)
    is_wanted = call.residual in wide or any(map(call_of, node.users))
    return bool(us < before["cost_us"] or (is_wanted and us <= before["cost_us"] + _copy_us(value_of(node))))


def _pass_us(value: fx.Node, wide: dict[fx.Node, fx.Node]) -> float:
    if value in wide or _channels(value) == value_of(value).shape[1] or is_made_there(value):
        return 0.0
    return _copy_us(value_of(value))


def _copy_us(x: Tensor) -> float:
    return _LAUNCH_US + 2e6 * x.numel() * x.element_size() / ops.device_info(x.device).bandwidth_bytes_per_s
