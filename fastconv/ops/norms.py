"""`group_norm`: PyTorch's, with an activation behind it, of values alone. What it makes of gradients and transforms is
PyTorch's."""

from __future__ import annotations

import torch
from torch import Tensor

from fastconv import ops
from fastconv.ops import plain, values

aten = torch.ops.aten


def _activated(y: Tensor, activation: str) -> Tensor:
    return y if activation == "none" else plain.activate(y, activation, 0.0)


def _pytorchs(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, epsilon: float, activation: str
) -> Tensor:
    return _activated(aten.group_norm(x, groups, weight, bias, epsilon, False), activation)


values.record(ops.group_norm_op, _pytorchs)


@torch.library.register_fake(ops.group_norm_op, lib=ops.library)
def _fake(x, weight, bias, groups, epsilon, activation):  # type: ignore[no-untyped-def]
    torch._check(x.dim() == 4, lambda: f"fastconv: x has shape {list(x.shape)}; expected [N, C, H, W]")
    return torch.empty_like(x, memory_format=ops.format_of(x))


@torch.library.register_vmap(ops.group_norm_op, lib=ops.library)
def _vmap(info, in_dims, x, weight, bias, groups, epsilon, activation):  # type: ignore[no-untyped-def]
    x = x.expand(info.batch_size, *x.shape) if in_dims[0] is None else x.movedim(in_dims[0], 0)
    shared = in_dims[1] is None and in_dims[2] is None
    inside = (weight, bias, groups, epsilon, activation) if shared else (None, None, groups, epsilon, "none")
    y = ops.group_norm_op(x.flatten(0, 1), *inside).unflatten(0, x.shape[:2])
    if shared:
        return y, 0

    def per_image(parameter: Tensor, dim: int | None) -> Tensor:
        return (parameter[None] if dim is None else parameter.movedim(dim, 0))[:, None, :, None, None]

    if weight is not None:
        y = y * per_image(weight, in_dims[1])
    if bias is not None:
        y = y + per_image(bias, in_dims[2])
    return _activated(y, activation), 0
