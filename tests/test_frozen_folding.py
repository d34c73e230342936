"""What PyTorch's freezing does to the convolutions that stay PyTorch's: it must not change what they compute."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fusing import norm
from layers import relative_error
from torch import Tensor, nn

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
    """Each convolution with a norm, and with each of these behind it."""

    def __init__(self, convs: list[Any], behind: list[str]) -> None:
        super().__init__()
        self.convs, self.behind = nn.ModuleList(convs), behind
        self.norms = nn.ModuleList(norm(conv.out_channels) for conv in convs)
        dims = len(convs[0].kernel_size)
        for each in self.norms:
            each._check_input_dim = lambda x: None  # a norm is one of any dimensions
        self.factors = nn.ParameterList(torch.rand(1, conv.out_channels, *[1] * dims) + 0.5 for conv in convs)
        self.one = nn.Parameter(torch.rand(1) + 0.5)

    def forward(self, *images: Tensor) -> list[Tensor]:
        result = []
        for x, conv, normed, c in zip(images, self.convs, self.norms, self.factors, strict=True):
            result.append(normed(conv(x)))
            result += [BEHIND[name](conv(1.0 * x + i), c, self.one) for i, name in enumerate(self.behind)]
        return result


def model_of(kind: type[Any], behind: list[str], dtype: torch.dtype) -> tuple[nn.Module, list[Tensor]]:
    convs = [kind(c, k, 3, 2, padding=1, groups=groups, bias=bias) for c, k, groups, bias in CONVOLUTIONS]
    dims = len(convs[0].kernel_size)
    images = [torch.randn(2, conv.in_channels, *[5] * dims, dtype=dtype) for conv in convs]
    return Behind(convs, behind).eval().to(dtype), images


def check(model: nn.Module, images: list[Tensor], run: Any) -> None:
    dtype, found = images[0].dtype, run(*images)
    for y, exact in zip(found, model.double()(*(x.double() for x in images)), strict=True):
        assert y.dtype == dtype
        assert relative_error(y.double(), exact) < (1e-5 if dtype == torch.float32 else 5e-2)


@torch.no_grad()
@pytest.mark.parametrize("kind", [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Conv1d, nn.Conv3d])
def test_what_stands_behind_a_convolution_of_pytorchs(kind: type[Any]) -> None:
    torch._dynamo.reset()
    model, images = model_of(kind, list(BEHIND) if kind is nn.ConvTranspose2d else ["mul"], torch.float32)
    check(model, images, fastconv.compile(model, frozen=True))


@torch.no_grad()
def test_in_a_half_type_by_the_name_of_the_backend() -> None:
    torch._dynamo.reset()
    model, images = model_of(nn.ConvTranspose2d, ["mul"], torch.bfloat16)
    check(model, images, torch.compile(model, backend="fastconv", options={"freezing": True}))


@torch.no_grad()
def test_in_a_package(tmp_path: Path) -> None:
    model, images = model_of(nn.ConvTranspose2d, [], torch.float32)
    fastconv.export(model, images, tmp_path / "model.pt2", options={"freezing": True})
    check(model, images, torch._inductor.aoti_load_package(str(tmp_path / "model.pt2")))


@torch.no_grad()
def test_beside_a_pass_of_the_callers() -> None:
    torch._dynamo.reset()
    seen: list[Any] = []
    model, images = model_of(nn.ConvTranspose2d, [], torch.float32)
    options: Any = {"joint_custom_pre_pass": seen.append, "joint_custom_post_pass": seen.append}
    with torch.compiler.config.patch(force_disable_caches=True):
        check(model, images, fastconv.compile(model, frozen=True, options=options))
    assert len(seen) == 2
