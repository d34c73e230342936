"""Frozen convolutions that compute 2 x 2 pixels of their output at once, as filters of one convolution of a quarter of
the pixels, which their kernels shuffle into place (`ConvProblem::shuffle`):

    upsampling by 2, nearest -> convolution      taps that meet the same pixel are one: 2x2 of 3x3, 2.25 times fewer
                                                 products, and the larger image is never stored
    transposed convolution of stride 2           with an even kernel, padded by one less than half of it
    convolution -> pixel_shuffle by 2            as it is, with its filters in another order

The first two have as many taps in each dimension for even pixels as for odd ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fastconv import _C, ops, settings
from fastconv.rewrites import constants
from fastconv.rewrites.choosing import write_target
from fastconv.rewrites.convolution import (
    Asked,
    Call,
    Taken,
    call_of,
    channels_around,
    chosen_row,
    is_channels_last,
    is_static,
    plan_of,
)
from fastconv.rewrites.editor import Editor, value_of
from fastconv.rewrites.patterns import Match, Rewrite, never, new_call
from fastconv.selection import is_librarys

aten, prims = torch.ops.aten, torch.ops.prims


class Shuffled(NamedTuple):
    """What takes a convolution's place."""

    conv: fx.Node
    call: Call  # with the input and the padding of the convolution that is shuffled, and the weight of the other
    of: str  # "upsampling", "transposed" or "pixel_shuffle": what `ops.shuffled_weight` makes of weight and bias
    taps: tuple[int, int]
    filters: int

    @property
    def shuffle(self) -> str:
        return "windows" if self.taps[0] % 2 == 0 and self.of != "pixel_shuffle" else "pixels"

    def row(self, y_channels: int = 0) -> dict[str, Any] | None:
        """The planner's, of the fastest algorithm of ours; None: there is none, or kernels cannot write the range."""
        call, x = self.call, value_of(self.call.input)
        n, c, h, w = x.shape
        problem = _C.ConvProblem(
            n=n, c=c, h=h, w=w, k=self.filters, r=self.taps[0], s=self.taps[1], stride=tuple(call.stride),
            padding=tuple(call.padding), dilation=tuple(call.dilation), dtype=ops.dtype_name(x.dtype),
            precision=call.precision, layout="nhwc", bias=call.bias is not None, activation=call.activation,
            x_channels=channels_around(x), y_channels=y_channels, shuffle=self.shuffle,
            **settings.Limits(call.max_error, call.max_workspace)._asdict(),
        )  # fmt: skip
        row, _ = chosen_row(call, problem)
        fits = not is_librarys(row["algorithm"]) and not (y_channels and row["shuffles_apart"])
        return row if fits and self._is_within(row) else None

    def _is_within(self, row: dict[str, Any]) -> bool:
        """Whether the caller's limit admits what sums of weights that are rounded to half types add: as much as the
        output's rounding, which is the error of PyTorch's."""
        sums = self.of == "upsampling" and value_of(self.call.input).element_size() == 2
        return not sums or math.hypot(row["expected_error"], 1.0) <= float(self.call.max_error or math.inf)

    def is_known(self) -> bool:
        """Whether the weight is the same in every call, so that this one can be made of it, and stays finite in its
        type where that one is."""
        values = constants.known([self.call.weight, self.call.bias])
        if values is None:
            return False
        with constants.computing():
            made = ops.shuffled_weight_op(values[0], self.of)
            return bool(made.isfinite().all()) or not bool(values[0].isfinite().all())


