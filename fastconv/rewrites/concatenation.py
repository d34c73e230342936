"""Concatenations along channels without a copy, in graphs that Inductor or `fastconv.fuse` lowers.

In channels_last the values that are concatenated are ranges of channels of one tensor. `concatenate` makes that tensor
before the first of them, has each one written into its range where it is computed, and gives those who read the
concatenation, or the value, that range. Lists that are part of another one (a dense block concatenates all its values
again for each layer) are ranges of the longer one's tensor. A range is written once, by `ops.channel_scatter_op`;
`choosing` then has convolutions whose kernels can do that write it themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fastconv import ops
from fastconv.rewrites.choosing import can_stand_around, is_read_through, writes_range
from fastconv.rewrites.convolution import (
    Asked,
    Concatenation,
    call_of,
    is_aligned,
    is_channels_last,
    is_librarys,
    is_static,
    plan_of,
)
from fastconv.rewrites.editor import Editor, is_written, read, spelled, value_of
from fastconv.rewrites.patterns import ACTIVATIONS

aten = torch.ops.aten


@dataclass
class _List:
    """A concatenation: what it is of, those that are concatenated before taken apart."""

    node: fx.Node
    parts: list[fx.Node]


@dataclass
class _Buffer:
    """The tensor of a list, of which others are a part."""

    whole: _List
    lists: list[_List] = field(default_factory=list)  # all of them
    direct: set[fx.Node] = field(default_factory=set)  # those that write their range themselves

    @property
    def channels(self) -> int:
        return int(value_of(self.whole.node).shape[1])

    def begin(self, part: fx.Node) -> int:
        parts = self.whole.parts
        return sum(value_of(other).shape[1] for other in parts[: parts.index(part)])

    def holds(self, parts: list[fx.Node]) -> bool:
        """Whether the parts stand there one after the other."""
        first = self.whole.parts.index(parts[0]) if parts[0] in self.whole.parts else 0
        return self.whole.parts[first : first + len(parts)] == parts


def concatenate(graph: fx.Graph, asked: Asked, edit: Editor) -> list[Concatenation]:
    """Rewrites the graph in place. Returns a record of each concatenation along the channels of pictures."""
    if not asked.scatters:
        return []
    found, copies = [], []
    codes: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if _is_concatenation(node):
            found.append(_List(node, list(_flat(node))))
        elif node.target is aten.clone.default and not node.kwargs:
            copies.append(_List(node, list(_flat(node.args[0]))))  # what torch.cat of one is
    buffers: list[_Buffer] = []
    for each in sorted(found, key=lambda each: -len(each.parts)):
        code = codes[each.node] = _obstacle(each)
        if code:
            continue
        buffer = next((b for b in buffers if b.holds(each.parts)), None)
        if buffer is None:
            buffers.append(buffer := _Buffer(each))
        buffer.lists.append(each)
    for buffer in buffers:
        buffer.lists += [copy for copy in copies if buffer.holds(copy.parts) and not _obstacle(copy)]
    now: dict[fx.Node, fx.Node] = {}  # where a value is that has been written into a buffer
    for buffer in buffers:
        for each in list(buffer.lists):
            if each is not buffer.whole and (_is_returned(each.node) or not _reads_range(each.node, buffer.channels)):
                buffer.lists.remove(each)
                codes[each.node] = "readers"
        buffer.direct = {part for part in buffer.whole.parts if part not in now and _is_direct(part, buffer.channels)}
        if buffer.direct:
            _rewrite(graph, buffer, now, edit)
        else:
            codes.update((each.node, "producers") for each in buffer.lists)
    edit.refresh()
    return [Concatenation(each.node.name, codes[each.node]) for each in found]


def _is_concatenation(node: Any) -> bool:
    target, args, kwargs = read(node) if isinstance(node, fx.Node) else (None, (), {})
    if target is not aten.cat.default:
        return False
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    return value_of(node).dim() == 4 and dim in (1, -3)


def _flat(node: Any) -> Iterator[fx.Node]:
    """What is concatenated, also by those that are concatenated."""
    if not _is_concatenation(node):
        yield node
        return
    for part in read(node)[1][0]:
        yield from _flat(part)


def _obstacle(each: _List) -> str:
    """The code of what keeps it from being one tensor with ranges."""
    value, parts = value_of(each.node), [value_of(part) for part in each.parts]
    if not is_static(each.node) or value.numel() == 0:
        return "sizes"
    if not value.is_contiguous(memory_format=torch.channels_last):
        return "layout"
    if any(part.dtype != value.dtype or part.dim() != 4 for part in parts):
        return "dtype"
    if any(is_written(node) for node in (each.node, *each.parts)):
        return "in_place"
    if len(set(each.parts)) < len(parts):
        return "twice"  # a range for each of them would be read from and written to at once
    if not is_aligned(value, *(part.shape[1] for part in parts)):
        return "alignment"
    return ""


def _is_returned(node: fx.Node) -> bool:
    return any(user.op == "output" for user in node.users)


def _reads_range(node: fx.Node, channels: int, but: fx.Node | None = None) -> bool:
    """Whether those who read a value may read a range of so many channels in its place: of convolutions those whose
    kernels take one, all else that Inductor makes."""
    return all(_takes_range(user, node, channels) for user in node.users if user is not but)


def _takes_range(user: fx.Node, value: fx.Node, channels: int) -> bool:
    if user.target is aten.convolution.default or user.op == "output":
        return False
    call = call_of(user)
    if call is None:
        return "spelled" not in user.meta or (spelled(user).obstacle is None and _takes_strides(user))
    if call.input is not value or call.residual is value or not is_channels_last(call):
        return False
    row = plan_of(call, x_channels=channels)
    return row is not None and not is_librarys(row["algorithm"]) and not row["copies_x"]


def _takes_strides(user: fx.Node) -> bool:
    """Of a graph of modules: whether PyTorch's eager call reads a range as fast as a tensor. A norm copies it first, or
    is slow; a pool of ours copies it."""
    target = read(user)[0]
    if target is aten._native_batch_norm_legit_no_training.default:
        return is_read_through(user)
    return target is aten.cat.default or any(target is activation for activation, *_ in ACTIVATIONS.values())


def _is_made_there(part: fx.Node) -> bool:
    """Whether Inductor may compute the value where it is copied to, and nowhere else."""
    is_extern = part.target is aten.convolution.default or call_of(part) is not None or "spelled" in part.meta
    return part.op == "call_function" and not is_extern


def _is_direct(part: fx.Node, channels: int) -> bool:
    """Whether it is a convolution or an upsampling that writes its range itself, so that all its readers read that."""
    writes = is_upsampling(part) or (can_stand_around(call_of(part)) and writes_range(part, channels))
    return writes and _reads_range(part, channels)


def is_upsampling(node: Any) -> bool:
    """Whether it is a call of fastconv's layer for that, in a graph of modules."""
    is_layer = isinstance(node, fx.Node) and node.op == "call_module"
    is_wanted = is_layer and read(node)[0] is aten.upsample_nearest2d.vec
    return is_wanted and ops.dtype_name(value_of(node).dtype) != "other"


