"""Calls of a layer that train its weight: which are PyTorch's altogether, and what one keeps for those like it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layers import DEVICES
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fastconv
from fastconv import _C, ops

pytestmark = pytest.mark.usefixtures("full_precision")
FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}


def h100() -> _C.DeviceInfo:
    device = _C.h200_device()
    device.name, device.processors = "NVIDIA H100", 132
    device.bandwidth_bytes_per_s = 2.9e12
    return device


def problem(cls: str, c: int, size: int, k: int, r: int, stride: int = 1) -> _C.ConvProblem:
    dtype, precision = ("float16", "fp32") if cls == "fp16" else ("float32", cls)
    return _C.ConvProblem(
        n=64, c=c, h=size, w=size, k=k, r=r, s=r, stride=(stride, stride), padding=(r // 2, r // 2), dtype=dtype,
        precision=precision, layout="nhwc",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("cls", "sizes", "left"),
    [
        ("fp16", (512, 28, 128, 1), True),  # a few microseconds of the forward pass are gained
        ("fp16", (256, 14, 256, 3), True),
        ("fp16", (3, 224, 64, 7, 2), False),  # a hundred
        ("fp16", (32, 128, 32, 3), False),
        ("tf32", (64, 28, 64, 3), True),  # a gain in the shadow of the host's time
        ("tf32", (256, 56, 256, 3), False),
        ("fp32", (512, 28, 128, 1), False),
    ],
)
def test_of_a_gpu_too_little_gain_is_left_to_pytorch(cls: str, sizes: tuple[int, ...], left: bool) -> None:
    assert _C.is_left_to_torch("auto", problem(cls, *sizes), h100(), "" if sizes[0] != 3 else "backward_input") is left


def test_a_name_is_what_runs() -> None:
    asked = problem("fp16", 512, 28, 128, 1)
    assert not _C.is_left_to_torch("implicit_gemm", asked, h100())
    assert _C.is_left_to_torch("torch", asked, h100())
    for name in ("implicit_gemm", "direct"):
        assert not _C.is_left_to_torch(name, problem("fp32", 8, 7, 16, 3), _C.cpu_device(1))


def pair_of(algorithm: str, device: str = "cpu", format: str = "nhwc", **options: Any) -> tuple[nn.Conv2d, nn.Conv2d]:
    """PyTorch's layer and ours with its parameters."""
    plain = nn.Conv2d(8, 16, 3, padding=1, device=device, **options).to(memory_format=FORMATS[format])
    ours = copy.deepcopy(plain)
    fastconv.swap_(ours, algorithm=algorithm)
    return plain, ours


def images(device: str = "cpu", format: str = "nhwc", n: int = 2) -> Tensor:
    return torch.randn(n, 8, 7, 9, device=device).to(memory_format=FORMATS[format])


