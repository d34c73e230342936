"""An implicit GEMM convolution written in Triton, as Triton's users would: the rival of ours that is not in C++.

NHWC; a program computes a tile of pixels and filters, and gathers the input's part of each tap on its way. Products of
float32 are `ieee` (FP32 arithmetic), `tf32x3` (FP32-accurate on tensor cores) or `tf32`; those of half types are exact,
their sums FP32. Triton comes with PyTorch's CUDA builds; where it is missing, the rival is named as missing. Tiles are
compiled when they are first called, a second or two each, and kept in Triton's cache on disk.
"""

# Without `from __future__ import annotations`: Triton reads the kernel's.

import functools
from collections.abc import Callable
from typing import Any

import torch

from fastconv.models.layers import Layer

try:
    import triton
    import triton.language as tl
except ImportError as error:
    MISSING = f"{error}"
else:
    MISSING = ""

LIMIT = 1 << 31  # elements: offsets have 32 bits
# Pixels, filters and channels of a tile, warps, stages. FP32 arithmetic has its operands in registers: smaller ones.
FFMA_TILES = ((64, 64, 16, 4, 3), (128, 64, 16, 8, 3), (64, 32, 32, 4, 2))
TENSOR_TILES = ((128, 64, 32, 4, 4), (128, 128, 32, 8, 3), (128, 64, 64, 4, 3), (64, 64, 64, 4, 4))


class TritonUnavailable(RuntimeError):
    """Triton is not installed, or the kernel serves no such convolution; the message says which."""


if not MISSING:

    @triton.jit
    def _convolve(
        x, w, y,  # [N, H, W, C], [K, R, S, C], [N, P, Q, K]
        pixels, c, height, width, k, p, q, r, s, stride, padding, dilation,
        PIXELS: tl.constexpr, FILTERS: tl.constexpr, CHANNELS: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
        filters = tl.program_id(1) * FILTERS + tl.arange(0, FILTERS)
        n = pixel // (p * q)
        h0 = pixel // q % p * stride - padding
        w0 = pixel % q * stride - padding
        sums = tl.zeros((PIXELS, FILTERS), dtype=tl.float32)
        steps = tl.cdiv(c, CHANNELS)
        for step in range(r * s * steps):
            tap = step // steps
            channel = step % steps * CHANNELS + tl.arange(0, CHANNELS)
            h = h0 + tap // s * dilation
            column = w0 + tap % s * dilation
            inside = (pixel < pixels) & (h >= 0) & (h < height) & (column >= 0) & (column < width)
            source = x + ((n * height + h) * width + column)[:, None] * c + channel[None, :]
            a = tl.load(source, mask=inside[:, None] & (channel < c)[None, :], other=0.0)
            weights = w + (filters[None, :] * (r * s) + tap) * c + channel[:, None]
            b = tl.load(weights, mask=(filters < k)[None, :] & (channel < c)[:, None], other=0.0)
            sums = tl.dot(a, b, sums, input_precision=PRECISION)
        target = y + pixel[:, None] * k + filters[None, :]
        tl.store(target, sums.to(y.dtype.element_ty), mask=(pixel < pixels)[:, None] & (filters < k)[None, :])


def forms(x: torch.Tensor, weight: torch.Tensor, layer: Layer, precision: str) -> dict[str, Callable[[], torch.Tensor]]:
    """Every tile for the forward pass. x [N, C, H, W], weight [K, C, R, S]: float32 or half types, dense in
    channels_last order. precision: ieee, tf32x3 or tf32. Raises TritonUnavailable, saying why."""
    if MISSING:
        raise TritonUnavailable(f"{MISSING}; Triton comes with PyTorch's CUDA builds")
    if layer.groups != 1:
        raise TritonUnavailable("the Triton kernel serves one group")
    if max(x.numel(), x.shape[0] * layer.k * layer.p * layer.q, weight.numel()) >= LIMIT:
        raise TritonUnavailable("a tensor has 2^31 elements or more, and the Triton kernel's offsets have 32 bits")
    tiles = FFMA_TILES if precision == "ieee" and x.dtype == torch.float32 else TENSOR_TILES
    return {
        "tile {}x{}x{}, {} warps, {} stages".format(*tile): functools.partial(_run, x, weight, layer, precision, tile)
        for tile in tiles
    }


def _run(
    x: torch.Tensor, weight: torch.Tensor, layer: Layer, precision: str, tile: tuple[int, int, int, int, int]
) -> torch.Tensor:
    options: dict[str, Any] = {"dtype": x.dtype, "device": x.device, "memory_format": torch.channels_last}
    y = torch.empty((x.shape[0], layer.k, layer.p, layer.q), **options)
    pixels = x.shape[0] * layer.p * layer.q
    *blocks, warps, stages = tile
    grid = (triton.cdiv(pixels, blocks[0]), triton.cdiv(layer.k, blocks[1]))
    sizes = (pixels, layer.c, layer.h, layer.w, layer.k, layer.p, layer.q, layer.r, layer.s)
    geometry = (layer.stride, layer.padding, layer.dilation)
    _convolve[grid](x, weight, y, *sizes, *geometry, *blocks, precision, num_warps=warps, num_stages=stages)
    return y
