"""fuse: factors and summands of channels, written in every way; FrozenBatchNorm2d and SyncBatchNorm."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fusing import Function, check, codes, fuse_quietly, hooked, layers, norm, parts, sequence
from layers import relative_error
from torch import Tensor, nn

import fastconv
from fastconv import FusedConv2d

torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed: no FrozenBatchNorm2d")
FrozenBatchNorm2d = torchvision.ops.FrozenBatchNorm2d

pytestmark = pytest.mark.usefixtures("full_precision")


def scaled(call: Callable[[Any, Tensor], Any], **conv: Any) -> Function:
    """A model with a buffer and a parameter of a number for each channel."""
    model = Function(call, **conv)
    model.register_buffer("c", torch.rand(1, 6, 1, 1) + 0.5)
    model.p = nn.Parameter(torch.rand(6) + 0.5)
    return model.eval()


def frozen(model: nn.Module) -> nn.Module:
    """With frozen norms whose every number counts."""
    for module in model.modules():
        if isinstance(module, FrozenBatchNorm2d):
            for name, low in (("weight", 0.5), ("bias", -1.0), ("running_mean", -1.0), ("running_var", 0.5)):
                getattr(module, name).uniform_(low, 1.5)
    return model.eval()


def in_place(model: Any, x: Tensor) -> Tensor:
    y = model.conv(x)
    y *= model.c
    y /= 3
    y += model.p[:, None, None]
    y -= 1
    return y


SPELLED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "operators": (lambda m, x: (m.conv(x) * m.c / 3 + m.c - 1).relu(), "conv+scale+scale+shift+shift+relu"),
    "the other way": (lambda m, x: 0.5 + m.c * (2 * m.conv(x)), "conv+scale+scale+shift"),
    "in place": (in_place, "conv+scale+scale+shift+shift"),
    "methods": (lambda m, x: m.conv(x).mul(m.c).div_(2).sub(m.c).add_(3), "conv+scale+scale+shift+shift"),
    "functions": (
        lambda m, x: torch.sub(torch.true_divide(torch.multiply(m.conv(x), m.c), m.c), 1), "conv+scale+scale+shift"),
    "behind a norm": (lambda m, x: F.silu(m.norm(m.conv(x)) * m.c), "conv+bn+scale+silu"),
    "before a norm": (lambda m, x: m.norm(m.conv(x) * m.c), "conv+scale+bn"),
    "before a sum": (lambda m, x: F.relu(m.conv(x) * 0.1 + x), "conv+scale+residual+relu"),
    "a parameter": (
        lambda m, x: m.conv(x) * m.p.view(1, m.p.shape[0], 1, 1) + m.p.reshape(-1, 1, 1), "conv+scale+shift"),
    "computed": (lambda m, x: m.conv(x) * (m.p[None, :, None, None].exp() + 1).rsqrt(), "conv+scale"),
    "written on its way": (lambda m, x: m.conv(x) * (m.p * 2).view(6, 1, 1).add_(1), "conv"),
    "written under another name": (lambda m, x: (m.conv(x) * (c := m.p * 2).view(6, 1, 1), c.mul_(2))[0], "conv"),
    "one number": (lambda m, x: m.conv(x) * m.p[0] + m.c[:, :1], "conv+scale+shift"),
    "random": (lambda m, x: m.conv(x) * (1 + 0 * torch.rand_like(m.p))[:, None, None], "conv"),
    "alpha": (lambda m, x: torch.add(m.conv(x), m.c, alpha=2), "conv"),
    "rounded": (lambda m, x: torch.div(m.conv(x), 0.01, rounding_mode="floor") * 0, "conv"),
    "sizes": (lambda m, x: m.conv(x) * (x.shape[2] + 1) + x.shape[3] * 2, "conv"),
    "zero": (lambda m, x: m.conv(x) * 0 + x, "conv"),
    "a difference": (lambda m, x: m.c - m.conv(x), "conv+scale+shift"),
    "differences": (
        lambda m, x: (2 - torch.sub(m.p[:, None, None], m.norm(m.conv(x)))).relu(),
        "conv+bn+scale+shift+scale+shift+relu"),
    "a difference in columns": (lambda m, x: torch.ones(8) - m.conv(x), "conv"),
    "a difference in another dtype": (lambda m, x: m.c.double() - m.conv(x), "conv"),
    "columns": (lambda m, x: m.conv(x) * torch.ones(8), "conv"),
    "more dimensions": (lambda m, x: m.conv(x) * m.c[None], "conv"),
    "another dtype": (lambda m, x: m.conv(x) * m.c.double(), "conv"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLED)
def test_how_it_is_spelled(name: str) -> None:
    forward, wanted = SPELLED[name]
    fused = check(scaled(forward, padding_mode="reflect"), torch.randn(2, 6, 5, 8))
    assert parts(fused) == [wanted]
    assert codes(fused) == [""]
    if "scale" in wanted:
        assert list(fused.state_dict()) == ["conv.weight", "conv.bias"]


def test_what_somebody_else_reads_is_kept() -> None:
    fused = check(scaled(lambda m, x: (y := m.conv(x) * m.c) * y.mean() + m.c), torch.randn(2, 6, 5, 8))
    assert parts(fused) == ["conv+scale"]
    assert len(fused.state_dict()) == 3  # what is added at the end
    fused = check(scaled(lambda m, x: (y := m.conv(x)) * m.c + y.mean()), torch.randn(2, 6, 5, 8))
    assert (parts(fused), codes(fused)) == (["conv"], ["users"])
    with pytest.raises(fastconv.UnsupportedError, match="users"):
        fastconv.fuse(scaled(lambda m, x: (y := m.conv(x)) * m.c + y.mean()), strict=True)


def test_one_constant_of_two_calls_is_one_layer() -> None:
    fused = check(scaled(lambda m, x: m.conv(m.conv(x) * m.c) * m.c), torch.randn(2, 6, 5, 8))
    assert layers(fused) == 1


def test_branches_with_factors_are_one_convolution() -> None:
    model = scaled(lambda m, x: m.conv(x) * m.c + m.point(x) * 0.5)
    model.point = nn.Conv2d(6, 6, 1)
    assert parts(check(model.eval(), torch.randn(2, 6, 5, 8))) == ["conv+conv"]


HALVES: dict[str, tuple[Callable[[Any, Tensor], Tensor], str, str]] = {
    "a factor": (lambda m, x: m.conv(x) * m.c * 0.2, "conv+scale+scale", ""),
    "a small number": (lambda m, x: m.conv(x) * 1e-4, "conv", "norm_range"),
    "a small factor": (lambda m, x: F.relu(m.conv(x) * (m.c * 1e-4)), "conv", "norm_range"),
    "a large divisor": (lambda m, x: m.conv(x) / 1e5, "conv", "norm_range"),
}


@pytest.mark.parametrize("name", HALVES)
def test_float16_keeps_what_folding_would_round_away(name: str) -> None:
    forward, wanted, code = HALVES[name]
    model, x = scaled(forward).half(), torch.randn(2, 6, 5, 8).half()
    fused = fuse_quietly(model)
    assert (parts(fused), codes(fused)) == ([wanted], [code])
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
        assert relative_error(fused(x).double(), exact) <= 1.5 * relative_error(model(x).double(), exact)
    if code:
        with pytest.raises(fastconv.UnsupportedError, match=code):
            fastconv.fuse(model, strict=True)


def test_what_is_not_finite_is_left() -> None:
    for forward in (lambda m, x: m.conv(x) / torch.zeros(1), lambda m, x: m.conv(x) + float("inf")):
        model, x = scaled(forward), torch.randn(2, 6, 5, 8)
        fused = fuse_quietly(model)
        assert codes(fused) == ["norm_range"]
        with torch.no_grad():
            assert torch.equal(fused(x), model(x))


@pytest.mark.parametrize("lower", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["in place", "behind a norm", "before a sum", "a parameter", "one number"])
def test_autocast_promotes_as_pytorch_does(name: str, lower: torch.dtype) -> None:
    model = scaled(SPELLED[name][0])
    fused, x = fastconv.fuse(model), torch.randn(2, 6, 5, 8)
    with torch.no_grad(), torch.autocast("cpu", lower):
        for given in (x, x.to(lower)):
            y, expected = fused(given), model(given)
            assert y.dtype == expected.dtype
            assert relative_error(y.double(), expected.double()) < 4 * torch.finfo(lower).eps
    assert layers(fused) == 1


@pytest.mark.parametrize("name", ["operators", "behind a norm", "one number", "before a sum"])
def test_an_image_without_a_batch(name: str) -> None:
    """A factor of four dimensions gives it one."""
    model, x = scaled(SPELLED[name][0]), torch.randn(6, 5, 8)
    if name == "behind a norm":
        model.norm = nn.Identity()
    check(model, x)
    check(copy.deepcopy(model), x, algorithm="implicit_gemm", precision="fp32")


def test_gradients_and_compilation() -> None:
    model, x = scaled(SPELLED["operators"][0]), torch.randn(2, 6, 5, 8)
    fused, exact = fastconv.fuse(model), copy.deepcopy(model).double()
    leaves = x.clone().requires_grad_(), x.double().requires_grad_()
    values = fused(leaves[0]), exact(leaves[1])
    gradients = [torch.autograd.grad(y.square().sum(), leaf)[0] for y, leaf in zip(values, leaves, strict=True)]
    assert relative_error(gradients[0].double(), gradients[1]) < 1e-5
    with torch.no_grad():
        compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
        assert relative_error(compiled(x).double(), values[1]) < 1e-5


# ------------------------------------------------------------------------------------------------- frozen norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_frozen_norm(dtype: torch.dtype) -> None:
    model = frozen(sequence(nn.Conv2d(5, 7, 3, bias=False), FrozenBatchNorm2d(7), nn.ReLU())).to(dtype)
    x = torch.randn(2, 5, 9, 7).to(dtype)
    fused = check(model, x, 1e-5 if dtype == torch.float32 else 2e-2)
    assert parts(fused) == ["conv+scale+shift+relu"]
    assert "conv+scale+shift+relu" in str(fused.report)
    assert list(fused.state_dict()) == ["0.weight", "0.bias"]
    assert fused(x).dtype == dtype


def test_the_fold_of_a_frozen_norm_is_rounded_once() -> None:
    conv, bn = frozen(sequence(nn.Conv2d(5, 7, 3), FrozenBatchNorm2d(7)))
    (layer,) = fuse_quietly(sequence(conv, bn)).children()
    s = bn.weight * (bn.running_var + bn.eps).rsqrt()  # as the norm computes it
    shift = (bn.bias - bn.running_mean * s).double()
    weight, bias = conv.weight.double() * s.double()[:, None, None, None], conv.bias.double() * s.double() + shift
    assert (layer.weight.double() - weight).abs().max() <= 2.0**-24 * weight.abs().max()
    assert (layer.bias.double() - bias).abs().max() <= 2.0**-24 * bias.abs().max()


def test_a_frozen_norm_with_a_hook_stays() -> None:
    seen: list[int] = []
    model = frozen(sequence(nn.Conv2d(5, 7, 3), FrozenBatchNorm2d(7)))
    model[1].register_forward_hook(lambda *_: seen.append(1))
    fused = check(model, torch.randn(2, 5, 9, 7))
    assert parts(fused) == ["conv"]
    assert seen


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_network_of_frozen_norms(memory_format: torch.memory_format) -> None:
    model = torchvision.models.ResNet(
        torchvision.models.resnet.Bottleneck, [1, 2, 1, 1], num_classes=5, width_per_group=4,
        norm_layer=FrozenBatchNorm2d,
    )  # fmt: skip
    model, x = frozen(model), torch.randn(2, 3, 33, 40).to(memory_format=memory_format)
    for module in model.modules():
        if isinstance(module, FrozenBatchNorm2d):
            module.weight.mul_(0.5)  # the values of a deep network stay near one
    fused = check(model, x, strict=True)
    found = parts(fused)
    wanted = {"conv+scale+shift+relu": 11, "conv+scale+shift+residual+relu": 5, "conv+scale+shift": 4}
    assert {part: found.count(part) for part in found} == wanted
    assert list(fused.state_dict()) == [
        f"{name}.{kind}" for name, module in fused.named_modules() if isinstance(module, (FusedConv2d, nn.Linear))
        for kind in ("weight", "bias")
    ]  # fmt: skip


def test_the_backbone_of_a_detector() -> None:
    detection = torchvision.models.detection
    plain = frozen(detection.backbone_utils.resnet_fpn_backbone(
        backbone_name="resnet18", weights=None, norm_layer=FrozenBatchNorm2d
    ))  # fmt: skip
    fused, x = fastconv.fuse(plain), torch.randn(1, 3, 64, 64)
    assert parts(fused).count("conv+scale+shift+residual+relu") == 8
    with torch.no_grad():
        exact = copy.deepcopy(plain).double()(x.double())
        found, computed = fused(x), plain(x)
        for name, value in exact.items():
            error = relative_error(found[name].double(), value)
            assert error <= max(2 * relative_error(computed[name].double(), value), 1e-6)
        detector = detection.FasterRCNN(plain, 3, min_size=64, max_size=64, box_detections_per_img=2).eval()
        detector.backbone = fused
        assert len(detector([x[0]])[0]["boxes"]) <= 2


def test_state_copies_and_refresh() -> None:
    """What is loaded, and what is written by hand and refreshed, is the filters with the norm in them."""

    def model() -> nn.Module:
        return frozen(sequence(nn.Conv2d(5, 8, 3), FrozenBatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1)))

    first, second, x = fastconv.fuse(model()), fastconv.fuse(model()), torch.randn(2, 5, 9, 7)
    with torch.no_grad():
        y, other = first(x), second(x)
        for again in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
            assert torch.equal(again(x), y)
            assert parts(again) == ["conv+scale+shift+relu", "conv"]
            again.load_state_dict(second.state_dict())
            assert torch.equal(again(x), other)
        for ours, new in zip(first.parameters(), second.parameters(), strict=True):
            ours.copy_(new)
        fastconv.refresh(first)
        assert torch.equal(first(x), other)
        assert relative_error(first.double()(x.double()).float(), other) < 1e-5


def test_a_factor_that_no_convolution_takes_in_beside_a_concatenation() -> None:
    """In the code for known sizes, whose shapes it decides as PyTorch does."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = F.relu(m.conv(x) * m.c)
        gate = y.mean((2, 3), keepdim=True) * m.c / 2 - 1
        return m.last(torch.cat([y, x * m.c, gate * m.norm(x)], 1))

    model = scaled(forward)
    model.last = nn.Conv2d(18, 6, 1)
    fused = check(model, torch.randn(2, 6, 8, 8).to(memory_format=torch.channels_last))
    assert sorted(parts(fused)) == ["conv", "conv+scale+relu"]