def trained(layer: nn.Module, x: Tensor, lower: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """Output and gradients, which are what is left of the call."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    with torch.autocast(x.device.type, lower, enabled=lower is not None):
        y = layer(x)
    (y.float() ** 2).mean().backward()
    return y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())


def assert_like(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...], bound: float) -> None:
    """In value, and as memory: an optimizer takes a gradient as it is only where its strides are the parameter's."""
    for a, b in zip(found, wanted, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert (a.double() - b.double()).norm() <= bound * b.double().norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("lower", [None, torch.bfloat16], ids=["plain", "autocast"])
def test_pytorchs_altogether_is_pytorchs_call(lower: torch.dtype | None, format: str, device: str) -> None:
    plain, ours = pair_of("torch", device, format)
    x = images(device, format)
    for _ in range(2):
        assert_like(trained(ours, x, lower), trained(plain, x, lower), 0.0)
    assert ours.last_algorithm == "torch"
    assert ours.last_input_shape == (2, 8, 7, 9)
    if device == "cpu" or lower is not None:  # of class fp32 gradients keep the class, whatever the switch says by then
        with torch.autocast(device, lower, enabled=lower is not None):
            assert type(ours(x).grad_fn).__name__ == "ConvolutionBackward0"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("lower", [None, torch.bfloat16], ids=["plain", "autocast"])
def test_a_call_like_an_earlier_one_is_that_one_again(
    lower: torch.dtype | None, kernel: int, format: str, device: str
) -> None:
    plain = nn.Conv2d(8, 16, kernel, padding=kernel // 2, device=device).to(memory_format=FORMATS[format])
    ours = copy.deepcopy(plain)
    fastconv.swap_(ours, algorithm="implicit_gemm")
    x = images(device, format)
    for _ in range(3):
        assert_like(trained(ours, x, lower), trained(plain, x, lower), 1e-2 if lower else 2e-6)
        assert ours.last_algorithm == "implicit_gemm"
        with torch.no_grad():
            for layer in (plain, ours):
                layer.weight.mul_(1.5)


def stride_of_two(layer: nn.Conv2d) -> None:
    layer.stride = (2, 2)


def circular(layer: nn.Conv2d) -> None:
    layer.padding_mode, layer._reversed_padding_repeated_twice = "circular", (1, 1, 1, 1)


def halved_bias(layer: nn.Conv2d) -> None:
    nn.utils.parametrize.register_parametrization(layer, "bias", Halved())


def other_weight(layer: nn.Conv2d) -> None:
    layer.weight = nn.Parameter(torch.flip(layer.weight.detach(), (0,))[:4])
    layer.bias = None


def in_float64(layer: nn.Conv2d) -> None:
    layer.double()


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2


CHANGES = [stride_of_two, circular, halved_bias, other_weight, in_float64]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("algorithm", ["auto", "implicit_gemm", "torch"])
def test_a_layer_may_have_changed(algorithm: str, change: Callable[[nn.Conv2d], None]) -> None:
    plain, ours = pair_of(algorithm if change is not in_float64 else "auto")
    x = images()
    trained(ours, x)
    for layer in (plain, ours):
        change(layer)
    x = x.to(next(ours.parameters()).dtype)
    for _ in range(2):
        assert_like(trained(ours, x), trained(plain, x), 2e-6)


@pytest.mark.parametrize("algorithm", ["auto", "implicit_gemm", "torch"])
def test_autocast_may_have_been_turned_on_and_off(algorithm: str) -> None:
    plain, ours = pair_of(algorithm)
    x = images()
    for lower in (None, torch.bfloat16, None, torch.float16, torch.bfloat16):
        assert_like(trained(ours, x, lower), trained(plain, x, lower), 2e-6 if lower is None else 1e-2)
    trained(ours, x.bfloat16(), torch.bfloat16)
    with pytest.raises(RuntimeError):
        trained(ours, x.bfloat16())
    assert trained(ours, x.bfloat16(), torch.float16)[0].dtype == torch.float16


@pytest.mark.parametrize("algorithm", ["auto", "implicit_gemm", "torch"])
def test_a_weight_may_be_trained_no_more(algorithm: str) -> None:
    plain, ours = pair_of(algorithm)
    x = images()
    trained(ours, x)
    for layer in (plain, ours):
        layer.weight.requires_grad_(False)
    assert ours(x).requires_grad  # for the bias
    with torch.no_grad():
        assert not ours(x).requires_grad
    torch.testing.assert_close(ours(x), plain(x))


@pytest.mark.parametrize("algorithm", ["implicit_gemm", "torch"])
def test_transforms_of_a_known_call(algorithm: str) -> None:
    plain, ours = pair_of(algorithm)
    x, tangent = images(), images()
    trained(ours, x)
    for transformed in (
        lambda layer: torch.func.jvp(layer, (x,), (tangent,)),
        lambda layer: torch.func.vmap(layer)(torch.stack((x, tangent))),
        lambda layer: torch.func.grad(lambda t: layer(t).square().sum())(x),
        lambda layer: checkpoint(layer, x, use_reentrant=False),
        lambda layer: torch.jit.trace(layer, x)(tangent),
        lambda layer: layer(x[0]),
    ):
        torch.testing.assert_close(transformed(ours), transformed(plain), rtol=1e-4, atol=1e-5)


def test_what_was_found_is_bounded_and_not_copied() -> None:
    _, ours = pair_of("torch")
    for n in range(1, 300):
        ours(images(n=n)[:, :, :1, :1])
    assert 0 < len(ours._fastconv.trained) <= 256
    assert not copy.deepcopy(ours)._fastconv.trained
    ours.to(torch.float32)
    assert not ours._fastconv.trained


def test_a_measured_choice_is_taken_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = pair_of("auto")
    trained(ours, images())
    before = len(ours._fastconv.trained)
    monkeypatch.setattr(ops, "measured_generation", ops.measured_generation + 1)
    trained(ours, images())
    assert len(ours._fastconv.trained) == before + 1


@pytest.mark.parametrize("algorithm", ["auto", "implicit_gemm", "torch"])
def test_a_mistake_behind_a_call_that_was_right(algorithm: str) -> None:
    _, ours = pair_of(algorithm)
    other = copy.deepcopy(ours)
    trained(ours, images())
    for wrong in (torch.randn(2, 7, 7, 9), torch.randn(2, 8, 7, 9, dtype=torch.float64), torch.randn(8, 7)):
        with pytest.raises(RuntimeError) as expected:
            other(wrong)
        with pytest.raises(RuntimeError) as found:
            ours(wrong)
        assert str(found.value) == str(expected.value)


def test_functional_call_with_another_weight() -> None:
    plain, ours = pair_of("torch")
    x, weight = images(), torch.randn(16, 8, 3, 3)
    trained(ours, x)
    y = torch.func.functional_call(ours, {"weight": weight}, (x,))
    torch.testing.assert_close(y, F.conv2d(x, weight, plain.bias, padding=1))


def transposed_pair(algorithm: str, kernel: int, **options: Any) -> tuple[nn.ConvTranspose2d, nn.ConvTranspose2d]:
    plain = nn.ConvTranspose2d(8, 6, kernel, stride=2, **options).to(memory_format=torch.channels_last)
    ours = copy.deepcopy(plain)
    fastconv.swap_(ours, algorithm=algorithm)
    return plain, ours


@pytest.mark.parametrize("lower", [None, torch.bfloat16], ids=["plain", "autocast"])
def test_a_transposed_layer_that_is_pytorchs_altogether(lower: torch.dtype | None) -> None:
    plain, ours = transposed_pair("torch", 2)
    x = images()
    for _ in range(2):
        assert_like(trained(ours, x, lower), trained(plain, x, lower), 0.0)
    assert (ours.last_algorithm, ours.last_input_shape) == ("torch", (2, 8, 7, 9))
    assert type(ours(x).grad_fn).__name__ == "ConvolutionBackward0"


@pytest.mark.parametrize("algorithm", ["auto", "implicit_gemm", "torch"])
def test_a_transposed_layer_may_have_changed(algorithm: str) -> None:
    plain, ours = transposed_pair(algorithm, 3, padding=1)
    x = images()
    for extra, size in (((0, 0), None), ((1, 1), None), ((0, 1), None), ((0, 0), [14, 17]), ((0, 0), None)):
        for layer in (plain, ours):
            layer.output_padding = extra
        for _ in range(2):
            found, wanted = (layer(x, size) for layer in (ours, plain))
            assert found.shape == wanted.shape
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
            assert_like(trained(ours, x), trained(plain, x), 2e-6)
            with torch.no_grad():
                for layer in (plain, ours):
                    layer.weight.mul_(1.5)


@pytest.mark.parametrize("wanted", [True, False])
def test_the_gradient_of_a_transposed_layers_input_is_the_convolution(wanted: bool) -> None:
    """Of U-Net's, AMP on an H100: PyTorch's, whoever asks for the gradient."""
    upwards = _C.ConvProblem(n=32, c=32, h=128, w=128, k=64, r=2, s=2, stride=(2, 2), dtype="float16", layout="nhwc")
    assert _C.is_left_to_torch("auto", upwards, h100(), "" if wanted else "forward")
