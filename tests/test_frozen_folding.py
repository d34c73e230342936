"""What PyTorch's freezing does to the convolutions that stay PyTorch's: it must not change what they compute."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fusing import norm
from layers import relative_error
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config

import fastconv

pytestmark = pytest.mark.usefixtures("full_precision")

# What may stand behind a convolution: c has a number for each channel, `one` has one in all.
BEHIND: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mul": lambda y, c, one: y * c,
    "sub": lambda y, c, one: c - y / one,
    "number": lambda y, c, one: y * 1.5 + 2.5,
    "behind a view": lambda y, c, one: y.clone().view(y.shape) * c,
}  # fmt: skip
# Channels, groups and bias. PyTorch takes the weight's first dimension for the output's channels.
CONVOLUTIONS = [(8, 8, 1, True), (8, 8, 4, False), (8, 4, 2, True)]


class Behind(nn.Module):
    """Convolutions, each of its own, with a norm or one of these behind it."""

    def __init__(self, kind: type[Any], names: list[str], dtype: torch.dtype) -> None:
        super().__init__()
        cases = list(itertools.product(names, CONVOLUTIONS))
        convs = [kind(c, k, 3, 2, padding=1, groups=groups, bias=bias) for _, (c, k, groups, bias) in cases]
        size = [1] * len(convs[0].kernel_size)
        self.names = [name for name, _ in cases]
        self.convs = nn.ModuleList(convs)
        self.norms = nn.ModuleList(norm(conv.out_channels) for conv in convs)
        for each in self.norms:
            each._check_input_dim = lambda x: None  # a norm is one of any dimensions
        self.factors = nn.ParameterList(torch.rand(1, conv.out_channels, *size) + 0.5 for conv in convs)
        self.one = nn.Parameter(torch.rand(1) + 0.5)
        self.images = [torch.randn(2, conv.in_channels, *(5 * each for each in size), dtype=dtype) for conv in convs]
        self.eval().to(dtype)

    def forward(self, *images: Tensor) -> list[Tensor]:
        result = []
        for name, x, conv, normed, c in zip(self.names, images, self.convs, self.norms, self.factors, strict=True):
            y = conv(x)
            result.append(normed(y) if name == "norm" else BEHIND[name](y, c, self.one))
        return result


def check(model: Behind, run: Any) -> None:
    dtype, found = model.images[0].dtype, run(*model.images)
    exact = model.double()(*(x.double() for x in model.images))
    limit = 1e-5 if dtype == torch.float32 else 5e-2
    wrong = [
        (name, str(conv), relative_error(y.double(), each))
        for name, conv, y, each in zip(model.names, model.convs, found, exact, strict=True)
        if y.dtype != dtype or not relative_error(y.double(), each) < limit
    ]
    assert not wrong


@torch.no_grad()
@pytest.mark.parametrize("kind", [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Conv1d, nn.Conv3d])
def test_what_stands_behind_a_convolution_of_pytorchs(kind: type[Any]) -> None:
    torch._dynamo.reset()
    model = Behind(kind, ["norm", *BEHIND] if kind is nn.ConvTranspose2d else ["norm", "mul"], torch.float32)
    check(model, fastconv.compile(model, frozen=True))


@torch.no_grad()
def test_in_a_half_type_by_pytorchs_switch() -> None:
    torch._dynamo.reset()
    model = Behind(nn.ConvTranspose2d, ["norm", "mul"], torch.bfloat16)
    with config.patch(freezing=True):
        check(model, torch.compile(model, backend="fastconv"))


@torch.no_grad()
def test_in_a_package(tmp_path: Path) -> None:
    model = Behind(nn.ConvTranspose2d, ["norm"], torch.float32)
    fastconv.export(model, model.images, tmp_path / "model.pt2", options={"freezing": True})
    check(model, torch._inductor.aoti_load_package(str(tmp_path / "model.pt2")))


@torch.no_grad()
def test_beside_a_pass_of_the_callers() -> None:
    torch._dynamo.reset()
    seen: list[Any] = []
    model = Behind(nn.ConvTranspose2d, ["norm"], torch.float32)
    options: Any = {"joint_custom_pre_pass": seen.append, "joint_custom_post_pass": seen.append}
    with torch.compiler.config.patch(force_disable_caches=True):
        check(model, fastconv.compile(model, frozen=True, options=options))
    assert len(seen) == 2


class Clamped(nn.Module):
    """Convolutions of pictures, of the first row of each and of piles of them, with what clamps behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(9))
        self.low = nn.Conv2d(16, 16, 3, padding=1).bfloat16()
        self.row = nn.Sequential(nn.Conv1d(16, 16, 3), nn.BatchNorm1d(16), nn.ReLU())
        self.pile = nn.Sequential(nn.Conv3d(16, 16, 2), nn.BatchNorm3d(16), nn.ReLU6())
        self.transposed = nn.Sequential(nn.ConvTranspose2d(16, 16, 3, 2), nn.ReLU())
        self.norm = norm(16)

    def forward(self, x: Tensor) -> list[Tensor]:
        a, b, c, d, e, f, g, h, i = (conv(x) for conv in self.convs)
        return [
            F.relu(a), F.relu6(b), F.leaky_relu(c, 0.0), F.hardtanh(d), F.hardsigmoid(e), torch.clamp(f, min=-1.0),
            F.relu(g + x), F.relu(self.norm(h)), F.hardswish(i), F.relu(self.low(x.bfloat16())), self.row(x[:, :, 0]),
            self.pile(x[:, :, None].expand(-1, -1, 2, -1, -1)), self.transposed(x),
        ]  # fmt: skip


@torch.no_grad()
def test_nan_stays_nan_behind_what_clamps() -> None:
    torch._dynamo.reset()
    model, x = Clamped().eval(), torch.randn(2, 16, 9, 9)
    x[0, 3, 0, 4] = math.nan
    compiled = fastconv.compile(model, frozen=True, algorithm="torch")
    before = counters["inductor"]["mkldnn_unary_fusion_matcher_count"]
    for y, expected in zip(compiled(x), model(x), strict=True):
        assert expected.isnan().any()
        limit = 1e-5 if y.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(y, expected, rtol=limit, atol=limit, equal_nan=True)
    assert counters["inductor"]["mkldnn_unary_fusion_matcher_count"] <= before + 1  # hardswish, which keeps it


@pytest.mark.parametrize("number", [1, 2.5])
def test_a_number_minus_a_convolution(number: float) -> None:
    class Subtracted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return number - self.conv(x)

    torch._dynamo.reset()
    model, x = Subtracted().eval(), torch.randn(2, 4, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(fastconv.compile(model, frozen=True)(x), model(x), rtol=1e-4, atol=1e-5)
