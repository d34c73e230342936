"""`max_pool2d`: PyTorch's, of values alone. What it makes of gradients, transforms and fake tensors is PyTorch's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastconv import ops
from fastconv.ops import values

aten = torch.ops.aten
TWO_BY_TWO: Any = ([2, 2], [2, 2], [0, 0], [1, 1], False)  # the pool that a convolution can end in


def max_pool2d(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    ceil_mode: bool,
) -> Tensor:  # fmt: skip
    """`torch.nn.functional.max_pool2d` of an eager tensor that needs no gradient (`fastconv.eager`)."""
    with torch._C._AutoDispatchBelowAutograd():  # without what comes next, which is Python
        return ops.call(ops.max_pool2d_op, x, kernel, stride, padding, dilation, ceil_mode)


values.record(ops.max_pool2d_op, aten.max_pool2d)


@torch.library.register_fake(ops.max_pool2d_op, lib=ops.library)
def _fake(x, *arguments):  # type: ignore[no-untyped-def]
    return aten.max_pool2d_with_indices(x, *arguments)[0]


@torch.library.register_vmap(ops.max_pool2d_op, lib=ops.library)
def _vmap(info, in_dims, x, *arguments):  # type: ignore[no-untyped-def]
    x = x.movedim(in_dims[0], 0)
    if x.dim() == 4:  # images without a batch
        return ops.max_pool2d_op(x, *arguments), 0
    return ops.max_pool2d_op(x.flatten(0, 1), *arguments).unflatten(0, x.shape[:2]), 0
