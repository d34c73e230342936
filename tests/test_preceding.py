"""Constants and norms before convolutions: what goes into filters and biases, values against float64."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fusing import check as check_fused
from fusing import fuse_quietly, hooked, norm
from fusing import parts as all_parts
from layers import relative_error
from rewriting import OURS, Rewriting, check, compiled
from torch import Tensor, nn
from torch._inductor import config

import fastconv
from fastconv.rewrites import Asked

pytestmark = pytest.mark.usefixtures("full_precision")

FROZEN = Asked(algorithm="implicit_gemm", packed=True, scatters=True)


class Model(nn.Module):
    """Convolutions with padding, without, of two groups and depthwise, a norm, and numbers for each channel."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.pads, self.conv = nn.Conv2d(6, 8, 3, padding=1), nn.Conv2d(6, 8, 3, bias=False)
        self.grouped, self.depthwise = nn.Conv2d(6, 4, (1, 2), groups=2), nn.Conv2d(6, 12, 3, groups=6)
        self.reflects = nn.Conv2d(6, 8, 3, padding=1, padding_mode="reflect")
        self.norm, self.after = norm(6), norm(8)
        self.register_buffer("mean", torch.rand(6, 1, 1))
        self.register_buffer("std", torch.rand(1, 6, 1, 1) + 0.5)
        self.p = nn.Parameter(torch.rand(6) + 0.5)
        self.call = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


def parts(fused: fastconv.FusedModule) -> list[str]:
    """Of the convolutions that are called."""
    return [part for part in all_parts(fused) if part]


def functional(m: Any, x: Tensor, norm: str = "norm", **arguments: Any) -> Tensor:
    n = getattr(m, norm)
    return F.batch_norm(
        x, n.running_mean, n.running_var, n.weight, **{"bias": n.bias, "training": m.training} | arguments
    )


Case = tuple[Callable[[Any, Tensor], Tensor], str]

CASES: dict[str, Case] = {
    "normalised": (lambda m, x: m.conv((x - m.mean) / m.std).relu(), "shift+scale+conv+relu"),
    "normalised, padded": (lambda m, x: m.pads((x - m.mean) / m.std).relu(), "scale+conv+relu"),
    "shifted last, padded": (lambda m, x: m.pads(x / m.std - m.mean), "conv"),
    "a factor": (lambda m, x: m.pads(m.p[:, None, None] * x), "scale+conv"),
    "a number": (lambda m, x: m.pads(F.relu(x) * 0.5) + 1, "scale+conv+shift"),
    "fractions": (lambda m, x: m.conv(x * 2.0 - 1.0), "scale+shift+conv"),
    "of 255": (lambda m, x: m.pads(x / 255), "scale+conv"),
    "groups": (lambda m, x: m.grouped(x * m.std + m.mean), "scale+shift+conv"),
    "depthwise": (lambda m, x: m.depthwise(x * m.std + m.mean), "scale+shift+conv"),
    "computed": (lambda m, x: m.conv(x * (m.p + 1).rsqrt()[:, None, None]), "scale+conv"),
    "with a norm behind": (lambda m, x: m.after(m.conv(x / m.std)) * 0.5, "scale+conv+bn+scale"),
    "in another padding mode": (lambda m, x: m.reflects(x * m.std), "scale+conv"),
    "a norm": (lambda m, x: m.conv(m.norm(x)), "bn+conv"),
    "a norm, groups": (lambda m, x: m.grouped(m.norm(x * 2.0)), "scale+bn+conv"),
    "a norm that is a function": (lambda m, x: m.conv(functional(m, x)).relu(), "bn+conv+relu"),
    "a norm without factors": (lambda m, x: m.conv(functional(m, x, bias=None)), "bn+conv"),
    # Left alone:
    "shifted, in another padding mode": (lambda m, x: m.reflects(x + m.mean), "conv"),
    "a difference": (lambda m, x: m.conv(m.mean - x), "conv"),
    "a quotient": (lambda m, x: m.conv(m.mean / (x.abs() + 1)), "conv"),
    "read twice": (lambda m, x: m.conv(y := x * m.std) + y.mean(), "conv"),
    "a residual": (lambda m, x: m.conv(F.pad(y := x * m.std, [1] * 4)) + y.sum(1, keepdim=True), "conv"),
    "a gate": (lambda m, x: m.conv(x * x.mean((2, 3), keepdim=True)), "conv"),
    "columns": (lambda m, x: m.conv(x * m.p[:5]), "conv"),
    "channels of a map": (lambda m, x: m.conv(x * m.std.expand(1, 6, 7, 5)), "conv"),
    "another dtype": (lambda m, x: m.conv((x * m.std.double()).to(m.p.dtype)), "conv"),
}  # fmt: skip


