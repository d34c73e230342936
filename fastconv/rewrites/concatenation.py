"""Concatenations along channels without a copy, in graphs that Inductor or `fastconv.fuse` lowers.

In channels_last the values that are concatenated are ranges of channels of one tensor. `concatenate` makes that tensor
before the first of them, has each one written into its range where it is computed, and gives those who read the
concatenation, or the value, that range. Lists that are part of another one (a dense block concatenates all its values
again for each layer) are ranges of the longer one's tensor. A range is written once, by `ops.channel_scatter_op`;
`choosing` then has convolutions whose kernels can do that write it themselves.

Kernels read a residual where they write: a convolution with one writes a range if that is a range of a tensor of as
many channels. `_Places` decides which values stand where.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fastconv import ops
from fastconv.rewrites import shuffling
from fastconv.rewrites.choosing import can_stand_around, is_read_through, writes_range
from fastconv.rewrites.convolution import (
    Asked,
    Concatenation,
    call_of,
    is_aligned,
    is_channels_last,
    is_static,
    plan_of,
)
from fastconv.rewrites.editor import Editor, is_written, read, spelled, value_of
from fastconv.rewrites.patterns import ACTIVATIONS
from fastconv.selection import is_librarys

aten = torch.ops.aten


@dataclass
class _List:
    """A concatenation: what it is of, those that are concatenated before taken apart."""

    node: fx.Node
    parts: list[fx.Node]


@dataclass(eq=False)
class _Buffer:
    """The tensor of a list, of which others are a part."""

    whole: _List
    lists: list[_List] = field(default_factory=list)  # all of them

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
    for buffer in buffers:
        for each in list(buffer.lists):
            if each is not buffer.whole and (_is_returned(each.node) or not _reads_range(each.node, buffer.channels)):
                buffer.lists.remove(each)
                codes[each.node] = "readers"
    places = _Places(buffers, asked)
    now: dict[fx.Node, fx.Node] = {}  # where a value is that has been written into a buffer
    for buffer in buffers:
        if buffer in places.buffers:
            _rewrite(graph, buffer, places, now, edit)
        else:
            codes.update((each.node, "producers") for each in buffer.lists)
    for node, channels in places.followers.items():
        with graph.inserting_before(node):
            empty = edit.empty_channels(value_of(node), channels)
        with graph.inserting_before(node.next):
            tensor = edit.emit(ops.channel_scatter_op, node, empty, 0)
            readers = [user for user in node.users if user is not tensor]
            edit.replace(node, _range(edit, tensor, 0, value_of(node)), readers)
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


def _reads_range(node: fx.Node, channels: int) -> bool:
    """Whether those who read a value may read a range of so many channels in its place, and nobody has it for a
    residual."""
    return all(_takes_range(user, node, channels) and not _adds(user, node) for user in node.users)


def _residual_of(node: fx.Node) -> fx.Node | None:
    call = call_of(node)
    return None if call is None else call.residual


def _adds(user: fx.Node, value: fx.Node) -> bool:
    """Whether the value is the residual of a convolution."""
    return _residual_of(user) is value


def _takes_range(user: fx.Node, value: fx.Node, channels: int) -> bool:
    """Whether it may read a range of so many channels in the value's place: of convolutions those whose kernels take
    one, all else that Inductor makes. Residuals are `_Places`'s question."""
    if user.target is aten.convolution.default or user.op == "output":
        return False
    call = call_of(user)
    if call is None:
        return takes_strides(user)
    if call.input is not value:
        return call.residual is value
    if not is_channels_last(call):
        return False
    row = plan_of(call, x_channels=channels)
    return row is not None and not is_librarys(row["algorithm"]) and not row["copies_x"]


def takes_strides(user: fx.Node) -> bool:
    """Whether what is no convolution reads a range as fast as a tensor: in a graph of operators Inductor's code does,
    in one of modules what PyTorch's eager calls compute element by element, and upsamplings and max-pools of ours on a
    GPU. A norm copies it first, or is slow."""
    if "spelled" not in user.meta:
        return True
    if spelled(user).obstacle is not None:
        return False
    target = read(user)[0]
    if target is aten._native_batch_norm_legit_no_training.default:
        return is_read_through(user)
    if target in (aten.upsample_nearest2d.vec, aten.max_pool2d_with_indices.default):
        return _is_layer_of_ours(user) and value_of(user).is_cuda
    by_element = aten.add.Tensor, *(activation for activation, *_ in ACTIVATIONS.values())
    return target is aten.cat.default or target in by_element


def is_sum(node: fx.Node) -> bool:
    """Of a graph of modules: whether it is a sum that PyTorch's eager call can write into a range."""
    target, args, _ = read(node)
    if "spelled" not in node.meta or target is not aten.add.Tensor or spelled(node).writes:
        return False
    y, values = value_of(node), [value_of(arg) for arg in args]
    return all(isinstance(x, Tensor) and (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device) for x in values)


def is_made_there(part: fx.Node) -> bool:
    """Whether Inductor may compute the value where it is copied to, and nowhere else."""
    is_extern = part.target is aten.convolution.default or call_of(part) is not None or "spelled" in part.meta
    return part.op == "call_function" and not is_extern