# ------------------------------------------------------------------------------------------------- SyncBatchNorm


def synchronized(model: nn.Module) -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


@pytest.mark.parametrize("arguments", [{}, {"affine": False}, {"momentum": None}, {"eps": 0.1}], ids=str)
def test_a_synchronized_norm(arguments: dict[str, Any]) -> None:
    model = synchronized(sequence(nn.Conv2d(4, 6, 3), norm(6, **arguments), nn.ReLU()))
    assert type(model[1]) is nn.SyncBatchNorm
    fused = check(model, torch.randn(2, 4, 6, 5), strict=True)
    assert parts(fused) == ["conv+bn+relu"]
    assert list(fused.state_dict()) == ["0.weight", "0.bias"]


def test_synchronized_norms_in_branches_and_before_convolutions() -> None:
    block = Function(lambda m, x: F.relu(m.norm(m.conv(x)) + m.other(x)))
    block.other = norm(6)
    assert parts(check(synchronized(block), torch.randn(2, 6, 5, 8))) == ["conv+bn+identity+bn+relu"]
    model = synchronized(sequence(nn.Conv2d(4, 8, 1), nn.ReLU(), norm(8), nn.ReLU(), nn.Conv2d(8, 8, 3)))
    fused = check(model, torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last))
    assert type(fused.get_submodule("2")) is fastconv.norm.InputNorm
    x = torch.randn(2, 4, 8, 8)
    with torch.no_grad():
        assert torch.equal(pickle.loads(pickle.dumps(fused))(x), fused(x))


