"""A convolution of a graph: the arguments of `fastconv::conv2d`, and what the planner says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from fastconv import _C, once, ops, settings, tuning
from fastconv.ops import plain
from fastconv.ops.geometry import Geometry, Options, pair
from fastconv.reports import by
from fastconv.rewrites.editor import Obstacle, hint_of, read, value_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Asked:
    """What the caller asks of every convolution, with PyTorch's switches as they are now."""

    algorithm: str = "auto"
    precision: str | None = None
    max_error: float | None = None
    max_workspace: int | None = None
    packed: bool = False  # weights are constants: pack them once, else in every call
    scatters: bool = False  # and whoever lowers the graph does so in place: convolutions may write ranges of channels

    def resolved_algorithm(self) -> str:
        return settings.resolve_algorithm(self.algorithm)

    def limits(self) -> settings.Limits:
        return settings.resolve_limits(self.max_error, self.max_workspace, self.resolved_algorithm())

    def state(self) -> tuple[Any, ...]:
        """All that a rewriting depends on besides the graph."""
        return (
            self.resolved_algorithm(), self.precision, settings.cuda_precision(), self.limits(), self.packed,
            self.scatters, settings.switches.backend_flags, settings.disabled, settings.measure,
        )  # fmt: skip


class Call(NamedTuple):
    """The arguments of `fastconv::conv2d`, in its order."""

    input: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    residual: fx.Node | None
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int
    algorithm: str
    precision: str
    activation: str
    negative_slope: float
    backend_flags: int
    max_error: float | None = None
    max_workspace: int | None = None
    residual_after: bool = False
    max_pool: bool = False

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.stride, self.padding, self.dilation, self.groups)

    @property
    def options(self) -> Options:
        return Options(*self[8:])


def call_of(node: Any) -> Call | None:
    """The call, if the node is one of `fastconv::conv2d`."""
    target, args, kwargs = read(node) if isinstance(node, fx.Node) else (None, (), {})
    return Call(*args, **kwargs) if target is ops.conv2d_op else None


