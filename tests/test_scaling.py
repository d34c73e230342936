"""Factors and summands of channels behind convolutions: what goes into filters and biases, values against float64."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torchvision
from fusing import check as check_fused
from fusing import parts
from layers import relative_error
from rewriting import OURS, Rewriting, check, compiled
from torch import Tensor, nn
from torch._inductor import config

import fastconv
from fastconv.rewrites import Asked

pytestmark = pytest.mark.usefixtures("full_precision")

FROZEN = Asked(algorithm="implicit_gemm", packed=True, scatters=True)


class Model(nn.Module):
    def __init__(self, forward: Callable[["Model", Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 1)
        self.norm, self.frozen = nn.BatchNorm2d(8), torchvision.ops.FrozenBatchNorm2d(8)
        for norm in (self.norm, self.frozen):
            for name, low in (("weight", 0.5), ("bias", -1.0), ("running_mean", -1.0), ("running_var", 0.5)):
                getattr(norm, name).data.uniform_(low, 1.5)
        self.gamma = nn.Parameter(torch.rand(8) + 0.5)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.call = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)

    def scale(self) -> Tensor:
        return self.gamma.view(1, -1, 1, 1)


CASES: dict[str, tuple[Callable[[Model, Tensor], Tensor], list[str]]] = {
    "a frozen norm": (lambda m, x: F.relu(m.frozen(m.a(x))), ["conv+scale+shift+relu"]),
    "of a bias": (lambda m, x: F.relu(m.frozen(m.b(x))), ["conv+scale+shift+relu"]),
    "a layer scale": (lambda m, x: m.b(m.a(x)) * m.scale() + x, ["conv", "conv+scale+residual"]),
    "three dimensions": (lambda m, x: m.gamma[:, None, None] * m.b(x), ["conv+scale"]),
    "behind a norm": (lambda m, x: m.norm(m.a(x)) * m.scale() + m.scale(), ["conv+bn+scale+shift"]),
    "behind a norm without factors": (
        lambda m, x: F.batch_norm(m.a(x), m.norm.running_mean, m.norm.running_var) * m.scale(), ["conv+bn+scale"]),
    "a number": (lambda m, x: m.b(x) * 0.2 + x, ["conv+scale+residual"]),
    "a quotient": (lambda m, x: m.b(x) / 3 + x, ["conv+scale+residual"]),
    "quotients and differences": (lambda m, x: m.b(x) / m.scale() - m.scale() - 0.5, ["conv+scale+shift+shift"]),
    "a difference": (lambda m, x: F.relu(m.scale() - m.b(x)) + x, ["conv+scale+shift+relu+residual"]),
    "a number minus it": (lambda m, x: 1 - m.a(x) + x, ["conv+scale+shift+residual"]),
    "a gain minus its norm": (lambda m, x: m.gain - m.norm(m.a(x)), ["conv+bn+scale+shift"]),
    "twice the other way": (
        lambda m, x: m.gamma[:, None, None] - (2 - m.b(x) * 3), ["conv+scale+scale+shift+scale+shift"]),
    "a number is added": (lambda m, x: F.relu(1 + m.b(x)), ["conv+shift+relu"]),
    "a parameter": (lambda m, x: m.a(x) * m.gain, ["conv+scale"]),
    "a convolution called twice": (lambda m, x: m.b(m.b(x) * 2) * 2, ["conv+scale"] * 2),
    # Left alone:
    "a gate": (lambda m, x: m.b(x) * x.mean((2, 3), keepdim=True), ["conv"]),
    "behind an activation": (lambda m, x: F.relu(m.b(x)) * 2, ["conv+relu"]),
    "behind a sum": (lambda m, x: (m.b(x) + x) * 2, ["conv+residual"]),
    "read twice": (lambda m, x: (y := m.b(x)) * 2 + y.mean(), ["conv"]),
    "columns": (lambda m, x: m.b(x) * m.gamma[:5], ["conv"]),
    "another dtype": (lambda m, x: (m.b(x) * m.scale().double()).to(x.dtype), ["conv"]),
    "a constant without an input": (lambda m, x: m.b(x) * torch.arange(8.0).view(8, 1, 1), ["conv"]),
    "nothing": (lambda m, x: m.b(x) * 1 + x, ["conv+residual"]),
    "a quotient's divisor": (lambda m, x: m.scale() / (m.b(x) ** 2 + 1), ["conv"]),
    "an activation in steps": (lambda m, x: (y := m.b(x)) * F.relu6(y + 3) / 6, ["conv"]),
}  # fmt: skip
# What a trace computes once.
FUSED_OTHERWISE = {"a constant without an input": ["conv+scale"]}


@pytest.mark.parametrize("name", CASES)
def test_what_is_folded(name: str) -> None:
    forward, wanted = CASES[name]
    # One image: a gate has the shape of a constant.
    with config.patch(freezing=True):
        backend = check(Model(forward), torch.randn(1, 8, 7, 5), FROZEN)
    assert backend.parts == wanted


@pytest.mark.parametrize("name", CASES)
def test_fuse_folds_the_same(name: str) -> None:
    forward, wanted = CASES[name]
    fused = check_fused(Model(forward), torch.randn(1, 8, 7, 5))
    found = parts(fused) * (2 if name == "a convolution called twice" else 1)  # one layer
    assert sorted(filter(None, found)) == sorted(FUSED_OTHERWISE.get(name, wanted))  # some call one convolution


HALVES: dict[str, tuple[Callable[[Model, Tensor], Tensor], list[str]]] = {
    "a number": (lambda m, x: m.b(x) * 0.2, ["conv+scale"]),
    "a small number": (lambda m, x: m.b(x) * 1e-4, ["conv"]),
    "a tiny number": (lambda m, x: m.b(x) * 1e-6, ["conv"]),
    "a large divisor": (lambda m, x: m.b(x) / 1e5, ["conv"]),
    "a layer scale": (lambda m, x: m.b(x) * m.scale(), ["conv+scale"]),
    "a small layer scale": (lambda m, x: m.b(x) * (m.scale() * 1e-4), ["conv"]),
    "behind a norm": (lambda m, x: m.norm(m.a(x)) * (m.scale() * 1e-4), ["conv+bn"]),
    "a norm with a small factor": (
        lambda m, x: F.batch_norm(m.a(x), m.norm.running_mean, m.norm.running_var, m.gamma * 1e-4), ["conv"]),
    "filters of a call": (lambda m, x: F.conv2d(x, x.flatten()[:64].view(8, 8, 1, 1)) * 0.2, ["conv+scale"]),
    "filters of a call, a small number": (
        lambda m, x: F.conv2d(x, x.flatten()[:64].view(8, 8, 1, 1)) * 1e-3, ["conv"]),
}  # fmt: skip


@pytest.mark.parametrize("name", HALVES)
def test_float16_keeps_what_folding_would_round_away(name: str) -> None:
    forward, wanted = HALVES[name]
    model, x = Model(forward).eval().half(), torch.randn(1, 8, 7, 5).half()
    function, backend = compiled(model, FROZEN)
    with torch.no_grad(), config.patch(freezing=True):
        exact = copy.deepcopy(model).double()(x.double())
        limit = 1.5 * relative_error(model(x).double(), exact)
        assert relative_error(function(x).double(), exact) < limit
    assert backend.parts == wanted
    assert backend.codes == ["norm_range" if wanted in (["conv"], ["conv+bn"]) else ""]


def test_weights_that_may_change_are_left_alone() -> None:
    forward, _ = CASES["a frozen norm"]
    assert check(Model(forward), torch.randn(2, 8, 7, 5), OURS).parts == ["conv"]


def test_gradients_are_those_of_the_parameters() -> None:
    model, x = Model(CASES["a layer scale"][0]), torch.randn(2, 8, 7, 5)
    exact = copy.deepcopy(model).double()
    exact(x.double()).square().sum().backward()
    torch._dynamo.reset()
    torch.compile(model, backend=Rewriting(FROZEN))(x).square().sum().backward()
    for ours, wanted in zip(model.parameters(), exact.parameters(), strict=True):
        assert (ours.grad is None) == (wanted.grad is None)
        assert ours.grad is None or relative_error(ours.grad.double(), wanted.grad) < 1e-5


def test_export(tmp_path) -> None:
    from fastconv.compiler.ahead import rewritten

    model, x = Model(CASES["a frozen norm"][0]).eval(), torch.randn(2, 8, 7, 5)
    with torch.no_grad():
        module, found = rewritten(model, (x,), FROZEN)
        assert ["+".join(taken.parts) for taken in found] == ["conv+scale+shift+relu"]
        assert relative_error(module(x).double(), copy.deepcopy(model).double()(x.double())) < 1e-5


def test_with_inductor() -> None:
    model, x = Model(CASES["a frozen norm"][0]).eval(), torch.randn(2, 8, 7, 5)
    torch._dynamo.reset()
    function = fastconv.compile(model, "fp32", algorithm="implicit_gemm", frozen=True)
    with torch.no_grad(), torch.compiler.config.patch(force_disable_caches=True):
        assert relative_error(function(x).double(), copy.deepcopy(model).double()(x.double())) < 1e-5
    assert [row.fused for row in function.report.rows] == ["conv+scale+shift+relu"]
