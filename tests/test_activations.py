"""One meaning of every activation, PyTorch's, whatever computes the convolution: infinities, NaN and zeros included."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from harness import ALGORITHMS, CLASSES, DEVICES, GATED, activated, refusal
from shapes import Shape

import fastconv
from fastconv.ops import autograd

SHAPES = [
    Shape(1, 8, 9, 9, 16, 3, 3, padding=(1, 1)),
    Shape(1, 8, 9, 9, 16, 1, 1),
    Shape(1, 16, 9, 9, 16, 3, 3, padding=(1, 1), groups=16),
    Shape(1, 16, 9, 9, 16, 1, 1, groups=16),
]
SPECIAL = [-math.inf, -100.0, -2.0, -0.0, 0.0, 0.75, 5.5, 6.0, 7.0, math.inf, math.nan]
ACTIVATIONS = [
    ("relu", 0.01),
    ("relu6", 0.01),
    ("silu", 0.01),
    *(("leaky_relu", slope) for slope in (0.0, 0.1, -0.3, 1.0, 1.7)),
    *((activation, 0.01) for activation in GATED),
]


def assert_same(found, expected, activation, what, arriving):
    """Bit for bit, but for exponentials and the like; of zeros the sign does not count where PyTorch clamps. PyTorch's
    GELU loses five bits at -2, where 1 + erf() cancels; of infinity it is infinity, or NaN in vectors of AVX-512.

    arriving: what is activated, as large as the others or broadcast."""
    if activation == "gelu":
        infinite = (arriving == math.inf).expand(found.shape)
        assert not found[infinite].isfinite().any(), what
        found, expected = found.masked_fill(infinite, 0.0), expected.masked_fill(infinite, 0.0)
    assert torch.equal(found.isnan(), expected.isnan()), what
    found, expected = found.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0)
    if activation == "silu" or activation in GATED:
        roundoffs = 64 if activation == "gelu" and found.dtype == torch.float32 else 4
        assert torch.allclose(found, expected, rtol=roundoffs * torch.finfo(found.dtype).eps, atol=1e-36), what
    else:
        assert torch.equal(found, expected), what
    if activation == "leaky_relu":
        assert torch.equal(found.signbit(), expected.signbit()), what


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cls", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_special_values(algorithm, cls, device):
    """The residual is what is activated: the convolution of zeros adds nothing to it."""
    dtype, precision = CLASSES[cls]
    held = 0
    for shape in SHAPES:
        if algorithm != "torch" and refusal(algorithm, shape, cls, "nchw", device):
            continue
        for format in (torch.contiguous_format, torch.channels_last):
            values = torch.tensor(SPECIAL).repeat(shape.k * shape.p * shape.q // len(SPECIAL) + 1)
            residual = values[: shape.k * shape.p * shape.q].view(1, shape.k, shape.p, shape.q).to(device, dtype)
            residual = residual.contiguous(memory_format=format)
            x = torch.zeros(shape.n, shape.c, shape.h, shape.w, dtype=dtype, device=device).to(memory_format=format)
            w = torch.ones(shape.k, shape.c // shape.groups, shape.r, shape.s, dtype=dtype, device=device)
            # -0 + 0 is 0: what arrives at the activation has no negative zero.
            arriving = residual + 0.0
            for activation, slope in ACTIVATIONS:
                y = autograd.conv2d(
                    x, w, None, residual, [1, 1], list(shape.padding), [1, 1], shape.groups, algorithm, precision,
                    activation, slope, 4,
                )  # fmt: skip
                what = f"{shape} {activation} {slope} {format}"
                assert_same(y, activated(arriving, activation, slope), activation, what, arriving)
                held += 1
    if not held:
        pytest.skip(f"{algorithm} takes none of these shapes")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cls", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_without_a_residual(algorithm, cls, device):
    """Kernels have a shorter way there: bias and activation alone. An infinite bias is an infinite output."""
    dtype, precision = CLASSES[cls]
    held = 0
    for shape in SHAPES:
        if algorithm != "torch" and refusal(algorithm, shape, cls, "nchw", device):
            continue
        bias = torch.tensor(SPECIAL + SPECIAL)[: shape.k].to(device, dtype)
        for format in (torch.contiguous_format, torch.channels_last):
            x = torch.zeros(shape.n, shape.c, shape.h, shape.w, dtype=dtype, device=device).to(memory_format=format)
            w = torch.ones(shape.k, shape.c // shape.groups, shape.r, shape.s, dtype=dtype, device=device)
            for activation, slope in ACTIVATIONS:
                y = autograd.conv2d(
                    x, w, bias, None, [1, 1], list(shape.padding), [1, 1], shape.groups, algorithm, precision,
                    activation, slope, 4,
                )  # fmt: skip
                arriving = (bias + 0.0)[None, :, None, None].expand(y.shape)
                what = f"{shape} {activation} {slope} {format}"
                assert_same(y, activated(arriving, activation, slope), activation, what, arriving)
                held += 1
    if not held:
        pytest.skip(f"{algorithm} takes none of these shapes")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_slope_is_not_rounded_to_a_half_type(dtype):
    x = torch.full((1, 1, 4, 4), -3.0, dtype=dtype)
    w = torch.ones(1, 1, 1, 1, dtype=dtype)
    slope = 0.012345  # 3 of its products differ from those of the rounded slope
    for factor in torch.arange(1.0, 3.0, 0.0078125).tolist():
        expected = F.leaky_relu(x * factor, slope)
        for algorithm in ("torch", "direct", "im2col_gemm"):
            y = fastconv.conv2d(x * factor, w, activation="leaky_relu", negative_slope=slope, algorithm=algorithm)
            assert torch.equal(y, expected), (algorithm, factor)


@pytest.mark.parametrize("algorithm", ["torch", "direct", "winograd_f4"])
@pytest.mark.parametrize(("activation", "slope"), ACTIVATIONS)
def test_gradients_of_special_values(algorithm, activation, slope):
    """At 0, at the cap, beyond it, and at infinity and NaN: PyTorch's derivative of the pre-activation."""
    shape = SHAPES[0]
    values = torch.tensor(SPECIAL).repeat(200)[: shape.k * shape.p * shape.q].view(1, shape.k, shape.p, shape.q)
    x = torch.zeros(1, shape.c, shape.h, shape.w)
    w = torch.ones(shape.k, shape.c, 3, 3)
    ours, theirs = ((values + 0.0).requires_grad_() for _ in range(2))
    y = fastconv.conv2d(
        x, w, padding=1, residual=ours, activation=activation, negative_slope=slope, algorithm=algorithm
    )
    y.sum().backward()
    activated(theirs, activation, slope).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-7, equal_nan=True)