# What only one of them sees: padding in another mode, an operator of its own in `compile`, and the shapes of a sum.
COMPILED_OTHERWISE = {"in another padding mode": "conv"}
FUSED_OTHERWISE = {"read twice": "conv+residual", "a residual": "conv+residual"}


@pytest.mark.parametrize("name", CASES)
def test_what_is_folded(name: str) -> None:
    forward, wanted = CASES[name]
    with config.patch(freezing=True):
        backend = check(Model(forward), torch.randn(1, 6, 7, 5), FROZEN)
    assert backend.parts == [COMPILED_OTHERWISE.get(name, wanted)]


@pytest.mark.parametrize("name", CASES)
def test_fuse_folds_the_same(name: str) -> None:
    forward, wanted = CASES[name]
    model, x = Model(forward), torch.randn(1, 6, 7, 5)
    fused = check_fused(model, x)
    assert parts(fused) == [FUSED_OTHERWISE.get(name, wanted)]
    check_fused(model, x.to(memory_format=torch.channels_last))


def test_filters_are_rounded_once() -> None:
    model = Model(CASES["normalised"][0])
    layer = fuse_quietly(model).conv
    mean, std, w = model.mean.double(), model.std.double(), model.conv.weight.double()
    weight = w / std
    bias = -(weight * mean).sum((1, 2, 3))
    assert (layer.weight.double() - weight).abs().max() <= 2.0**-24 * weight.abs().max()
    assert (layer.bias.double() - bias).abs().max() <= 2.0**-24 * bias.abs().max()


IMAGES: dict[str, Tensor] = {
    "bytes": torch.randint(0, 255, (2, 6, 7, 5), dtype=torch.uint8),
    "halves": torch.randn(2, 6, 7, 5).half(),
    "grey": torch.randn(2, 1, 7, 5),
    "grey bytes": torch.randint(0, 255, (2, 1, 7, 5), dtype=torch.uint8),
    "one image": torch.randn(6, 7, 5),
    "an empty batch": torch.randn(0, 6, 7, 5),
}


@pytest.mark.parametrize("image", IMAGES)
@pytest.mark.parametrize("name", ["normalised", "normalised, padded", "of 255", "fractions"])
def test_other_inputs_are_promoted_and_broadcast_as_the_arithmetic_does(name: str, image: str) -> None:
    model, x = Model(CASES[name][0]).eval(), IMAGES[image]
    if name in ("of 255", "fractions") and image in ("halves", "grey", "grey bytes"):
        return  # which numbers do not make what the filters take
    fused = fuse_quietly(model)
    with torch.no_grad():
        exact, y = model(x), fused(x)
        assert (y.shape, y.dtype) == (exact.shape, exact.dtype)
        torch.testing.assert_close(y, exact, rtol=1e-4, atol=1e-4)
        backend = check(model, x.float(), FROZEN) if image == "bytes" else None
    assert backend is None or backend.parts


