"""A transposed layer's call and its gradients, by the way that convolutions' take, against float64; what both kinds of
layers do alike is in test_layer_gradients.py."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layers import DEVICES, assert_alike, exact, relative_error, turns
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fastconv
from fastconv import ops
from fastconv.ops import transposed

pytestmark = pytest.mark.usefixtures("full_precision")
FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
# Sums of independent products in float32; half types end with one rounding.
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
# stride, padding, output_padding, dilation, groups
GEOMETRIES = [g for g in itertools.product((1, 2), (0, 1, 3), (0, 1), (1, 2), (1, 2, 16)) if g[2] < g[0]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", BOUNDS, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("algorithm", ["auto", "implicit_gemm", "torch"])
def test_every_geometry(algorithm: str, dtype: torch.dtype, format: str, device: str) -> None:
    cases = itertools.product(GEOMETRIES, (1, 3))
    parity = list(BOUNDS).index(dtype), list(FORMATS).index(format), ["auto", "implicit_gemm", "torch"].index(algorithm)
    for (*geometry, dilation, groups), kernel in turns(cases, device, *parity):
        if dilation * (kernel - 1) + geometry[2] + 8 * geometry[0] <= 2 * geometry[1]:
            continue  # no output
        layer = nn.ConvTranspose2d(
            16, 32, kernel, *geometry, groups, kernel == 3, dilation, device=device, dtype=dtype
        ).to(memory_format=FORMATS[format])
        fastconv.swap_(layer, algorithm=algorithm, precision="fp32")
        x = torch.randn(2, 16, 9, 11, device=device, dtype=dtype).to(memory_format=FORMATS[format]).requires_grad_()
        y = layer(x)
        # No record of Python's; PyTorch's own where all is PyTorch's.
        others = set() if algorithm == "implicit_gemm" else {"ConvolutionBackward0"}
        assert type(y.grad_fn).__name__ in {"MpsConvolutionBackward0", *others}
        leaves, z = exact(layer, x)
        grad = torch.randn_like(y)
        found = torch.autograd.grad(y, (x, *layer.parameters()), grad)
        expected = torch.autograd.grad(z, leaves, grad.double())
        assert all(g.dtype == dtype for g in (y, *found))
        with torch.no_grad():
            assert_alike((y, layer(x), *found), (z, z, *expected), BOUNDS[dtype], (geometry, dilation, groups, kernel))
        assert layer.last_input_shape == tuple(x.shape)
        assert layer.last_algorithm == algorithm or algorithm == "auto"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wanted", [w for w in itertools.product((False, True), repeat=3) if any(w)])
@pytest.mark.parametrize("algorithm", ["implicit_gemm", "torch"])
def test_only_what_is_wanted(algorithm: str, wanted: tuple[bool, ...], device: str) -> None:
    layer = fastconv.ConvTranspose2d(8, 16, 3, padding=1, algorithm=algorithm, precision="fp32", device=device)
    tensors = torch.randn(2, 8, 7, 7, device=device), layer.weight, layer.bias
    for tensor, flag in zip(tensors, wanted, strict=True):
        tensor.requires_grad_(flag)
    layer(tensors[0]).sum().backward()
    leaves, z = exact(layer, tensors[0])
    z.sum().backward()
    for tensor, leaf, flag in zip(tensors, leaves, wanted, strict=True):
        assert (tensor.grad is not None) == flag
        if tensor.grad is not None:
            assert relative_error(tensor.grad.double(), leaf.grad) < 2e-6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recorded", [False, True], ids=["operator", "layer"])
def test_an_output_without_pixels_has_gradients_of_zero(recorded: bool, device: str) -> None:
    layer = fastconv.ConvTranspose2d(8, 5, 3, padding=2, device=device)
    x = torch.randn(2, 8, 2, 7, device=device, requires_grad=True)
    made = layer(x) if recorded else fastconv.conv_transpose2d(x, layer.weight, layer.bias, padding=2)
    assert made.shape == (2, 5, 0, 5)
    made.sum().backward()
    for tensor in (x, layer.weight, layer.bias):
        assert torch.equal(tensor.grad, torch.zeros_like(tensor))


def test_no_operator_of_python_is_called() -> None:
    layer = fastconv.ConvTranspose2d(8, 16, 2, 2, algorithm="implicit_gemm")
    x, grad = torch.randn(2, 8, 7, 7, requires_grad=True), torch.randn(2, 16, 14, 14)
    layer(x)  # which registers the layer
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.autograd.grad(layer(x), (x, *layer.parameters()), grad)
    found = {event.key: event.count for event in profile.key_averages()}
    assert found["aten::_mps_convolution"] == found["aten::mps_convolution_backward"] == 1
    assert not any(name.startswith("fastconv::") for name in found)


@pytest.mark.parametrize("device", DEVICES)
def test_the_layer_may_be_gone_and_the_weight_may_not_change(device: str) -> None:
    layer = fastconv.ConvTranspose2d(8, 16, 3, 2, 1, 1, algorithm="implicit_gemm", precision="fp32", device=device)
    x = torch.randn(2, 8, 7, 7, device=device, requires_grad=True)
    y, weight, (leaves, z) = layer(x), layer.weight, exact(layer, x)
    later = layer(x)
    del layer
    expected = torch.autograd.grad(z.sum(), leaves[:2])
    assert_alike(torch.autograd.grad(y.sum(), (x, weight)), expected, 2e-6)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        later.sum().backward()


@pytest.mark.parametrize("device", DEVICES)
def test_what_calls_a_layer_otherwise(device: str) -> None:
    layer = fastconv.ConvTranspose2d(8, 16, 3, 2, 1, 1, precision="fp32", device=device)
    x = torch.randn(2, 8, 7, 7, device=device, requires_grad=True)
    leaves, z = exact(layer, x)
    expected = torch.autograd.grad(z.square().sum(), leaves)
    tensors = (x, *layer.parameters())
    calls = {
        "checkpoint": lambda: checkpoint(layer, x, use_reentrant=False),
        "functional_call": lambda: torch.func.functional_call(layer, dict(layer.named_parameters()), (x,)),
        "unbatched": lambda: torch.stack([layer(x[0]), layer(x[1])]),
        "function": lambda: fastconv.conv_transpose2d(x, *tensors[1:], 2, 1, 1, precision="fp32"),
        "function again": lambda: fastconv.conv_transpose2d(x, *tensors[1:], 2, 1, 1, precision="fp32"),
        "output_size": lambda: layer(x, output_size=(14, 14)),
    }
    for name, call in calls.items():
        y = call()
        assert_alike((y, *torch.autograd.grad(y.square().sum(), tensors)), (z, *expected), 2e-5, name)
    hooked: list[tuple[int, ...]] = []
    layer.register_forward_hook(lambda module, inputs, output: hooked.append(tuple(output.shape)))
    layer.register_full_backward_hook(lambda module, before, after: hooked.append(tuple(before[0].shape)))
    layer(x).sum().backward()
    assert hooked == [(2, 16, 14, 14), (2, 8, 7, 7)]


def test_tensors_that_are_not_plain() -> None:
    class Named(Tensor):
        pass

    layer = fastconv.ConvTranspose2d(8, 16, 3, 2, 1, 1)
    x = torch.randn(2, 8, 7, 7)
    y = layer(x.as_subclass(Named))
    assert type(y) is Named
    assert relative_error(y.detach().as_subclass(Tensor), layer(x).detach()) < 1e-6
    meta = copy.deepcopy(layer).to("meta")
    assert meta(x.to("meta")).shape == y.shape


@pytest.mark.parametrize("recorded", [False, True])
def test_what_a_layer_cannot_do_is_told_alike_with_gradients_and_without(recorded: bool) -> None:
    layer = fastconv.ConvTranspose2d(8, 16, 3, 2, algorithm="winograd_f2").requires_grad_(recorded)
    x = torch.randn(2, 8, 7, 7)
    with pytest.raises(fastconv.UnsupportedError, match="winograd_f2"):
        layer(x)
    with pytest.raises(fastconv.UnsupportedError, match=r"float64|dtype"):
        layer.double()(x.double())
    layer.float()
    for wrong in (x[:, :7], x.half(), x[None], x[..., :0]):
        with pytest.raises(RuntimeError):
            layer(wrong)
    other = fastconv.ConvTranspose2d(8, 16, 3, dilation=3, output_padding=2).requires_grad_(recorded)  # PyTorch's alone
    _, z = exact(other, x)
    assert relative_error(other(x).double(), z) < 2e-6
    assert other.last_algorithm == "torch"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("algorithm", ["auto", "implicit_gemm"])
def test_compiled_code_calls_the_operator_without_a_formula_for_gradients(algorithm: str, device: str) -> None:
    torch._dynamo.reset()
    layer = fastconv.ConvTranspose2d(8, 16, 3, 2, 1, 1, algorithm=algorithm, precision="fp32", device=device)
    x = torch.randn(2, 8, 7, 7, device=device)
    leaves, z = exact(layer, x)
    compiled = torch.compile(layer, fullgraph=True)
    with torch.no_grad():
        compiled(x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            y = compiled(x)
    names = {event.key for event in profile.key_averages() if event.key.startswith("fastconv::conv")}
    assert names == {"fastconv::conv_transpose2d_compiled"}
    assert relative_error(y.double(), z) < 2e-6
    found = torch.autograd.grad(compiled(x.requires_grad_()).square().sum(), (x, *layer.parameters()))
    assert_alike(found, torch.autograd.grad(z.square().sum(), leaves), 1e-5)


PAIRS = {"stride": [1, 1], "padding": [0, 0], "output_padding": [0, 0], "dilation": [1, 1]}
WRONG: list[dict[str, Any]] = [
    {"stride": [0, 1]}, {"stride": [1]}, {"padding": [-1, 0]}, {"output_padding": [1, 0]}, {"output_padding": [0, -1]},
    {"dilation": [1, 0]}, {"groups": 0}, {"groups": 3}, {"padding": [10, 0]}, {"padding": [2**62, 0]},
    {"input": torch.ones(2, 3, 5, 5)}, {"input": torch.ones(8, 5, 5)}, {"weight": torch.ones(8, 4, 3)},
    {"weight": torch.ones(8, 4, 3, 3).half()}, {"bias": torch.ones(3)}, {"bias": torch.ones(4, 1)},
    {"input": torch.ones(2, 8, 0, 5)}, {"weight": torch.ones(0, 4, 3, 3)},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_the_operator_names_what_is_wrong(wrong: dict[str, Any]) -> None:
    usual: dict[str, Any] = {"input": torch.ones(2, 8, 5, 5), "weight": torch.ones(8, 4, 3, 3), "bias": None}
    values = usual | PAIRS | {"groups": 1} | wrong
    geometry = [values[name] for name in ("stride", "padding", "output_padding", "dilation", "groups")]
    name = next(iter(wrong))
    for device in ("cpu", "meta"):  # what it computes, and what is known of it without memory
        tensors = [None if values[n] is None else values[n].to(device) for n in ("input", "weight", "bias")]
        with pytest.raises(RuntimeError, match=f"fastconv: ({name}|input|weight)"):
            ops.conv_transpose2d_op(*tensors, *geometry, "auto", "fp32", 4)


@pytest.mark.parametrize("padding", [0, 1, 2])
@pytest.mark.parametrize("stride", [1, 2])
def test_the_operator_s_own_formula_with_much_output_padding(stride: int, padding: int) -> None:
    """PyTorch admits an output padding beyond the stride, if the dilation is larger: no convolution has such an output,
    so the operator runs PyTorch's and its formula cuts what a convolution would make more."""
    geometry = ([stride] * 2, [padding] * 2, [2, 1], [3, 3], 1)
    x, w, b = (torch.randn(*size, dtype=torch.float64) for size in ((2, 4, 5, 6), (4, 3, 3, 2), (3,)))
    leaves = [t.float().requires_grad_() for t in (x, w, b)]
    exact = [t.float().double().requires_grad_() for t in (x, w, b)]
    y = transposed.conv_transpose2d(*leaves, *geometry, "auto", "fp32", 0)
    z = F.conv_transpose2d(*exact, geometry[0], geometry[1], geometry[2], 1, geometry[3])
    grad = torch.randn_like(y)
    assert relative_error(y.double(), z) < 2e-6
    assert_alike(torch.autograd.grad(y, leaves, grad), torch.autograd.grad(z, exact, grad.double()), 2e-6)
