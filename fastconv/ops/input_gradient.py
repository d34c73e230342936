"""The input gradient of a convolution made of forward convolutions of stride 1 with the filter turned round.

With a stride the rows and columns of the gradient fall into residues, stride[0] * stride[1] in all, each of which sees
taps of its own: nothing is multiplied with the zeros that the stride would put between rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastconv.ops.geometry import Geometry

# (input [N, C, H, W], filters [K, C/groups, R, S], bias [K], padding, dilation) -> output, with stride 1
Convolve = Callable[[Tensor, Tensor, Tensor | None, Sequence[int], Sequence[int]], Tensor]


def phase(size: int, outputs: int, kernel: int, stride: int, padding: int, dilation: int, first: int) -> Any:
    """Along one dimension: rows first, first + stride, ... of the input gradient see the taps r with
    first + padding - r * dilation divisible by the stride. They are a convolution of the gradient, of stride 1, with
    these taps turned round. Returns (taps, dilation, padding on both sides, rows of its output to skip, rows), or None
    without taps."""
    rows = (size - first + stride - 1) // stride
    taps = [r for r in range(kernel) if (first + padding - r * dilation) % stride == 0]
    if not taps or rows <= 0:
        return None
    step = (taps[1] - taps[0]) * dilation // stride if len(taps) > 1 else 1
    reach = step * (len(taps) - 1)
    before = reach - (first + padding - taps[0] * dilation) // stride  # negative: rows of the gradient to skip
    after = rows + reach - before - outputs
    pad = max(before, after, 0)
    return taps, step, pad, pad - before, rows


def _slice_of(taps: Sequence[int]) -> slice:
    return slice(taps[0], taps[-1] + 1, taps[1] - taps[0] if len(taps) > 1 else 1)


def by_phases(
    convolve: Convolve, grad: Tensor, weight: Tensor, input_size: Sequence[int], geometry: Geometry,
    memory_format: torch.memory_format, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The input gradient as stride[0] * stride[1] convolutions of stride 1 with the filter's taps turned round and its
    channels exchanged: exact, and nothing is multiplied with the zeros that the stride would put between rows. `bias`
    [C] is added to it: a transposed convolution's."""
    stride, padding, dilation, groups = geometry
    k, c_per_group, r, s = weight.shape
    turned = weight.reshape(groups, k // groups, c_per_group, r, s).transpose(1, 2)
    turned = turned.reshape(groups * c_per_group, k // groups, r, s)
    result = None
    for first in ((h, w) for h in range(stride[0]) for w in range(stride[1])):
        phases = [
            phase(
                input_size[i + 2], grad.shape[i + 2], weight.shape[i + 2], stride[i], padding[i], dilation[i], first[i]
            )
            for i in range(2)
        ]
        if None in phases:
            continue
        (rows, step_h, pad_h, skip_h, height), (columns, step_w, pad_w, skip_w, width) = phases
        filters = turned[:, :, _slice_of(rows), :][:, :, :, _slice_of(columns)]
        part = convolve(grad, filters.flip(2, 3), bias, [pad_h, pad_w], [step_h, step_w])
        part = part[:, :, skip_h : skip_h + height, skip_w : skip_w + width]
        if geometry.has_unit_stride:
            return part.contiguous(memory_format=memory_format)
        if result is None:
            result = torch.empty(input_size, dtype=grad.dtype, device=grad.device, memory_format=memory_format)
            if min(r, s) < max(stride) or max(dilation) > 1:  # there may be residues without taps
                _fill(result, bias)
        _copy(_pixels(result)[:, first[0] :: stride[0], first[1] :: stride[1]], _pixels(part))
    if result is None:  # the convolution reads padding alone
        result = torch.empty(input_size, dtype=grad.dtype, device=grad.device, memory_format=memory_format)
        _fill(result, bias)
    return result


def _fill(result: Tensor, bias: Tensor | None) -> None:
    """What no tap reaches."""
    if bias is None:
        result.zero_()
    else:
        result.copy_(bias[:, None, None])


def _pixels(tensor: Tensor) -> Tensor:
    """[N, C, H, W] as [N, H, W, C]."""
    return tensor.permute(0, 2, 3, 1)


def _copy(target: Tensor, source: Tensor) -> None:
    """Copies [..., C]; where the channels are contiguous, 16 bytes at a time, which the device's copies of strided
    tensors do not do by themselves."""
    count = 16 // source.element_size()
    both = (target, source)
    if all(
        t.stride(-1) == 1 and all(size % count == 0 for size in (t.shape[-1], t.storage_offset(), *t.stride()[:-1]))
        for t in both
    ):
        target, source = (t.view(torch.complex128) for t in both)
    target.copy_(source)


def _window(kernel: int, stride: int, padding: int) -> tuple[int, int]:
    """Along one dimension: rows first, first + stride, ... of the input gradient see rows `offset` further of the
    gradient, by the tap r = first + padding - offset * stride. Returns the least and the largest offset of all `first`
    below the stride."""
    return -((kernel - 1 - padding) // stride), (padding + stride - 1) // stride


def at_once(
    convolve: Convolve, grad: Tensor, weight: Tensor, input_size: Sequence[int], geometry: Geometry,
    memory_format: torch.memory_format, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The input gradient with a stride as one convolution, whose filters are the residues of both dimensions by the
    channels; what it writes is then woven together. Residues with fewer taps than others multiply zeros, but the
    gradient is read once."""
    stride, padding = geometry.stride, geometry.padding
    k, c = weight.shape[:2]
    n, h, w = input_size[0], *input_size[2:]
    windows: list[int] = []
    sizes: list[int] = []
    pads: list[int] = []
    skips: list[int] = []
    zeros: list[int] = []
    for i in (1, 0):  # as torch.nn.functional.pad counts them
        kernel, size = weight.shape[i + 2], -(-input_size[i + 2] // stride[i])
        first, last = _window(kernel, stride[i], padding[i])
        after = size - 1 + last - (grad.shape[i + 2] - 1)
        pad = max(-first, after, 0)
        before = padding[i] - stride[i] * first + stride[i] - kernel  # zeros before the turned filter
        zeros += [before, (last - first + 1) * stride[i] - kernel - before]
        windows, sizes = [last - first + 1, *windows], [size, *sizes]
        pads, skips = [pad, *pads], [pad + first, *skips]
    # [K, C, window, residue turned round, window, residue turned round]
    turned = torch.nn.functional.pad(weight.flip(2, 3), zeros)
    turned = turned.reshape(k, c, windows[0], stride[0], windows[1], stride[1]).flip(3, 5)
    filters = turned.permute(3, 5, 1, 0, 2, 4).reshape(stride[0] * stride[1] * c, k, *windows)
    biases = None if bias is None else bias.repeat(stride[0] * stride[1])
    y = convolve(grad, filters, biases, pads, [1, 1])
    y = y[:, :, skips[0] : skips[0] + sizes[0], skips[1] : skips[1] + sizes[1]]
    whole = [n, c, sizes[0] * stride[0], sizes[1] * stride[1]]
    result = torch.empty(whole, dtype=grad.dtype, device=grad.device, memory_format=memory_format)
    woven = _pixels(result).unflatten(2, (sizes[1], stride[1])).unflatten(1, (sizes[0], stride[0]))
    residues = _pixels(y).unflatten(3, (stride[0], stride[1], c))  # [N, rows, columns, residue, residue, C]
    _copy(woven, residues.permute(0, 1, 3, 2, 4, 5))
    return result[:, :, :h, :w].contiguous(memory_format=memory_format)
