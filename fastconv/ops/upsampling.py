"""`upsample_nearest2d`: PyTorch's, by integers. What becomes of gradients, transforms and fake tensors is PyTorch's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastconv import ops
from fastconv.ops import values

aten = torch.ops.aten


def scales_of(mode: Any, size: Any, scale_factor: Any, recompute: Any) -> tuple[int, int] | None:
    """What `torch.nn.functional.interpolate` multiplies height and width by, if its arguments say that each pixel is
    repeated so many times."""
    if mode != "nearest" or size is not None or recompute:
        return None
    factors = scale_factor if isinstance(scale_factor, (tuple, list)) else (scale_factor, scale_factor)
    for factor in factors:
        if not isinstance(factor, (int, float)) or factor < 1 or not float(factor).is_integer():
            return None
    return (int(factors[0]), int(factors[1])) if len(factors) == 2 else None


def upsample_nearest2d(x: Tensor, scale_h: int, scale_w: int) -> Tensor:
    """`torch.nn.functional.interpolate` of an eager tensor that needs no gradient (`fastconv.eager`)."""
    with torch._C._AutoDispatchBelowAutograd():  # without what comes next, which is Python
        return ops.call(ops.upsample_nearest2d_op, x, scale_h, scale_w)


def upsample_nearest2d_into(out: Tensor, x: Tensor, scale_h: int = 1, scale_w: int = 1) -> None:
    """The same, into a tensor; by 1 x 1 it is a copy. In channels_last `out` and `x` may be ranges of channels."""
    with torch._C._AutoDispatchBelowAutograd():
        ops.call(ops.upsample_nearest2d_into_op, out, x, scale_h, scale_w)


def _pytorchs(x: Tensor, scale_h: int, scale_w: int) -> Tensor:
    return aten.upsample_nearest2d.vec(x, None, [float(scale_h), float(scale_w)])


values.record(ops.upsample_nearest2d_op, _pytorchs)


@torch.library.register_fake(ops.upsample_nearest2d_op, lib=ops.library)
def _fake(x, scale_h, scale_w):  # type: ignore[no-untyped-def]
    torch._check(x.dim() == 4, lambda: f"fastconv: x has shape {list(x.shape)}; expected [N, C, H, W]")
    n, c, h, w = x.shape
    size = (n, c, h * scale_h, w * scale_w)
    return torch.empty(size, dtype=x.dtype, device=x.device, memory_format=ops.format_of(x))


@torch.library.register_vmap(ops.upsample_nearest2d_op, lib=ops.library)
def _vmap(info, in_dims, x, scale_h, scale_w):  # type: ignore[no-untyped-def]
    x = x.movedim(in_dims[0], 0)
    return ops.upsample_nearest2d_op(x.flatten(0, 1), scale_h, scale_w).unflatten(0, x.shape[:2]), 0
