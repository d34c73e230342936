"""Ranges of channels of larger tensors, and `conv2d_packed_into`, for the tests of both."""

from __future__ import annotations

import torch
from harness import CLASSES, LAYOUTS, Case, pack_weight

from fastconv import ops

OUTSIDE = 77.0  # of an output's neighbours


def channels_of(values: torch.Tensor, around: int, first: int, fill: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The values as channels [first, first + C) of a tensor of `around` channels in NHWC, which holds `fill` elsewhere:
    the range, and that tensor."""
    n, c, h, w = values.shape
    whole = torch.full((n, h, w, around), fill, dtype=values.dtype, device=values.device).permute(0, 3, 1, 2)
    part = whole[:, first : first + c]
    part.copy_(values)
    return part, whole


def into(
    out: torch.Tensor,
    case: Case,
    algorithm: str,
    cls: str,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    input_activation: str = "none",
    packed: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> None:
    """conv2d_packed_into of a case, whose max-pool the operator has not, with the residual that is given."""
    shape, epilogue = case.shape, case.epilogue
    if packed is None:
        packed = pack_weight(case.weight, shape.groups, algorithm, cls)
    geometry = [*case.weight.shape, *shape.stride, *shape.padding, *shape.dilation, shape.groups]
    torch.ops.fastconv.conv2d_packed_into(
        out, case.input, packed, case.bias, residual, scale, shift, geometry, out.stride(1) == 1, algorithm,
        CLASSES[cls][1], epilogue.activation, epilogue.negative_slope, input_activation, epilogue.residual_after,
    )  # fmt: skip


def fresh(case: Case, layout: str = "nhwc") -> torch.Tensor:
    """Memory for the case's output, full of NaN."""
    s = case.shape
    size = (s.n, s.k, s.p, s.q)
    return torch.full(size, float("nan"), dtype=case.input.dtype, device=case.input.device).contiguous(
        memory_format=LAYOUTS[layout]
    )


def config() -> str:
    return ops.last_call()["config"]