def _taps(sizes: Any) -> tuple[int, int] | None:
    """Of one pixel of 2 x 2, if its windows are shifted along both dimensions or along none."""
    r, s = (int(size) // 2 for size in sizes)
    return (r, s) if r % 2 == s % 2 else None


def _shuffled(node: fx.Node, asked: Asked) -> tuple[Shuffled, float] | None:
    """What a node may become, and what it takes as it is, in microseconds."""
    if not (asked.packed and asked.scatters):
        return None
    if call_of(node) is not None:
        return _of_upsampling(node)
    return _of_transposed(node, asked) if node.target is aten.convolution.default else _of_pixel_shuffle(node)


def _of_upsampling(node: fx.Node) -> tuple[Shuffled, float] | None:
    call = call_of(node)
    if call is None or call.residual is not None or call.max_pool or not is_channels_last(call):
        return None
    image = _upsampled(call.input)
    if image is None or not is_static(call.weight):
        return None
    k, _, r, s = value_of(call.weight).shape
    if (call.stride, call.dilation, call.groups) != ([1, 1], [1, 1], 1) or min(r, s) < 3:
        return None
    if r % 2 == 0 or s % 2 == 0 or call.padding != [r // 2, s // 2]:
        return None
    taps, now = _taps((r + 1, s + 1)), plan_of(call)
    if taps is None or now is None:
        return None
    x, upsampled = value_of(image), value_of(call.input)
    device = ops.device_info(x.device)
    us = now["cost_us"] + _C.pass_us(x.numel() * x.element_size(), upsampled.numel() * x.element_size(), device)
    small = call._replace(input=image, padding=[taps[0] // 2, taps[1] // 2])
    return Shuffled(node, small, "upsampling", taps, 4 * k), us


def _of_transposed(node: fx.Node, asked: Asked) -> tuple[Shuffled, float] | None:
    arguments: Any = node.args
    x, weight, bias, stride, padding, dilation, is_transposed, output_padding, groups = arguments
    if not is_transposed:
        return None
    if not (is_static(x) and is_static(weight)) or value_of(x).dim() != 4 or value_of(weight).dim() != 4:
        return None
    _, k, r, s = value_of(weight).shape
    plain = (list(stride), list(dilation), list(output_padding), groups) == ([2, 2], [1, 1], [0, 0], 1)
    if not plain or r % 2 or s % 2 or list(padding) != [r // 2 - 1, s // 2 - 1] or value_of(x).dtype not in _DTYPES:
        return None
    taps = _taps((r, s))
    if taps is None or value_of(x).device.type not in ("cpu", "cuda"):
        return None
    call = new_call(asked, x, weight, bias, [1, 1], [taps[0] // 2, taps[1] // 2], [1, 1], 1)
    if not is_channels_last(call):
        return None
    n, c, p, q = value_of(x).shape
    forward = _C.ConvProblem(
        n=n, c=k, h=2 * p, w=2 * q, k=c, r=r, s=s, stride=(2, 2), padding=tuple(padding), layout="nhwc",
        dtype=ops.dtype_name(value_of(x).dtype), precision=call.precision,
    )  # fmt: skip
    rows = _C.input_gradients(forward, ops.device_info(value_of(x).device))
    us = next(row["cost_us"] for row in rows if row["algorithm"] == "torch")
    return Shuffled(node, call, "transposed", taps, 4 * k), us


_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _of_pixel_shuffle(node: fx.Node) -> tuple[Shuffled, float] | None:
    """Of the last of the views that a pixel_shuffle is taken apart into."""
    conv = _shuffles(node)
    call = call_of(conv)
    if conv is None or call is None or call.groups != 1 or not is_channels_last(call):
        return None
    if call.residual is not None or call.max_pool:
        return None
    now, y = plan_of(call), value_of(node)
    if now is None or not is_static(call.input):
        return None
    k, _, r, s = value_of(call.weight).shape
    size = y.numel() * y.element_size()
    us = now["cost_us"] + _C.pass_us(size, size, ops.device_info(y.device))
    return Shuffled(conv, call, "pixel_shuffle", (r, s), k), us


def _shuffles(node: fx.Node) -> fx.Node | None:
    """What the values of pixels 2 x 2 come from, [N, 4 K, H, W]; None: the node is no such shuffle."""
    steps: list[fx.Node] = []
    value: Any = node.args[0] if node.target in _VIEWS else None
    while isinstance(value, fx.Node) and len(value.users) == 1 and value.target in (*_MOVES, *_VIEWS):
        if value.target is not aten.clone.default:
            steps.append(value)
        value = value.args[0]
    if not isinstance(value, fx.Node) or [step.target for step in steps][:1] != [aten.permute.default]:
        return None
    if len(steps) != 2 or len(value.users) > 1 or not is_static(value) or value_of(value).dim() != 4:
        return None
    n, k, h, w = value_of(value).shape
    shapes = [list(value_of(each).shape) for each in (steps[1], node)]
    is_shuffle = shapes == [[n, k // 4, 2, 2, h, w], [n, k // 4, 2 * h, 2 * w]] and k % 4 == 0
    return value if is_shuffle and list(steps[0].args[1]) == [0, 1, 4, 2, 5, 3] else None  # type: ignore[arg-type]


_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_MOVES = (aten.permute.default, aten.clone.default)


def chosen(node: fx.Node, asked: Asked) -> Shuffled | None:
    """What will take the node's place: `auto` takes it on a GPU, where it is estimated to be faster."""
    found = _shuffled(node, asked)
    row = found[0].row() if found is not None else None
    if found is None or row is None:
        return None
    shuffled, us = found
    is_faster = value_of(shuffled.call.input).is_cuda and row["cost_us"] < us
    return shuffled if (is_faster or shuffled.call.algorithm != "auto") and shuffled.is_known() else None


def writes_range(node: fx.Node, channels: int, asked: Asked) -> bool:
    """Whether it will be written into a range of so many channels."""
    shuffled = chosen(node, asked)
    return shuffled is not None and shuffled.row(channels) is not None


def _find(node: fx.Node, asked: Asked) -> Match | None:
    shuffled = chosen(node, asked)
    if shuffled is None:
        return None
    target = write_target(node)
    row = shuffled.row(int(value_of(target).shape[1])) if target is not None else None
    if row is None:
        target, row = None, shuffled.row()
    return Match(target or node, shuffled.conv, {"shuffled": shuffled, "target": target, "row": row, "value": node})


def _replacement(match: Match, asked: Asked, edit: Editor) -> fx.Node:
    shuffled: Shuffled = match.found["shuffled"]
    target: fx.Node | None = match.found["target"]
    call, algorithm, y = shuffled.call, match.found["row"]["algorithm"], value_of(match.found["value"])
    weight = edit.emit(ops.shuffled_weight_op, call.weight, shuffled.of)
    packed = edit.emit(ops.pack_weight_op, weight, 1, algorithm, call.precision)
    bias = None if call.bias is None else edit.emit(ops.shuffled_weight_op, call.bias, shuffled.of)
    buffer, begin = target.args[1:] if target is not None else (edit.empty_channels(y, y.shape[1]), 0)
    stride, padding, dilation, groups = call.geometry
    node = edit.emit(
        ops.conv2d_packed_scatter_op, call.input, packed, bias, None, None, None, buffer, begin,
        [shuffled.filters, value_of(call.input).shape[1], *shuffled.taps, *stride, *padding, *dilation, groups], True,
        algorithm, call.precision, call.activation, call.negative_slope, "none", False, shuffled.shuffle,
    )  # fmt: skip
    if isinstance(match.taken, Taken):
        match.taken.parts[:0] = ["upsample"] if shuffled.of == "upsampling" else []
        match.taken.parts += ["pixel_shuffle"] if shuffled.of == "pixel_shuffle" else []
        match.taken.parts += ["cat"] if target is not None else []
        match.taken.algorithm, match.taken.obstacle, match.taken.us = algorithm, ("", ""), match.found["row"]["cost_us"]
        match.taken.input_shape = tuple(value_of(call.input).shape)
        node.meta["fastconv"] = match.taken
    return node


SHUFFLED = Rewrite("shuffled", (ops.conv2d_op, aten.convolution.default, *_VIEWS), _find, never, _replacement)


# Upsamplings, of which Inductor's graphs have the indices, and torch.export's the operator ---------------------------

_UPSAMPLE = aten.upsample_nearest2d

_ARITHMETIC: tuple[Callable[..., Any], ...] = (
    aten.add.Tensor, aten.mul.Tensor, aten.unsqueeze.default, aten.view.default, aten.floor.default,
    aten.arange.start_step, aten.arange.default, aten._to_copy.default, prims.iota.default,
    prims.convert_element_type.default,
)  # fmt: skip


def _upsampled(value: Any) -> fx.Node | None:
    """The image in which each pixel of the value is repeated twice along both dimensions, if nobody else reads what
    lies between: Inductor repeats half types in float32."""
    dtype = value_of(value).dtype
    value = _plain(value, dtype)
    if not isinstance(value, fx.Node) or len(value.users) > 1:
        return None
    if value.target in (_UPSAMPLE.vec, _UPSAMPLE.default):
        return _doubled(value, dtype)
    if value.target not in (aten._unsafe_index.Tensor, aten.index.Tensor):
        return None
    arguments: Any = value.args
    image, indices = _plain(arguments[0], dtype), list(arguments[1])
    x = value_of(image)
    if None in indices[2:]:
        return None
    if x.dtype != dtype or not is_static(image) or x.dim() != 4 or len(indices) != 4 or indices[:2] != [None, None]:
        return None
    for dim, index, shape in ((2, indices[2], (-1, 1)), (3, indices[3], (-1,))):
        size = x.shape[dim]
        if tuple(value_of(index).shape) != tuple(2 * size if each < 0 else each for each in shape):
            return None
        if not _repeats(index, size):
            return None
    return image  # type: ignore[no-any-return]


def _doubled(value: fx.Node, dtype: torch.dtype) -> fx.Node | None:
    """What an upsampling doubles, in that dtype."""
    image, _, *scales = value.args
    image = _plain(image, dtype)
    x, y = value_of(image), value_of(value)
    flat = [each for scale in scales for each in (scale if isinstance(scale, (list, tuple)) else [scale])]
    is_double = x.dtype == dtype and is_static(image) and list(y.shape[2:]) == [2 * size for size in x.shape[2:]]
    return image if is_double and set(flat) <= {None, 2.0} else None  # type: ignore[return-value]


def _plain(value: Any, dtype: torch.dtype) -> Any:
    """What a value is a copy of, in a dtype that holds all of `dtype`."""
    while isinstance(value, fx.Node) and len(value.users) == 1:
        is_copy = value.target in (aten.clone.default, aten._to_copy.default, prims.convert_element_type.default)
        if not is_copy or value_of(value).dtype not in (dtype, torch.float32):
            break
        value = value.args[0]
    return value


@constants.computing()
def _repeats(index: fx.Node, size: int) -> bool:
    """Whether it is 0, 0, 1, 1, ... of so many pixels."""
    numbers = _evaluate(index)
    return numbers is not None and torch.equal(numbers.flatten(), torch.arange(2 * size) // 2)


def _evaluate(node: Any) -> Tensor | None:
    """The numbers of an index, if it is made of constants alone."""
    if node.target not in _ARITHMETIC:
        return None
    inputs: dict[fx.Node, Tensor] = {}
    for arg in node.all_input_nodes:
        value = _evaluate(arg)
        if value is None:
            return None
        inputs[arg] = value
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: inputs[arg])
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    return node.target(*args, **kwargs)  # type: ignore[no-any-return]
