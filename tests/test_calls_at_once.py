"""A layer's calls of which nothing is recorded: one like the last is computed of what is kept of that."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layers import DEVICES, NO_GPU
from torch import Tensor, nn

import fastconv

pytestmark = [pytest.mark.usefixtures("full_precision")]
ALGORITHMS = ["auto", "implicit_gemm", "winograd_f4", "torch"]


def known(algorithm: str = "auto", device: str = "cpu", **options: Any) -> tuple[fastconv.FusedConv2d, Tensor]:
    """A layer that has been called, and its input."""
    torch.manual_seed(0)
    layer = fastconv.FusedConv2d(8, 8, 3, padding=1, device=device, algorithm=algorithm, **options).eval()
    x = torch.randn(2, 8, 9, 10, device=device)
    with torch.no_grad():
        for _ in range(3):
            layer(x)
    return layer, x


def expected(layer: fastconv.FusedConv2d, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """PyTorch's, in float64, of the layer's attributes as they are."""
    weight = layer.weight.detach().double()
    bias = None if layer.bias is None else layer.bias.detach().double()
    padding: Any = layer.padding
    y = F.conv2d(x.double(), weight, bias, layer.stride, padding, layer.dilation, layer.groups)
    if residual is not None and not layer.residual_after:
        y = y + residual.double()
    if layer.activation == "leaky_relu":
        y = F.leaky_relu(y, layer.negative_slope)
    elif layer.activation is not None:
        y = {"relu": F.relu, "silu": F.silu}[layer.activation](y)
    if residual is not None and layer.residual_after:
        y = y + residual.double()
    return F.max_pool2d(y, 2) if layer.max_pool else y


def check(layer: fastconv.FusedConv2d, x: Tensor, residual: Tensor | None = None, bound: float = 1e-5) -> None:
    with torch.no_grad():
        y, wanted = layer(x, residual), expected(layer, x, residual)
    assert y.shape == wanted.shape
    assert (y.double() - wanted).norm() <= bound * wanted.norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_kept_serves_other_tensors(
    monkeypatch: pytest.MonkeyPatch, frozen: bool, algorithm: str, device: str
) -> None:
    layer, x = known(algorithm, device, activation="relu")
    layer.requires_grad_(False)
    layer._fastconv.frozen = frozen
    check(layer, x)

    def general(*_: object) -> None:
        raise AssertionError("not at once")

    monkeypatch.setattr(fastconv.FusedConv2d, "_convolve", general)
    with torch.no_grad():
        layer.weight.mul_(0.5 if not frozen else 1.0)
    residual = torch.randn(2, 8, 9, 10, device=device)
    other = torch.randn(3, 8, 13, 6, device=device)
    for case in ((x, None), (x, residual), (other, None), (x.to(memory_format=torch.channels_last), None)):
        check(layer, *case)
    y = layer(x)  # with gradients admitted, of which none is wanted
    assert y.grad_fn is None
    assert layer.last_input_shape == tuple(x.shape)
    assert layer.last_algorithm == (algorithm if algorithm != "auto" else layer.last_algorithm)


CHANGES: dict[str, Callable[[fastconv.FusedConv2d], object]] = {
    "stride": lambda layer: setattr(layer, "stride", (2, 2)),
    "a list of strides": lambda layer: setattr(layer, "stride", [2, 1]),
    "padding": lambda layer: setattr(layer, "padding", (2, 0)),
    "named padding": lambda layer: setattr(layer, "padding", "valid"),
    "dilation": lambda layer: setattr(layer, "dilation", (2, 2)),
    "activation": lambda layer: setattr(layer, "activation", "silu"),
    "slope": lambda layer: setattr(layer, "negative_slope", 0.5),
    "max_pool": lambda layer: setattr(layer, "max_pool", True),
    "weight": lambda layer: setattr(layer, "weight", nn.Parameter(torch.randn(8, 8, 3, 3))),
    "weight's data": lambda layer: setattr(layer.weight, "data", torch.randn(8, 8, 3, 3)),
    "another kernel": lambda layer: setattr(layer, "weight", nn.Parameter(torch.randn(8, 8, 1, 1))),
    "no bias": lambda layer: setattr(layer, "bias", None),
    "parametrized": lambda layer: nn.utils.parametrizations.weight_norm(layer),
    "frozen": lambda layer: layer.requires_grad_(False) and setattr(layer._fastconv, "frozen", True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_attribute_that_has_changed_is_seen(change: str) -> None:
    layer, x = known(activation="leaky_relu")
    CHANGES[change](layer)
    for _ in range(3):
        check(layer, x)


@pytest.mark.parametrize(("kind", "attribute"), [(nn.Conv1d, "stride"), (nn.Conv2d, "stride"), (nn.Conv2d, "padding")])
def test_a_list_that_is_written_to_is_seen(kind: type[nn.Conv1d | nn.Conv2d], attribute: str) -> None:
    theirs = kind(8, 8, 3, padding=1)
    ours = nn.Sequential(copy.deepcopy(theirs))
    fastconv.swap_(ours, precision="fp32")
    x = torch.randn(1, 8, *[20] * len(theirs.kernel_size))
    with torch.no_grad():
        for layer in (theirs, ours[0]):
            setattr(layer, attribute, list(getattr(layer, attribute)))
        for _ in range(3):
            assert torch.allclose(ours(x), theirs(x), atol=1e-5)
        for layer in (theirs, ours[0]):
            getattr(layer, attribute)[0] = 2
        assert torch.allclose(ours(x), theirs(x), atol=1e-5)


def test_a_residual_goes_where_it_belongs() -> None:
    layer, x = known(activation="relu")
    residual = torch.randn(2, 8, 9, 10)
    for after in (False, True, False):
        layer.residual_after = after
        for each in (None, residual):
            check(layer, x, each)
    with pytest.raises(RuntimeError):
        layer(x, residual[:, :, :4, :4])
    check(layer, x, residual[:1])  # what `+` broadcasts
    check(layer, x, residual.double(), bound=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_and_types_alternate(device: str) -> None:
    layer, x = known(device=device)
    with torch.no_grad():
        for lower in (torch.bfloat16, torch.float16, None, torch.bfloat16):
            with torch.autocast(device, lower, enabled=lower is not None):
                y = layer(x)
                again = layer(x.to(lower or torch.float32))
            assert y.dtype is again.dtype is (lower or torch.float32)
            assert (y.double() - expected(layer, x)).norm() <= (1e-2 if lower else 1e-5) * expected(layer, x).norm()
        half = copy.deepcopy(layer).bfloat16()
        assert half(x.bfloat16()).dtype is torch.bfloat16
        with pytest.raises(RuntimeError):
            layer(x.bfloat16())
        check(layer, x)


def test_an_image_without_a_batch_and_empty_ones() -> None:
    layer, x = known()
    check(layer, x[0])
    check(layer, x[:0])
    with pytest.raises(RuntimeError, match="channels"):
        layer(x[:, :4])
    check(layer, x)


def test_gradients_that_are_wanted_are_recorded() -> None:
    layer, x = known(activation="relu")
    assert layer(x).requires_grad
    layer.requires_grad_(False)
    assert not layer(x).requires_grad
    wanted = x.clone().requires_grad_()
    layer(wanted).sum().backward()
    assert wanted.grad is not None
    residual = torch.randn(2, 8, 9, 10, requires_grad=True)
    layer(x, residual).sum().backward()
    assert residual.grad is not None
    assert layer.bias is not None
    layer.bias.requires_grad_()
    assert layer(x).requires_grad


@pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)
def test_pytorchs_switch_is_asked_in_every_call() -> None:
    layer, x = known(device="cuda")
    for precision, bound in (("ieee", 1e-5), ("tf32", 3e-3), ("ieee", 1e-5)):
        torch.backends.cudnn.conv.fp32_precision = precision
        check(layer, x, bound=bound)
        assert layer._fastconv.last_kind[2] == ("tf32" if precision == "tf32" else "fp32")


def test_threads_share_a_layer() -> None:
    layer, x = known("implicit_gemm", activation="relu")
    images = [torch.randn(1, 8, 5 + i, 6) for i in range(8)]

    def work(image: Tensor) -> bool:
        with torch.no_grad():
            wanted = expected(layer, image)
            return all(bool((layer(image) - wanted).norm() <= 1e-5 * wanted.norm()) for _ in range(200))

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, images))
    check(layer, x)


@pytest.mark.parametrize("algorithm", ["winograd_f4", "implicit_gemm", "winograd_fused", "winograd_megakernel"])
def test_threads_with_weights_of_their_own_share_a_layer(algorithm: str) -> None:
    """As `functional_call` and shallow copies do: nobody reads what another has packed."""
    first = fastconv.Conv2d(32, 32, 3, padding=1, algorithm=algorithm, precision="fp32").requires_grad_(False)
    second = copy.copy(first)
    second.__dict__["_parameters"] = {"weight": nn.Parameter(torch.randn(32, 32, 3, 3), False), "bias": first.bias}

    def wrong(layer: fastconv.Conv2d) -> int:
        x = torch.randn(2, 32, 24, 24)
        expected = F.conv2d(x.double(), layer.weight.double(), layer.bias.double(), padding=1)
        return sum(float((layer(x) - expected).abs().max()) > 1e-3 for _ in range(40))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(wrong, (first, second))) == [0, 0]
    assert wrong(first) == wrong(second) == 0  # in turns, too


def test_a_copy_knows_nothing() -> None:
    layer, x = known()
    assert layer._fastconv.inferred is not None
    twin = copy.deepcopy(layer)
    assert twin._fastconv.inferred is None
    check(twin, x)


def test_a_transposed_layer_too() -> None:
    layer = fastconv.ConvTranspose2d(8, 4, 2, stride=2, algorithm="implicit_gemm").eval()
    x = torch.randn(2, 8, 5, 6)

    def wanted() -> Tensor:
        return F.conv_transpose2d(x, layer.weight, layer.bias, layer.stride, layer.padding, layer.output_padding)  # type: ignore[arg-type]

    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(layer(x), wanted(), rtol=1e-4, atol=1e-5)
        for name, value in (("output_padding", (1, 1)), ("padding", (1, 1)), ("stride", (3, 3))):
            setattr(layer, name, value)
            torch.testing.assert_close(layer(x), wanted(), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(layer(x), wanted(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("algorithm", ["auto", "implicit_gemm", "torch"])
def test_a_row_too(monkeypatch: pytest.MonkeyPatch, algorithm: str) -> None:
    layer = fastconv.Conv1d(8, 4, 3, padding=1, algorithm=algorithm).eval()
    x = torch.randn(2, 8, 11)

    def check_row(x: Tensor) -> None:
        padding: Any = layer.padding
        wanted = F.conv1d(x, layer.weight, layer.bias, layer.stride, padding, layer.dilation)
        torch.testing.assert_close(layer(x), wanted, rtol=1e-4, atol=1e-5)

    with torch.no_grad():
        for _ in range(3):
            check_row(x)
        with monkeypatch.context() as patch:
            patch.setattr(fastconv.Conv1d, "_as_conv2d", None)
            layer.weight.mul_(0.5)
            check_row(x)
            check_row(x[:, :, ::2])
            assert layer.last_input_shape == (2, 8, 6)
        for name, value in (("stride", (2,)), ("padding", (0,)), ("dilation", (2,)), ("padding", "same")):
            setattr(layer, name, value)
            if value == "same":
                layer.stride = (1,)
            check_row(x)
            check_row(x)
        check_row(x[0])
    assert layer(x).requires_grad