def test_integers_keep_their_arithmetic() -> None:
    """Which wraps around: `compile` sees the dtype, `fuse` takes numbers with a fraction alone."""
    x = torch.randint(0, 255, (1, 6, 7, 5), dtype=torch.uint8)
    for forward in (lambda m, x: m.pads((x * 3) / 255), lambda m, x: m.conv(x.mul(3).sub(200).float())):
        model = Model(forward).eval()
        with torch.no_grad():
            torch.testing.assert_close(fuse_quietly(model)(x), model(x), rtol=1e-4, atol=1e-4)
            function, backend = compiled(model, FROZEN)
            with config.patch(freezing=True):
                torch.testing.assert_close(function(x), model(x), rtol=1e-4, atol=1e-4)
            assert backend.parts == ["conv"]


def test_a_number_of_another_type_makes_integers_of_that_type() -> None:
    """Which the filters do not take."""
    scale = torch.tensor(0.5, dtype=torch.float64)
    model, x = Model(lambda m, x: m.pads(x * scale)).eval(), torch.randn(2, 6, 7, 5)
    fused = fuse_quietly(model)
    assert parts(fused) == ["scale+conv"]
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-4)
        for each in (model, fused):
            with pytest.raises(RuntimeError):
                each(torch.ones(2, 6, 7, 5, dtype=torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types(dtype: torch.dtype) -> None:
    model, x = Model(CASES["normalised"][0]).eval().to(dtype), torch.randn(2, 6, 7, 5).to(dtype)
    fused = fuse_quietly(model)
    assert parts(fused) == ["shift+scale+conv+relu"]
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
        assert relative_error(fused(x).double(), exact) < 4 * torch.finfo(dtype).eps
    small = Model(lambda m, x: m.conv(x * 1e-5)).eval().half()
    assert parts(fuse_quietly(small)) == ["conv"]


def test_what_is_not_finite_is_left() -> None:
    for forward in (lambda m, x: m.conv(x / 0.0), lambda m, x: m.conv(x + float("inf"))):
        assert parts(fuse_quietly(Model(forward))) == ["conv"]


def test_a_norm_that_subtracts_much_more_than_it_keeps_stays() -> None:
    model = Model(CASES["a norm"][0])
    model.norm.running_mean[2], model.norm.running_var[2] = 100.0, 0.01
    assert parts(fuse_quietly(model)) == ["conv"]


def test_nothing_is_shifted_that_would_then_be_rounded() -> None:
    """To TF32: its ten bits are of x, which may be much larger than what a subtraction leaves. A factor is none."""
    forward = CASES["a norm"][0]
    assert parts(fuse_quietly(Model(forward), precision="fp32")) == ["bn+conv"]
    assert parts(fuse_quietly(Model(forward), precision="tf32")) == ["conv"]
    assert parts(fuse_quietly(Model(lambda m, x: m.conv(x * 0.5)), precision="tf32")) == ["scale+conv"]
    assert parts(fuse_quietly(Model(forward).half(), precision="tf32")) == ["bn+conv"]


def test_operations_in_place_and_hooks_stay() -> None:
    def written(m: Any, x: Tensor) -> Tensor:
        y = x.sin()
        y *= m.std
        return m.conv(y)

    def written_between(m: Any, x: Tensor) -> Tensor:
        z = x.sin()
        y = z * m.std
        z.add_(1)
        return m.conv(y) + z.mean()

    for forward in (written, written_between):
        assert parts(check_fused(Model(forward), torch.randn(1, 6, 7, 5)))[0] in ("conv", "conv+residual")
    model = Model(CASES["a factor"][0])
    hooked(model.pads)
    assert parts(check_fused(model, torch.randn(1, 6, 7, 5))) == ["conv"]
    model = Model(CASES["a norm"][0])
    hooked(model.norm)
    assert parts(check_fused(model, torch.randn(1, 6, 7, 5))) == ["conv"]


def test_an_input_that_is_written_later_is_not_kept_for_a_gradient() -> None:
    """The product is, in its place, which nobody writes over."""

    def forward(m: Any, x: Tensor) -> Tensor:
        v = x.sin()
        v += m.pads(v * 0.5)
        return v

    model, x = Model(forward), torch.randn(1, 6, 7, 5, requires_grad=True)
    model.pads = nn.Conv2d(6, 6, 3, padding=1)
    model.eval().requires_grad_(False)
    fused = check_fused(model, x.detach())
    found, wanted = (torch.autograd.grad(module(x).sum(), x)[0] for module in (fused, model))
    assert relative_error(found, wanted) < 1e-6


def test_state_copies_dtypes_and_compilation() -> None:
    model, x = Model(CASES["normalised"][0]).eval(), torch.randn(2, 6, 7, 5)
    fused = fastconv.fuse(model)
    assert list(fused.state_dict()) == ["conv.weight", "conv.bias"]
    with torch.no_grad():
        y = fused(x)
        for again in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
            assert torch.equal(again(x), y)
        function = torch.compile(fused, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(function(x), y)
        assert relative_error(copy.deepcopy(fused).double()(x.double()).float(), y) < 1e-5
        with torch.autocast("cpu", torch.bfloat16):
            assert fused(x).dtype == model(x).dtype
    leaf = x.clone().requires_grad_()
    wanted = x.double().requires_grad_()
    ours = torch.autograd.grad(fused(leaf).square().sum(), leaf)[0]
    exact = torch.autograd.grad(copy.deepcopy(model).double()(wanted).square().sum(), wanted)[0]
    assert relative_error(ours.double(), exact) < 1e-5


def test_strict_is_about_what_follows() -> None:
    model = fastconv.fuse(nn.Sequential(norm(6), nn.Conv2d(6, 8, 3, padding=1)).eval(), strict=True)
    assert parts(model) == ["conv"]


def test_one_factor_of_two_calls_is_one_layer() -> None:
    model = Model(lambda m, x: m.conv(x * m.std) + m.conv(x.sin() * m.std))
    fused = check_fused(model, torch.randn(2, 6, 7, 5))
    assert sorted(parts(fused)) == ["scale+conv", "scale+conv+residual"]


def test_weights_that_may_change_are_left_alone() -> None:
    assert check(Model(CASES["normalised"][0]), torch.randn(2, 6, 7, 5), OURS).parts == ["conv+relu"]


def test_gradients_are_those_of_the_parameters() -> None:
    model, x = Model(CASES["with a norm behind"][0]).eval(), torch.randn(2, 6, 7, 5)
    exact = copy.deepcopy(model).double()
    exact(x.double()).square().sum().backward()
    torch._dynamo.reset()
    backend = Rewriting(FROZEN)
    torch.compile(model, backend=backend)(x).square().sum().backward()
    assert not any("scale+conv" in part for part in backend.parts)
    for ours, wanted in zip(model.parameters(), exact.parameters(), strict=True):
        assert (ours.grad is None) == (wanted.grad is None)
        assert ours.grad is None or relative_error(ours.grad.double(), wanted.grad) < 1e-5


def test_export_and_inductor() -> None:
    from fastconv.compiler.ahead import rewritten

    model, x = Model(CASES["normalised"][0]).eval(), torch.randn(2, 6, 7, 5)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
        module, found = rewritten(model, (x,), FROZEN)
        assert ["+".join(taken.parts) for taken in found] == ["shift+scale+conv+relu"]
        assert relative_error(module(x).double(), exact) < 1e-5
        torch._dynamo.reset()
        function = fastconv.compile(model, "fp32", algorithm="implicit_gemm", frozen=True)
        with torch.compiler.config.patch(force_disable_caches=True):
            assert relative_error(function(x).double(), exact) < 1e-5
    assert [row.fused for row in function.report.rows] == ["shift+scale+conv+relu"]
