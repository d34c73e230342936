"""The gradients of a layer's call, whoever computes each of them, against float64."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from layers import DEVICES, assert_alike, exact, relative_error, turns
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastconv
from fastconv import ops
from fastconv.ops import autograd

pytestmark = pytest.mark.usefixtures("full_precision")
FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
# Sums of independent products in float32; half types end with one rounding.
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
KINDS = pytest.mark.parametrize("kind", ["Conv2d", "ConvTranspose2d"])
GEOMETRIES = list(itertools.product((1, 2), (0, 1, 3), (1, 2), (1, 2, 16)))  # stride, padding, dilation, groups


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", BOUNDS, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("algorithm", ["auto", "implicit_gemm", "torch"])
def test_every_geometry(algorithm: str, dtype: torch.dtype, format: str, device: str) -> None:
    cases = itertools.product(GEOMETRIES, (1, 3))
    parity = list(BOUNDS).index(dtype), list(FORMATS).index(format), ["auto", "implicit_gemm", "torch"].index(algorithm)
    for (stride, padding, dilation, groups), kernel in turns(cases, device, *parity):
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
    x, grad = torch.randn(2, 8, 7, 7, requires_grad=True), torch.randn(2, 16, 7, 7)
    y = layer._convolve(x, None, "none", 0.0, False, False)  # as on a GPU where the forward pass alone is ours
    geometry = [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]

    def calls(run: Callable[[], object]) -> dict[str, int]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            run()
        return {event.key: event.count for event in profile.key_averages()}

    with torch.no_grad():
        backward = torch.ops.aten.convolution_backward
        once = calls(lambda: backward(grad, x, layer.weight, [16], *geometry))
    found = calls(lambda: torch.autograd.grad(y, (x, *layer.parameters()), grad))
    assert found["aten::mps_convolution_backward"] == 1
    assert not any(name.startswith("fastconv::") for name in found)
    inside = {name: count for name, count in once.items() if name != "aten::convolution_backward"}
    assert inside
    assert {name: found.get(name) for name in inside} == inside


@pytest.mark.parametrize("device", DEVICES)
def test_the_layer_may_be_gone(device: str) -> None:
    layer = fastconv.Conv2d(8, 16, 3, 2, 1, algorithm="implicit_gemm", precision="fp32", device=device)
    x = torch.randn(2, 8, 7, 7, device=device, requires_grad=True)
    y, weight = layer(x), layer.weight
    del layer
    found = torch.autograd.grad(y, (x, weight), torch.ones_like(y))
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    expected = torch.autograd.grad(F.conv2d(*exact, None, 2, 1).sum(), exact)
    for a, b in zip(found, expected, strict=True):
        assert relative_error(a.double(), b) < 2e-6


@KINDS
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("algorithm", ["auto", "implicit_gemm", "torch"])
def test_gradients_have_the_format_of_pytorchs(algorithm: str, stride: int, device: str, kind: str) -> None:
    for x_format, w_format, grad_format in itertools.product(FORMATS.values(), repeat=3):
        plain = getattr(nn, kind)(16, 32, 3, stride, 1, device=device).to(memory_format=w_format)
        ours = copy.deepcopy(plain)
        fastconv.swap_(ours, algorithm=algorithm, precision="fp32")
        x = torch.randn(2, 16, 9, 11, device=device).to(memory_format=x_format).requires_grad_()
        strides = []
        for layer in (plain, ours):
            y = layer(x)
            grad = torch.ones_like(y).contiguous(memory_format=grad_format)
            outputs = [y] if kind == "Conv2d" else []
            outputs += torch.autograd.grad(y, (x, layer.weight), grad)
            strides.append([g.stride() for g in outputs])
        assert strides[0] == strides[1], (x_format, w_format, grad_format)


@pytest.mark.parametrize("device", DEVICES)
def test_a_training_step_keeps_nothing_packed(device: str) -> None:
    layer = fastconv.Conv2d(8, 16, 3, padding=1, algorithm="implicit_gemm", device=device)
    layer(torch.randn(2, 8, 7, 7, device=device, requires_grad=True)).sum().backward()
    assert not layer._fastconv.packed
    layer.requires_grad_(False)  # a part that is not trained
    layer(torch.randn(2, 8, 7, 7, device=device, requires_grad=True)).sum().backward()
    assert len(layer._fastconv.packed) == 1


def test_checkpoints_save_as_much_at_the_first_call() -> None:
    layer = fastconv.Conv2d(8, 16, 3, padding=1, algorithm="implicit_gemm").requires_grad_(False)
    x = torch.randn(2, 8, 7, 7, requires_grad=True)
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    expected = F.conv2d(y := x.detach().double().requires_grad_(), layer.weight.double(), padding=1)
    assert relative_error(x.grad.double(), torch.autograd.grad(expected.sum(), y)[0]) < 2e-6


@pytest.mark.parametrize(
    "failure", [torch.OutOfMemoryError("no room"), ValueError("a mistake")], ids=lambda e: type(e).__name__
)
def test_what_fails_in_a_backward_pass_is_raised_as_what_it_is(failure: Exception, monkeypatch) -> None:
    def fail(*args: object) -> None:
        raise failure

    layer = fastconv.Conv2d(8, 16, 3, 2, 1, algorithm="implicit_gemm")
    x = torch.randn(2, 8, 7, 7, requires_grad=True)
    y = layer(x)
    monkeypatch.setattr(autograd, "input_gradient", fail)
    with pytest.raises(type(failure), match=str(failure)):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    y.sum().backward()  # the next pass is none the worse


def test_a_message_of_the_operators_is_raised_as_what_it_stands_for() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x.clone()

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            torch.ops.fastconv.backward_failed("fastconv.DeviceError: kernel: out of memory", grad)

    with pytest.raises(torch.OutOfMemoryError, match="kernel"):
        Fails.apply(torch.ones(2, requires_grad=True)).sum().backward()


@KINDS
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("algorithm", ["auto", "implicit_gemm", "torch"])
def test_gradients_are_differentiated_again(algorithm: str, stride: int, device: str, kind: str) -> None:
    layer = getattr(fastconv, kind)(8, 16, 3, stride, 1, algorithm=algorithm, precision="fp32", device=device)
    x = torch.randn(2, 8, 7, 7, device=device, requires_grad=True)
    leaves, z = exact(layer, x)
    found = []
    for tensors, y in (((x, *layer.parameters()), layer(x)), (leaves, z)):
        first = torch.autograd.grad(y.square().sum(), tensors, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), tensors))
    assert_alike(*found, 1e-5)


def test_a_call_by_others_is_refused() -> None:
    x, w = torch.randn(1, 8, 4, 4), torch.randn(8, 8, 3, 3)
    for groups in (1, 0, -1):
        with pytest.raises(RuntimeError, match=f"groups {groups}; expected what layer_call returned"):
            torch._mps_convolution(x, w, None, [0, 0], [1, 1], [1, 1], groups)


@KINDS
def test_without_an_operator_for_the_record(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_recorded_convolution", None)
    layer = getattr(fastconv, kind)(8, 16, 3, padding=1, algorithm="implicit_gemm")
    x = torch.randn(2, 8, 7, 7, requires_grad=True)
    found = torch.autograd.grad(layer(x).sum(), (x, layer.weight))
    assert layer.last_algorithm == "implicit_gemm"
    leaves, z = exact(layer, x)
    assert_alike(found, torch.autograd.grad(z.sum(), leaves[:2]), 2e-6)


@KINDS
@pytest.mark.parametrize("device", DEVICES)
def test_a_backward_pass_that_is_compiled(device: str, kind: str) -> None:
    layers = [getattr(fastconv, kind)(8, 8, 3, s, 1, algorithm="implicit_gemm", device=device) for s in (1, 2)]
    network = nn.Sequential(*layers)
    double = nn.Sequential(*[getattr(nn, kind)(8, 8, 3, stride, 1, device=device) for stride in (1, 2)]).double()
    double.load_state_dict(network.state_dict())
    for size in (5, 6):  # whose sizes are symbols the second time
        x = torch.randn(2, 8, size, size, device=device, requires_grad=True)
        network.zero_grad()
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            network(x).square().sum().backward()
        y = x.detach().double().requires_grad_()
        expected = torch.autograd.grad(double(y).square().sum(), (y, *double.parameters()))
        assert_alike([t.grad for t in (x, *network.parameters())], expected, 2e-5)


@pytest.mark.parametrize("kernel", [(3, 4, 3, 3), (0, 4, 3, 3), (3, 0, 3, 3), (3, 0, 1, 1)])
@pytest.mark.parametrize("n", [0, 2])
def test_gradients_of_empty_inputs_are_those_of_torch(n, kernel):
    found = []
    for conv2d in (F.conv2d, fastconv.conv2d):
        leaves = [torch.ones(shape, requires_grad=True) for shape in ((n, kernel[1], 6, 6), kernel, kernel[:1])]
        try:
            gradients = torch.autograd.grad(conv2d(*leaves, padding=1).sum(), leaves)
        except RuntimeError as error:
            found.append(type(error))
        else:
            found.append([each.shape for each in gradients])
    assert found[0] == found[1]