def layer_call(layer: Any, input: Any, residual: Any = None) -> Call:
    """What one of fastconv's layers computes: weight and bias are its tensors. Padding in another mode than zeros, and
    what "same" pads on one side alone, are taken for zeros on both."""
    dilation, padding = pair("dilation", layer.dilation), layer.padding
    if padding == "same":
        kernel = pair("kernel_size", layer.kernel_size)
        padding = [d * (size - 1) // 2 for d, size in zip(dilation, kernel, strict=True)]
    elif padding == "valid":
        padding = 0
    algorithm = settings.resolve_algorithm(layer.algorithm)
    return Call(
        input, layer.weight, layer.bias, residual, pair("stride", layer.stride), pair("padding", padding), dilation,
        layer.groups, algorithm, settings.resolve_precision(layer.precision, layer.weight.is_cuda),
        getattr(layer, "activation", None) or "none", getattr(layer, "negative_slope", 0.0),
        settings.switches.backend_flags,
        *settings.resolve_limits(layer.max_error, layer.max_workspace, algorithm),
        getattr(layer, "residual_after", False), getattr(layer, "max_pool", False),
    )  # fmt: skip


@dataclass
class Taken:
    """What became of one convolution of the graph: it travels in its node's ``meta["fastconv"]``."""

    name: str
    shape: str  # of the weight
    stride: str
    groups: int
    dtype: str
    device: str
    parts: list[str]
    is_models_own: bool = False  # the model calls fastconv's operator by itself
    algorithm: str = ""  # what the planner takes at the sizes that the graph was made with, or what ran
    obstacle: Obstacle = ("", "")  # why it, or what follows it, stays apart
    input_shape: tuple[int, ...] | None = None
    us: float | None = None  # what the planner expects of the algorithm at these sizes
    epilogue_us: float = 0.0  # of that, for what is computed with the convolution
    packs: bool = False  # a weight that is a constant, in every call: its sizes are dynamic

    def expect(self, call: Call, **around: Any) -> None:
        """Notes the input's shape and the planner's estimates, if the sizes are known. `around`: as `problem_of` takes
        it."""
        sizes = _sizes(call)
        if sizes is None:
            return
        self.input_shape = tuple(sizes[:4])
        device = ops.device_info(value_of(call.weight).device)
        rows = []
        for form in (call, call._replace(residual=None, activation="none", max_pool=False)):
            found = _C.candidates(problem_of(form, **around), device)  # type: ignore[arg-type]
            rows += [row for row in found if row["algorithm"] == self.algorithm and row["ok"]]
        if len(rows) == 2:
            self.us, alone = (row["cost_us"] for row in rows)
            self.epilogue_us = max(0.0, self.us - alone)  # type: ignore[operator]


@dataclass
class Left:
    """An operator that could have gone into a convolution and has not."""

    what: str  # the rewrite's name
    name: str  # of its node
    code: str  # why: "alone" where no convolution of ours with room for it stands before it; else as a `Taken` has it


@dataclass
class Pool:
    """A max-pool that is a pass of its own, by a kernel of ours where it runs on a GPU."""

    name: str


@dataclass
class Upsampling:
    """A nearest-neighbour upsampling by integers, by a kernel of ours where it runs on a GPU in channels_last."""

    name: str


@dataclass
class GroupNorm:
    """A group norm, with what activation behind it, by kernels of ours: in channels_last on a GPU."""

    name: str


@dataclass
class Concatenation:
    """One along the channels of pictures, in a graph of which ranges of channels can be written."""

    name: str
    code: str = ""  # why it was left; empty: it is gone


Record = Taken | Left | Pool | Upsampling | GroupNorm | Concatenation


def describe(node: fx.Node, weight: fx.Node, stride: Any, groups: int, part: str) -> Taken:
    w = value_of(weight)
    dtype, device = str(w.dtype).removeprefix("torch."), w.device.type
    return Taken(_name_of(node), by(w.shape), by(stride), groups, dtype, device, [part])


def _name_of(node: fx.Node) -> str:
    """The module that called it, as its model names it; else the node's name."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = str(next(reversed(stack.values()))[0]) if stack else node.name
    return path.removeprefix("L['self']").removeprefix("L['fn']").lstrip(".") or node.name


def obstacle_of(x: Any, weight: Any, *geometry: Any) -> Obstacle | None:
    """What keeps `aten.convolution` from being one of our operator at all. geometry: its arguments from the
    stride on."""
    if geometry[3]:
        return "transposed", "it is a transposed convolution"
    if weight.dim() != 4:
        return "dimensions", f"it has {weight.dim() - 2} dimensions; fastconv serves 2"
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return "dtype", f"it is {x.dtype}; expected float32, float16 or bfloat16"
    if x.device.type not in ("cpu", "cuda"):
        return "device", f"it is on '{x.device}'; expected cpu or cuda"
    return geometry_obstacle(*geometry)


def geometry_obstacle(*geometry: Any) -> Obstacle | None:
    """Strides, groups and the like that are known at run time alone: groups of a modulated convolution are images."""
    values = [each for value in geometry for each in (value if isinstance(value, (list, tuple)) else [value])]
    if all(isinstance(value, int) for value in values):
        return None
    return "sizes", "stride, padding, dilation or groups are no constants"


def _sizes(call: Call) -> list[int] | None:
    """Of the example's input and weight; None where a size depends on data, and for an unbatched image."""
    sizes = [hint_of(size) for value in call[:2] for size in value_of(value).shape]
    return None if None in sizes or len(sizes) != 8 else sizes  # type: ignore[return-value]


def is_like_output(call: Call, value: Any) -> bool:
    """Whether it has the sizes and the dtype of the convolution's output, as what kernels add has."""
    x, weight = value_of(call.input), value_of(call.weight)
    size = [x.shape[0], weight.shape[0], *ops.output_size(x.shape, weight.shape, *call.geometry[:3])]
    return isinstance(value, Tensor) and list(value.shape) == size and value.dtype == x.dtype


def channels_around(value: Tensor) -> int:
    """How many channels the NHWC tensor has of which the value is a range that kernels can read and write; 0: it is
    none. As csrc/ops/arguments.cpp finds it when the call runs."""
    if value.dim() != 4 or not is_static(value) or value.numel() == 0 or value.stride(1) != 1:
        return 0
    pitches, pixels = [], 1
    for dim in (3, 2, 0):
        if value.shape[dim] > 1:
            pitches.append(value.stride(dim) / pixels)
        pixels *= value.shape[dim]
    if len(set(pitches)) != 1 or pitches[0] <= value.shape[1]:
        return 0
    pitch = int(pitches[0])
    return pitch if value.device.type != "cuda" or is_aligned(value, pitch, int(value.storage_offset())) else 0


def is_aligned(value: Tensor, *elements: int) -> bool:
    """Whether so many elements are whole accesses of 16 bytes."""
    return all(count * value.element_size() % 16 == 0 for count in elements)


def problem_of(
    call: Call, input_activation: str | None = None, x_channels: int | None = None, y_channels: int = 0,
    packs: bool = False,
) -> _C.ConvProblem | None:  # fmt: skip
    """The problem at the example's sizes; None where a size depends on data. With an `input_activation` a norm and that
    stand before it. `x_channels`: if not those of the input as it is. packs: the weight is packed in every call."""
    x, sizes = value_of(call.input), _sizes(call)
    if sizes is None or geometry_obstacle(call.stride, call.padding, call.dilation, call.groups) is not None:
        return None
    n, c, h, w, k, _, r, s = sizes
    channels_last = is_channels_last(call)
    if x_channels is None:
        x_channels = channels_around(x) if channels_last else 0
    return _C.ConvProblem(
        n=n, c=c, h=h, w=w, k=k, r=r, s=s, stride=tuple(call.stride), padding=tuple(call.padding),
        dilation=tuple(call.dilation), groups=call.groups, dtype=ops.dtype_name(x.dtype), precision=call.precision,
        layout="nhwc" if channels_last else "nchw", bias=call.bias is not None, residual=call.residual is not None,
        activation=call.activation, residual_after=call.residual_after, max_pool=call.max_pool,
        input_activation=input_activation, x_channels=x_channels, y_channels=y_channels, packs=packs,
        **settings.Limits(call.max_error, call.max_workspace)._asdict(),
    )  # fmt: skip


def measure(call: Call, passes: Sequence[str], packs: bool) -> None:
    """Measures at the example's sizes, where that is wanted, what costs do not tell (`fastconv.once`)."""
    x, weight = value_of(call.input), value_of(call.weight)
    can_be = call.algorithm == "auto" and is_static(call.input) and is_static(call.weight) and not channels_around(x)
    if not can_be or not once.is_wanted(x) or problem_of(call) is None or 0 in (*x.shape, *weight.shape):
        return
    if x.is_cuda and (not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing()):
        return
    with unset_fake_temporarily():
        once.measure_problems(
            tuning.Convolution(
                x.device, x.dtype, tuple(x.shape), tuple(weight.shape), tuple(call.stride), tuple(call.padding),
                tuple(call.dilation), call.groups, call.precision, ops.format_of(x), ops.format_of(weight),
                call.bias is not None, call.residual is not None, call.activation, call.negative_slope, call.max_error,
                call.max_workspace, call.residual_after, call.max_pool, call.backend_flags, trained=packs,
            ),
            passes,
        )  # fmt: skip


def plan_of(call: Call, **around: Any) -> dict[str, Any] | None:
    """The planner's row of what it takes at the example's sizes; None where a size depends on data. `around`: as
    `problem_of` takes it."""
    return _choice(call, around)[0]


def planned(call: Call, packs: bool) -> tuple[str, Obstacle]:
    """The algorithm that the planner takes at the example's sizes, and what keeps the one asked for from it."""
    row, obstacle = _choice(call, {"packs": packs})
    return (call.algorithm if row is None else str(row["algorithm"])), obstacle


def _choice(call: Call, around: dict[str, Any]) -> tuple[dict[str, Any] | None, Obstacle]:
    problem = problem_of(call, **around)
    if problem is None:
        return None, ("", "")
    return chosen_row(call, problem)


def chosen_row(call: Call, problem: _C.ConvProblem) -> tuple[dict[str, Any], Obstacle]:
    """The planner's row of what it takes for the call, whose kernels are to compute `problem`; PyTorch's where the
    algorithm asked for cannot, and why."""
    device = ops.device_info(value_of(call.weight).device)
    if call.algorithm == "auto":
        return ops.choose("auto", problem, device), ("", "")
    rows = {row["algorithm"]: row for row in _C.candidates(problem, device)}
    obstacle = ops.obstacle_of(rows[call.algorithm], problem, device, limited=call.max_error is not None)
    return (rows["torch"], obstacle) if obstacle is not None else (rows[call.algorithm], ("", ""))


def pools_inside(call: Call, packs: bool) -> bool:
    """Whether what the planner takes for the call does its max-pool in its kernels."""
    row = plan_of(call, packs=packs)
    return row is not None and row["ok"] and not row["pools_apart"]


def activates_inside(call: Call, packs: bool) -> bool:
    """Whether what the planner takes for the call ends with its activation, and with what stands behind that."""
    if not _C.is_gated(call.activation):
        return True
    row = plan_of(call, packs=packs)
    return row is not None and row["ok"] and not row["activates_apart"]


def is_channels_last(call: Call) -> bool:
    """Whether the operator computes in that format: only there are ranges of channels ranges."""
    return ops.format_of(value_of(call.input), value_of(call.weight)) == torch.channels_last


def is_static(node: Any) -> bool:
    value = value_of(node)
    return isinstance(value, Tensor) and all(isinstance(size, int) for size in value.shape)


def is_in_class(call: Call) -> bool:
    """Whether PyTorch's own convolution computes in the class asked for, so that it can stand in the graph itself."""
    return plain.is_of_class(value_of(call.input), call.precision)