def test_synchronized_norms_that_stay_apart() -> None:
    model = synchronized(sequence(nn.Conv2d(4, 6, 3), norm(6))).eval()
    model[1].train()
    assert codes(fastconv.fuse(model)) == ["norm_training"]
    model = synchronized(sequence(nn.Conv2d(4, 6, 3), norm(6, track_running_stats=False)))
    assert codes(fuse_quietly(model)) == ["norm_statistics"]
    model = sequence(nn.Conv2d(4, 6, 3), hooked(synchronized(norm(6))))
    assert codes(fuse_quietly(model)) == ["hooks"]


# ------------------------------------------------------------------------------------------------- norms as functions


def functional(m: Any, x: Tensor, **arguments: Any) -> Tensor:
    """m.norm(m.conv(x)), by a function."""
    n = m.norm
    arguments = {"weight": n.weight, "bias": n.bias, "training": m.training, "eps": 0.1} | arguments
    return F.batch_norm(m.conv(x), n.running_mean, n.running_var, **arguments)


FUNCTIONS: dict[str, tuple[Callable[[Any, Tensor], Tensor], str, str]] = {
    "keywords": (lambda m, x: functional(m, x).relu(), "conv+bn+relu", ""),
    "by position": (
        lambda m, x: F.batch_norm(
            m.conv(x), m.norm.running_mean, m.norm.running_var, m.norm.weight, None, False, 0.1, 0.2
        ), "conv+bn", ""),
    "without factors": (lambda m, x: functional(m, x, weight=None, bias=None) + x, "conv+bn+residual", ""),
    "computed": (lambda m, x: functional(m, x, weight=m.p.exp() * 0.5), "conv+bn", ""),
    "with a factor behind": (lambda m, x: functional(m, x) * m.c, "conv+bn+scale", ""),
    "in a branch": (lambda m, x: functional(m, x) + m.norm(x), "conv+bn+identity+bn", ""),
    # Left apart:
    "training": (lambda m, x: functional(m, x, training=True), "conv", "norm_training"),
    "of the batch": (
        lambda m, x: F.batch_norm(m.conv(x), None, None, training=True), "conv", "norm_training"),
    "of an input": (lambda m, x: functional(m, x, weight=x.mean((0, 2, 3))), "conv", "norm_parameters"),
    "before an activation and a convolution": (
        lambda m, x: m.conv(F.relu(F.batch_norm(x, m.norm.running_mean, m.norm.running_var))), "conv", ""),
    "read twice": (lambda m, x: (y := functional(m, x)) + m.norm(y), "conv+bn", "users"),
    "of what is read twice": (
        lambda m, x: F.batch_norm(y := m.conv(x), m.norm.running_mean, m.norm.running_var) + y.exp(), "conv", "users"),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_norm_that_is_a_function(name: str) -> None:
    forward, *wanted = FUNCTIONS[name]
    x = torch.randn(2, 6, 5, 8)
    model = scaled(forward)
    fused = fuse_quietly(model) if name == "training" else check(model, x)
    assert [*parts(fused), *codes(fused)] == wanted
    if "bn" in wanted[0] and name != "read twice":
        assert list(fused.state_dict()) == ["conv.weight", "conv.bias"]


def test_a_norm_that_is_a_function_keeps_dtypes_as_a_module_does() -> None:
    model, x = scaled(FUNCTIONS["keywords"][0]), torch.randn(2, 6, 5, 8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert fastconv.fuse(model)(x).dtype == model(x).dtype
    mixed = scaled(FUNCTIONS["keywords"][0])
    mixed.conv.bfloat16()
    check(mixed, x.bfloat16(), 2e-2)


NORMS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "behind": functional,
    "behind, with a factor": lambda m, x: functional(m, x) * m.c,
    "before": lambda m, x: m.conv(F.batch_norm(x, m.norm.running_mean, m.norm.running_var)),
    "beside": lambda m, x: m.conv(x) + F.batch_norm(x, m.norm.running_mean, m.norm.running_var),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_that_is_a_function_takes_the_rows_of_an_unbatched_image_for_channels(name: str) -> None:
    """PyTorch's does: what was folded as filters' factors is something else."""
    model = scaled(NORMS[name])
    model.conv = nn.Conv2d(6, 6, 1)
    fused = check(model, torch.randn(1, 6, 6, 6))
    assert "bn" in parts(fused)[0]
    with pytest.raises(ValueError, match=r"input is \[6, 6, 6\]; expected \[N, C, H, W\]"):
        fused(torch.randn(6, 6, 6))
    assert fuse_quietly(scaled(lambda m, x: m.conv(x).relu()))(torch.randn(6, 6, 6)).dim() == 3