def _rewrite(graph: fx.Graph, buffer: _Buffer, now: dict[fx.Node, fx.Node], edit: Editor) -> None:
    order = sorted(buffer.whole.parts, key=lambda part: now.get(part, part))
    inputs = max(graph.find_nodes(op="placeholder"), default=next(iter(graph.nodes)))
    with graph.inserting_before(max(inputs.next, now.get(order[0], order[0]))):
        at = tensor = edit.empty_channels(value_of(buffer.whole.node), buffer.channels)
    written: dict[fx.Node, fx.Node] = {}  # by part: the tensor with that and all before it
    for part in order:
        value, begin = now.get(part, part), buffer.begin(part)
        at = max(at, value)
        following = at.next
        with graph.inserting_before(following):
            tensor = written[part] = edit.emit(ops.channel_scatter_op, value, tensor, begin)
            readers = [user for user in part.users if user is not tensor and _takes_range(user, part, buffer.channels)]
            if readers and value is part and (part in buffer.direct or _is_made_there(part)):
                now[part] = _range(edit, tensor, begin, value_of(part))
                edit.replace(part, now[part], readers)
        at = following.prev
    for each in buffer.lists:
        last = max(each.parts, key=order.index)
        with graph.inserting_before(each.node):
            new = written[last]
            if each is not buffer.whole:
                new = _range(edit, new, buffer.begin(each.parts[0]), value_of(each.node))
        edit.replace(each.node, new)
        edit.erase(each.node)


def _range(edit: Editor, tensor: fx.Node, begin: int, like: Tensor) -> fx.Node:
    return edit.emit(aten.slice.Tensor, tensor, 1, begin, begin + like.shape[1])
