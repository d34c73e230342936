"""The registry and the planner's reasoning, readable."""

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fastconv import _C, measured, ops, selection, settings
from fastconv.functional import _named_padding_sizes
from fastconv.ops.geometry import integer, pair


@dataclass(frozen=True)
class AlgorithmInfo:
    """An algorithm of the registry."""

    name: str
    family: str  # direct, gemm, winograd, library
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    # Accuracy class -> expected relative L2 error against float64, as a multiple of PyTorch's own in that class: of 3x3
    # kernels with 64 channels, on the device where it is largest. `explain` tells that of one convolution.
    accuracy: dict[str, float] = field(hash=False)
    source: int  # the published system it comes from; 0: this project, or PyTorch
    summary: str


def algorithms() -> list[AlgorithmInfo]:
    """Every algorithm, in the order of the registry."""
    return [_algorithm_info(row) for row in _C.algorithms()]


def _algorithm_info(row: dict[str, Any]) -> AlgorithmInfo:
    classes = row["accuracy"]
    served = {
        torch.float32: {"ieee", "fp32", "tf32"},
        torch.float16: {"fp16"},
        torch.bfloat16: {"bf16"},
    }
    dtypes = [dtype for dtype, names in served.items() if names & classes.keys()]
    if row["family"] == "library":
        dtypes.append(torch.float64)
    return AlgorithmInfo(
        row["name"], row["family"], tuple(row["devices"]), tuple(dtypes), classes, row["source"], row["summary"]
    )


@dataclass(frozen=True)
class Candidate:
    """An algorithm's answer to one problem."""

    algorithm: str
    fits: bool
    code: str  # why not, for programs: "stride", "dtype", ...; empty if it fits
    reason: str  # why not, for people
    eligible: bool  # fits, and accurate enough for `auto`
    expected_error: float  # over PyTorch's own; 0 if it does not fit
    config: str
    workspace_bytes: int
    cost_us: float  # the planner's estimate


@dataclass(frozen=True)
class Explanation:
    """What `auto` does with a problem, and why. `str()` is a table."""

    problem: str
    accuracy: str
    device: str
    note: str
    pass_: str  # forward, backward_input, backward_weight
    choice: str
    max_error: float  # up to which `auto` goes, a multiple of PyTorch's own error
    rows: tuple[Candidate, ...]

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        limit = f"error: expected, over PyTorch's own; `auto` admits up to {self.max_error:g}"
        title = f"{self.pass_}: {self.problem}\n{self.device}{self.note}\n{limit}"
        table = Table(title=title, title_justify="left", title_style="")
        columns = {"algorithm": "left", "auto": "left", "error": "right", "cost us": "right", "workspace": "right"}
        for name, justify in columns.items():
            table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
        table.add_column("config, or why not")
        for row in self.rows:
            if row.fits:
                auto = "chosen" if row.algorithm == self.choice else "yes" if row.eligible else "accuracy"
                error, memory = f"{row.expected_error:.2f}", f"{row.workspace_bytes / 2**20:.1f} MiB"
                table.add_row(row.algorithm, auto, error, f"{row.cost_us:.1f}", memory, row.config)
            else:
                table.add_row(row.algorithm, "-", "", "", "", f"{row.code}: {row.reason}")
        text = io.StringIO()
        Console(file=text, width=120, color_system=None, markup=False, highlight=False).print(table)
        return text.getvalue().rstrip()


