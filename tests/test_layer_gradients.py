"""The gradients of a layer's call, whoever computes each of them, against float64."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from layers import DEVICES, relative_error
from torch import nn

import fastconv
from fastconv import ops, settings

pytestmark = pytest.mark.usefixtures("full_precision")
FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
# Sums of independent products in float32; half types end with one rounding.
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
GEOMETRIES = list(itertools.product((1, 2), (0, 1, 3), (1, 2), (1, 2, 16)))  # stride, padding, dilation, groups


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", BOUNDS, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("algorithm", ["auto", "implicit_gemm", "torch"])
def test_every_geometry(algorithm: str, dtype: torch.dtype, format: str, device: str) -> None:
    for (stride, padding, dilation, groups), kernel in itertools.product(GEOMETRIES, (1, 3)):
        layer = nn.Conv2d(16, 32, kernel, stride, padding, dilation, groups, kernel == 3, device=device, dtype=dtype)
        layer.to(memory_format=FORMATS[format])
        fastconv.swap_(layer, algorithm=algorithm, precision="fp32")
        x = torch.randn(2, 16, 9, 11, device=device, dtype=dtype).to(memory_format=FORMATS[format]).requires_grad_()
        exact = [t.detach().double().requires_grad_() for t in (x, *layer.parameters())]
        y = layer(x)
        grad = torch.randn_like(y)
        z = F.conv2d(*exact, *[None] * (3 - len(exact)), layer.stride, layer.padding, layer.dilation, groups)
        found = torch.autograd.grad(y, [x, *layer.parameters()], grad)
        for a, b in zip(found, torch.autograd.grad(z, exact, grad.double()), strict=True):
            assert a.dtype == dtype
            assert relative_error(a.double(), b) < BOUNDS[dtype], (stride, padding, dilation, groups, kernel)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wanted", [w for w in itertools.product((False, True), repeat=3) if any(w)])
@pytest.mark.parametrize("algorithm", ["implicit_gemm", "torch"])
def test_only_what_is_wanted(algorithm: str, wanted: tuple[bool, ...], device: str) -> None:
    layer = fastconv.Conv2d(8, 16, 3, padding=1, algorithm=algorithm, precision="fp32", device=device)
    tensors = torch.randn(2, 8, 7, 7, device=device), layer.weight, layer.bias
    for tensor, flag in zip(tensors, wanted, strict=True):
        tensor.requires_grad_(flag)
    layer(tensors[0]).backward(torch.ones(2, 16, 7, 7, device=device))
    exact = [t.detach().double().requires_grad_() for t in tensors]
    F.conv2d(*exact, padding=1).sum().backward()
    for tensor, other, flag in zip(tensors, exact, wanted, strict=True):
        assert (tensor.grad is not None) == flag
        if tensor.grad is not None:
            assert relative_error(tensor.grad.double(), other.grad) < 2e-6


@pytest.mark.parametrize("device", DEVICES)
def test_input_and_weight_are_all_that_is_saved(device: str) -> None:
    layer = fastconv.Conv2d(8, 16, 3, padding=1, algorithm="implicit_gemm", device=device)
    x = torch.randn(2, 8, 7, 7, device=device)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        layer(x)
    assert sorted(saved) == sorted([x.data_ptr(), layer.weight.data_ptr()])


def test_one_call_of_pytorch_at_most() -> None:
    layer = fastconv.Conv2d(8, 16, 3, padding=1, algorithm="torch")
    y = layer(torch.randn(2, 8, 7, 7, requires_grad=True))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        y.sum().backward()
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls["fastconv::layer_gradients"] == 1
    assert calls["aten::convolution_backward"] == 1


def test_what_pytorch_would_compute_in_another_class_is_left_or_ours() -> None:
    """On a CPU PyTorch has but one class; the operator is told otherwise."""
    x, w = torch.randn(2, 8, 7, 7), torch.randn(16, 8, 3, 3)
    grad = torch.randn(2, 16, 7, 7)
    exact = [t.double().requires_grad_() for t in (x, w)]
    expected = torch.autograd.grad(F.conv2d(*exact, padding=1), exact, grad.double())
    wanted = ops.WANTS_INPUT | ops.WANTS_WEIGHT | ops.WANTS_BIAS
    for algorithm, is_ours in (("auto", True), ("torch", False)):
        layer = ops.layer_new(algorithm, (1, 1, 1, 1, 1, 1, 1), "none", 0.0, settings.Limits())
        dx, dw, db = ops.layer_gradients(grad, x, w, layer, ops.PRECISIONS["fp32"], wanted)
        ops.layer_free(layer)
        assert (dw is not None) == is_ours
        if dw is not None:
            assert relative_error(dw.double(), expected[1]) < 2e-6
        assert db is not None
        assert relative_error(db.double(), grad.double().sum((0, 2, 3))) < 2e-6
        assert dx is None or relative_error(dx.double(), expected[0]) < 2e-6
        assert is_ours or dx is None