def _is_made_for_kernels(buffer: _Buffer) -> bool:
    """Whether Inductor computes parts that convolutions of ours read in channels_last: concatenating them, it computes
    each one in the format that it likes, which may be the other one, and copies them."""
    calls = [call for each in buffer.lists for call in map(call_of, each.node.users) if call is not None]
    return any(map(is_made_there, buffer.whole.parts)) and any(map(is_channels_last, calls))


def is_upsampling(node: Any) -> bool:
    """Whether it is a call of fastconv's layer for that, in a graph of modules."""
    return isinstance(node, fx.Node) and read(node)[0] is aten.upsample_nearest2d.vec and _is_layer_of_ours(node)


def _is_layer_of_ours(node: fx.Node) -> bool:
    """Of an upsampling or a max-pool in a graph of modules, where `fuse` has left none of PyTorch's layers."""
    return node.op == "call_module" and ops.dtype_name(value_of(node).dtype) != "other"


class _Places:
    """Which of the tensors are made, and which values are computed in a range, so that all their readers read that: the
    most that satisfy each other."""

    def __init__(self, buffers: list[_Buffer], asked: Asked) -> None:
        self.asked = asked
        self.can: dict[tuple[fx.Node, int], bool] = {}
        self.buffers, made = buffers, None
        while made is None or len(made) < len(self.buffers):
            self.buffers = buffers if made is None else made
            self._place()
            made = [
                buffer
                for buffer in self.buffers
                if not all(map(is_sum, self._direct_in(buffer))) or _is_made_for_kernels(buffer)
            ]

    def _place(self) -> None:
        # By part: the tensor where it stands; of two, the first one.
        self.home = {part: buffer for buffer in reversed(self.buffers) for part in buffer.whole.parts}
        self.direct = {part for part, buffer in self.home.items() if self._can_write(part, buffer.channels)}
        # Convolutions that are in no list, but add what is in one: they write a range of a tensor as wide, of which
        # nobody writes the rest.
        self.followers: dict[fx.Node, int] = {}
        for part, buffer in self.home.items():
            for node in part.users if part in self.direct else ():
                if _adds(node, part) and node not in self.home and self._can_follow(node, buffer.channels):
                    self.followers[node] = buffer.channels
        while self._restrict():
            pass

    def _direct_in(self, buffer: _Buffer) -> list[fx.Node]:
        return [part for part in buffer.whole.parts if part in self.direct and self.home[part] is buffer]

    def _can_follow(self, node: fx.Node, channels: int) -> bool:
        value = value_of(node)
        return not is_written(node) and is_aligned(value, channels, value.shape[1]) and self._can_write(node, channels)

    def _can_write(self, node: fx.Node, channels: int) -> bool:
        if (node, channels) not in self.can:
            self.can[node, channels] = _can_write(node, channels, self.asked)
        return self.can[node, channels]

    def channels(self, node: fx.Node) -> int:
        """Of the tensor with the range in which the value stands, be it a copy; 0: there is none."""
        home = self.home.get(node)
        return self.followers.get(node, 0) if home is None else home.channels

    def _is_direct(self, node: fx.Node, channels: int) -> bool:
        return (node in self.direct or node in self.followers) and self.channels(node) == channels

    def _restrict(self) -> bool:
        """Takes out what cannot be where it is; whether there was something."""
        direct = {part for part in self.direct if self._fits(part, copies=1)}
        followers = {
            node: channels
            for node, channels in self.followers.items()
            if self._fits(node, copies=0) and _residual_of(node) in direct
        }
        is_less = len(direct) < len(self.direct) or len(followers) < len(self.followers)
        self.direct, self.followers = direct, followers
        return is_less

    def _fits(self, node: fx.Node, copies: int) -> bool:
        """Whether its residual stands in a tensor as wide, and whether those that have it for theirs write into such a
        one, but for so many, which copy it. (One copies as much as if the value were copied to its range.)"""
        residual, channels = _residual_of(node), self.channels(node)
        if residual is not None and self.channels(residual) != channels:
            return False
        return sum(_adds(user, node) and not self._is_direct(user, channels) for user in node.users) <= copies

    def readers(self, part: fx.Node, but: fx.Node) -> list[fx.Node]:
        """Those who read the range of a part."""
        channels, users = self.channels(part), [user for user in part.users if user is not but]
        if part in self.direct:
            return users
        users = [user for user in users if _takes_range(user, part, channels)]
        made_there = is_made_there(part)
        return [user for user in users if (self._is_direct(user, channels) if _adds(user, part) else made_there)]


def _can_write(node: fx.Node, channels: int, asked: Asked) -> bool:
    """Whether what computes it writes into a range of so many channels, if its residual is such a range, and those who
    read it can read one."""
    call = call_of(node)
    computes = is_sum(node) or is_upsampling(node)
    can = computes if call is None else can_stand_around(call) and writes_range(node, channels)
    can = can or shuffling.writes_range(node, channels, asked)
    return can and all(_takes_range(user, node, channels) for user in node.users)


def _rewrite(graph: fx.Graph, buffer: _Buffer, places: _Places, now: dict[fx.Node, fx.Node], edit: Editor) -> None:
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
            readers = places.readers(part, tensor) if value is part else []
            if readers:
                new = _range(edit, tensor, begin, value_of(part))
                if part in places.direct or is_made_there(part):
                    now[part] = new
                edit.replace(part, new, readers)
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