def explain(
    x_shape: Sequence[int],
    w_shape: Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device | None = None,
    precision: str | None = None,
    layout: str = "nchw",
    *,
    pass_: str = "forward",
    max_error: float | None = None,
    max_workspace: int | None = None,
    bias: bool = False,
    residual: bool = False,
    activation: str | None = None,
    residual_after: bool = False,
    max_pool: bool = False,
    packs: bool = False,
) -> Explanation:
    """Every algorithm for one convolution: whether it fits or why not, its expected error, its estimated cost, and the
    choice of `auto`.

    Args:
        x_shape: input ``[N, C, H, W]``.
        w_shape: weight ``[K, C/groups, R, S]``.
        stride, padding, dilation, groups: as in `fastconv.conv2d`.
        dtype: float32, float16 or bfloat16.
        device: ``"cpu"`` or ``"cuda"``; None takes the GPU if there is one. ``"cuda"`` without a GPU plans for an H200.
        precision: as in `fastconv.conv2d`.
        layout: memory order of the input and output, ``"nchw"`` or ``"nhwc"``.
        pass_: ``"forward"``, ``"backward_input"`` or ``"backward_weight"``. The rows of an input gradient are those of
            the convolution that it is made of; with a stride it is made of several, and they are of that with the most
            taps.
        max_error: as in `fastconv.conv2d`; rows that it refuses have "accuracy" where others have "yes".
        max_workspace: as in `fastconv.conv2d`; what needs more does not fit, for the reason "workspace".
        bias, residual, activation, residual_after, max_pool: what is computed with the convolution. Ours do it in their
            epilogue; PyTorch's takes a pass over the output for each. So does the max-pool of an algorithm whose
            configuration ends in "then max-pool".
        packs: the weight is packed in the call, as in a training step, in the first `conv2d` with a weight, and in
            compiled code that is not frozen; the costs of algorithms that pack have that in them. False: it was packed
            before. An input gradient always packs.

    Raises TypeError, ValueError or RuntimeError for shapes and values that no convolution has, UnsupportedError if
    FASTCONV_ALGORITHM names an algorithm that does not fit."""
    if pass_ not in selection.PASSES:
        raise ValueError(f"pass_ is {pass_!r}; expected one of {', '.join(selection.PASSES)}")
    device = _device(device)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is {dtype!r}; expected a torch.dtype")
    (n, c, h, w), (k, c_per_group, r, s) = _sizes("x_shape", x_shape), _sizes("w_shape", w_shape)
    groups = integer("groups", groups)
    if c != c_per_group * groups:
        raise ValueError(f"x_shape has C = {c} channels; expected w_shape[1] * groups = {c_per_group * groups}")
    flags: dict[str, Any] = {
        "bias": bias, "residual": residual, "residual_after": residual_after, "max_pool": max_pool, "packs": packs,
    }  # fmt: skip
    for name, flag in flags.items():
        settings.check_flag(name, flag)
    strides, dilations = pair("stride", stride), pair("dilation", dilation)
    if isinstance(padding, str):
        paddings, extra = _named_padding_sizes((r, s), padding, strides, dilations)
        h, w = h + extra[0], w + extra[1]
    else:
        paddings = pair("padding", padding)
    problem = _C.ConvProblem(
        n=n, c=c, h=h, w=w, k=k, r=r, s=s, stride=tuple(strides), padding=tuple(paddings), dilation=tuple(dilations),
        groups=groups, dtype=ops.dtype_name(dtype),
        precision=settings.resolve_precision(precision, device.type == "cuda"), layout=layout,
        activation=settings.resolve_activation(activation), **flags,
        **settings.resolve_limits(max_error, max_workspace, settings.auto_algorithm)._asdict(),
    )  # fmt: skip
    info = ops.device_info(device)
    missing = device.type == "cuda" and not torch.cuda.is_available()
    note = " (no GPU here: planned for the H200)" if missing else ""
    found, choice, detail = _planned(problem, info, pass_)
    rows = tuple(
        Candidate(
            row["algorithm"], row["ok"], row["code"], row["reason"], row["auto_eligible"],
            row["expected_error"], row["config"], row["workspace_bytes"], row["cost_us"],
        )
        for row in found
    )  # fmt: skip
    limit = _C.error_limit(problem, info)
    return Explanation(repr(problem), problem.accuracy, info.name, note + detail, pass_, choice, limit, rows)


def _device(asked: Any) -> torch.device:
    if asked is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(asked)
    except (TypeError, ValueError, RuntimeError):
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {asked!r}; expected cpu or cuda")
    return device


def _planned(problem: _C.ConvProblem, info: _C.DeviceInfo, pass_: str) -> tuple[list[dict[str, Any]], str, str]:
    """The planner's rows for a pass, the choice among them, and what there is to say of it."""
    chosen = selection.choose(pass_, problem, info)
    row, choice, note = chosen.row, chosen.name, ""
    if pass_ != "forward" and choice == "torch":
        note = f" (PyTorch's gradient, {row['code']}: {row['reason']})"
    elif pass_ == "backward_input":
        made = "a convolution" if row["convolutions"] == 1 else f"{row['convolutions']} convolutions"
        note = f" (made of {made} of stride 1, of {row['convolution']!r})"
        choice = (
            row["algorithm"]
            if row["algorithm"] != "auto"
            else ops.choose("auto", row["convolution"], info)["algorithm"]
        )
    if chosen.measured:
        note += f" (the choice was measured: {measured.path() or 'in this process'})"
    rows = (
        _C.candidates(row["convolution"], info)
        if pass_ == "backward_input"
        else selection.candidates(pass_, problem, info)
    )
    return rows, choice, note


def _sizes(name: str, shape: Sequence[int]) -> list[int]:
    try:
        sizes = [integer(name, size) for size in shape]
    except TypeError:
        raise TypeError(f"{name} is {shape!r}; expected 4 integers") from None
    if len(sizes) != 4:
        raise ValueError(f"{name} is {sizes}; expected 4 sizes")
    return sizes
