"""The command `fastconv explain`."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from fastconv.cli.support import (
    DeviceOption,
    JsonOption,
    MaxErrorOption,
    MaxWorkspaceOption,
    Precision,
    PrecisionOption,
    say,
    write_json,
)


def explain(
    n: Annotated[int, typer.Option(min=0, help="Batch.")] = 1,
    c: Annotated[int, typer.Option(min=0, help="Input channels.")] = 64,
    h: Annotated[int, typer.Option(min=0, help="Input height.")] = 56,
    w: Annotated[int | None, typer.Option(min=0, help="Input width; default h.")] = None,
    k: Annotated[int | None, typer.Option(min=0, help="Output channels; default c.")] = None,
    r: Annotated[int, typer.Option(min=1, help="Kernel height.")] = 3,
    s: Annotated[int | None, typer.Option(min=1, help="Kernel width; default r.")] = None,
    stride: Annotated[int, typer.Option(min=1)] = 1,
    padding: Annotated[int | None, typer.Option(min=0, help="Default r // 2.")] = None,
    dilation: Annotated[int, typer.Option(min=1)] = 1,
    groups: Annotated[int, typer.Option(min=1)] = 1,
    pass_: Annotated[str, typer.Option("--pass", help="forward, backward_input or backward_weight.")] = "forward",
    bias: Annotated[bool, typer.Option("--bias", help="Add a bias.")] = False,
    residual: Annotated[bool, typer.Option("--residual", help="Add a tensor of the output's shape.")] = False,
    residual_after: Annotated[bool, typer.Option("--residual-after", help="Add that behind the activation.")] = False,
    activation: Annotated[str | None, typer.Option(help="relu, silu, ...: behind the sum.")] = None,
    max_pool: Annotated[bool, typer.Option("--max-pool", help="End in a 2x2 max-pool of stride 2.")] = False,
    precision: PrecisionOption = Precision.fp32,
    channels_last: Annotated[bool, typer.Option("--channels-last", help="NHWC in memory.")] = False,
    max_error: MaxErrorOption = None,
    max_workspace: MaxWorkspaceOption = None,
    device: DeviceOption = "auto",
    json_path: JsonOption = None,
) -> None:
    """Every algorithm on one convolution: fits or why not, estimated cost, and the choice."""
    import fastconv
    from fastconv.models.compare import CLASS_DTYPE, precision_of

    if c % groups:
        raise ValueError(f"groups is {groups}; expected a divisor of c = {c}")
    explanation = fastconv.explain(
        (n, c, h, w if w is not None else h),
        (k if k is not None else c, c // groups, r, s or r),
        stride=stride,
        padding=r // 2 if padding is None else padding,
        dilation=dilation,
        groups=groups,
        dtype=CLASS_DTYPE[precision.value],
        device=None if device == "auto" else device,
        precision=precision_of(precision.value),
        layout="nhwc" if channels_last else "nchw",
        pass_=pass_,
        max_error=max_error,
        max_workspace=max_workspace,
        bias=bias,
        residual=residual,
        activation=activation,
        residual_after=residual_after,
        max_pool=max_pool,
    )
    say(str(explanation))
    write_json(json_path, dataclasses.asdict(explanation))
