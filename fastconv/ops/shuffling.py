"""The filters of a shuffle (`Shuffle` in csrc/core/problem.h): four convolutions of a quarter of the pixels, one for
each pixel (a, b) of 2 x 2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastconv import ops

KINDS = ("upsampling", "transposed", "pixel_shuffle")


def shuffled_shape(size: Sequence[Any], shuffle: str) -> list[Any]:
    """Of the tensor that is written, where a convolution without the shuffle has [N, K, P, Q]."""
    n, k, p, q = size
    fewer = 1 if shuffle == "windows" else 0
    return list(size) if shuffle == "none" else [n, k // 4, 2 * (p - fewer), 2 * (q - fewer)]


def _shape(weight: Tensor, of: str) -> list[Any]:
    if of == "pixel_shuffle" or weight.dim() == 1:
        return [*weight.shape] if of == "pixel_shuffle" else [4 * weight.shape[0]]
    k, c, r, s = weight.shape
    return [4 * k, c, (r + 1) // 2, (s + 1) // 2] if of == "upsampling" else [4 * c, k, r // 2, s // 2]


def _sums(size: int, device: torch.device) -> Tensor:
    """[2, taps, size]: which taps of a convolution meet the same pixel of an image of which each is repeated twice."""
    a, r = torch.meshgrid(torch.arange(2), torch.arange(size), indexing="ij")
    first, offset = (a - size // 2) // 2, (a + r - size // 2) // 2
    taps = torch.arange((size + 1) // 2)[:, None]
    return ((offset - first)[:, None] == taps).to(device, torch.float64)


def _taps(size: int, device: torch.device) -> Tensor:
    """[2, taps]: those of a transposed convolution's kernel that pixels a, a + 2, ... of a dimension see, by the
    input's pixels."""
    count = size // 2
    a, t = torch.meshgrid(torch.arange(2), torch.arange(count), indexing="ij")
    return (2 * (count // 2) + count - 1 + (a if count % 2 else -a) - 2 * t).to(device)


def _shuffled_weight(weight: Tensor, of: str) -> Tensor:
    """[4 K, C, taps, taps]. `of` an "upsampling": from [K, C, R, S], sums that are rounded once. Of a "transposed"
    convolution: from [C, K, R, S]. Of a "pixel_shuffle": from [4 K, C, R, S], in another order. Likewise the bias."""
    torch._check(of in KINDS, lambda: f"fastconv: of is '{of}'; expected one of {', '.join(KINDS)}")
    if of == "pixel_shuffle":
        return weight.unflatten(0, (-1, 4)).transpose(0, 1).reshape(weight.shape).clone()  # a view of four filters
    if weight.dim() == 1:
        return weight.repeat(4)
    rows, columns = weight.shape[2:]
    if of == "upsampling":
        sums = (_sums(rows, weight.device), _sums(columns, weight.device))
        pixels = torch.einsum("atr,bus,kcrs->abkctu", *sums, weight.double())
    else:
        h, w = _taps(rows, weight.device), _taps(columns, weight.device)
        pixels = weight[:, :, h[:, :, None, None], w].permute(2, 4, 1, 0, 3, 5)
    return pixels.reshape(_shape(weight, of)).to(weight.dtype)


ops.library.impl("shuffled_weight", _shuffled_weight, "CompositeExplicitAutograd")


@torch.library.register_fake(ops.shuffled_weight_op, lib=ops.library)
def _(weight, of):  # type: ignore[no-untyped-def]
    return weight.new_empty(_shape(weight, of))
