"""Parallel branches of one input: when a sum of convolutions is one convolution, and what keeps it from
that. Both front ends, against the model in float64."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fusing import check as check_fused
from fusing import fuse_quietly, hooked, norm, parts, sequence
from layers import relative_error
from rewriting import OURS, check
from torch import Tensor, nn

import fastconv
from fastconv import ops
from fastconv.rewrites import Asked

pytestmark = pytest.mark.usefixtures("full_precision")
FROZEN = Asked(algorithm="implicit_gemm", packed=True)


class Branches(nn.Module):
    """The sum of some modules' values, and what comes behind it."""

    def __init__(self, *branches: nn.Module, behind: Any = F.relu, in_place: bool = False) -> None:
        super().__init__()
        self.branches, self.behind, self.in_place = nn.ModuleList(branches), behind, in_place

    def forward(self, x: Tensor) -> Tensor:
        y = self.branches[0](x)
        for branch in list(self.branches)[1:]:
            if self.in_place:
                y += branch(x)
            else:
                y = branch(x) + y
        return self.behind(y)


def conv(c: int, k: int, size: Any, **arguments: Any) -> nn.Conv2d:
    padding = arguments.pop("padding", [(s - 1) // 2 for s in (size if isinstance(size, tuple) else (size, size))])
    return nn.Conv2d(c, k, size, padding=padding, **arguments)


def normed(c: int, k: int, size: Any, **arguments: Any) -> nn.Module:
    return sequence(conv(c, k, size, bias=False, **arguments), norm(k))


REPVGG = "conv+bn+conv+bn+identity+bn+relu"
# Six channels in. The branches, and what the convolution is that they become.
MERGED = {
    "RepVGG": (lambda: Branches(normed(6, 6, 3), normed(6, 6, 1), norm(6)), REPVGG),
    "RepVGG in timm's order": (lambda: Branches(normed(6, 6, 1), normed(6, 6, 3), norm(6), in_place=True), REPVGG),
    "identity first": (lambda: Branches(norm(6), normed(6, 6, 1), normed(6, 6, 3)), "conv+bn+conv+bn+identity+bn+relu"),
    "stride 2": (lambda: Branches(normed(6, 9, 3, stride=2), normed(6, 9, 1, stride=2)), "conv+bn+conv+bn+relu"),
    "MobileOne": (
        lambda: Branches(*(normed(6, 6, 3) for _ in range(3)), normed(6, 6, 1), norm(6)),
        "conv+bn+conv+bn+conv+bn+conv+bn+identity+bn+relu",
    ),
    "MobileOne depthwise": (
        lambda: Branches(*(normed(6, 6, 3, groups=6) for _ in range(2)), normed(6, 6, 1, groups=6), norm(6)),
        "conv+bn+conv+bn+conv+bn+identity+bn+relu",
    ),
    "grouped identity": (lambda: Branches(conv(6, 6, 3, groups=2), norm(6)), "conv+identity+bn+relu"),
    "5x5 and 3x3": (lambda: Branches(conv(6, 8, 3), conv(6, 8, 5)), "conv+conv+relu"),
    "ACNet": (lambda: Branches(conv(6, 8, (1, 3)), conv(6, 8, 3), conv(6, 8, (3, 1))), "conv+conv+conv+relu"),
    "dilation": (lambda: Branches(conv(6, 8, 3, dilation=2, padding=2), conv(6, 8, 1)), "conv+conv+relu"),
    "even kernels": (lambda: Branches(conv(6, 8, 4, padding=2), conv(6, 8, 2, padding=1)), "conv+conv+relu"),
    "one bias": (lambda: Branches(conv(6, 8, 3), conv(6, 8, 1, bias=False)), "conv+conv+relu"),
    "no bias": (lambda: Branches(conv(6, 8, 3, bias=False), conv(6, 8, 1, bias=False)), "conv+conv+relu"),
    "norm without affine": (lambda: Branches(conv(6, 6, 3), norm(6, affine=False)), "conv+identity+bn+relu"),
    "plain input last": (lambda: Branches(conv(6, 6, 3), conv(6, 6, 1), nn.Identity()), "conv+conv+identity+relu"),
    "plain input first": (lambda: Branches(nn.Identity(), conv(6, 6, 1), conv(6, 6, 3)), "conv+conv+identity+relu"),
    "plain input between": (lambda: Branches(conv(6, 6, 1), nn.Identity(), conv(6, 6, 3)), "conv+conv+identity+relu"),
}  # fmt: skip


# The first ones in both formats, the others in turns: what is merged are filters, whichever way they lie.
@pytest.mark.parametrize(
    ("name", "channels_last"),
    [(name, last) for i, name in enumerate(MERGED) for last in (False, True) if i < 3 or i % 2 == last],
)
def test_one_convolution(name: str, channels_last: bool) -> None:
    make, fused = MERGED[name]
    format = torch.channels_last if channels_last else torch.contiguous_format
    model, x = make().to(memory_format=format), torch.randn(2, 6, 9, 8).contiguous(memory_format=format)
    backend = check(model, x, FROZEN)
    assert (backend.parts, backend.codes, backend.left) == ([fused], [""], [])
    assert backend.count(ops.conv2d_packed_op) + backend.count(ops.conv2d_packed_scatter_op) == 1
    result = check_fused(model, x, algorithm="implicit_gemm")
    assert parts(result) == [fused]
    assert (result.report.total, result.report.left) == (1, {})
    assert [type(module) for module in result.modules()].count(fastconv.FusedConv2d) == 1
    assert not any(type(module) in (nn.BatchNorm2d, nn.Conv2d, fastconv.Conv2d) for module in result.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_sum_is_rounded_once(dtype: torch.dtype) -> None:
    """However many branches: in the order of the sum, norms folded, the identity at the centre of its own channel."""
    model = Branches(normed(6, 6, 1, groups=2), normed(6, 6, 3, groups=2), norm(6)).to(dtype)
    layer = next(m for m in fuse_quietly(model).modules() if isinstance(m, fastconv.FusedConv2d))
    weight, bias = torch.zeros(6, 3, 3, 3, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
    unit = torch.eye(3, dtype=torch.float64).repeat(2, 1)[:, :, None, None]
    small, large, identity = model.branches
    for filters, bn in ((small[0].weight, small[1]), (large[0].weight, large[1]), (unit, identity)):
        s = bn.weight.double() / (bn.running_var.double() + bn.eps).sqrt()
        margin = 1 - filters.shape[-1] // 2
        weight += F.pad(filters.double() * s[:, None, None, None], [margin] * 4)
        bias += bn.bias.double() - bn.running_mean.double() * s
    # One rounding, and what float64 leaves open between sums in another order.
    for rounded, exact in ((layer.weight.double(), weight), (layer.bias.double(), bias)):
        assert bool(((rounded - exact).abs() <= torch.finfo(dtype).eps / 2 * exact.abs() + 1e-12).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_lose_no_more_than_apart(dtype: torch.dtype) -> None:
    """Filters are rounded once (u / sqrt(3) of the sum's terms), the output once; apart, every branch rounds its
    filters or its values, and every sum."""
    model = Branches(normed(32, 32, 3), normed(32, 32, 1), norm(32), behind=lambda y: y).eval().to(dtype)
    x = torch.randn(2, 32, 12, 12).to(dtype)
    fused = fuse_quietly(model)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
        terms = sum(branch(x.double()).square().mean() for branch in copy.deepcopy(model).double().branches).sqrt()
        y = fused(x).double()
    u = torch.finfo(dtype).eps / 2
    scale = float(terms / exact.square().mean().sqrt())  # more than 1 where branches cancel
    assert relative_error(y, exact) <= u / 3**0.5 * (1 + scale) * 1.5


class Used(nn.Module):
    """The value of one of two branches is read again."""

    def __init__(self, branch: nn.Module, again: int) -> None:
        super().__init__()
        self.branches, self.again = nn.ModuleList([conv(6, 6, 3), branch]), again

    def forward(self, x: Tensor) -> Tensor:
        values = [branch(x) for branch in self.branches]
        return (values[0] + values[1]) * values[self.again].sigmoid()


class Written(nn.Module):
    """The input is written over between the branches."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = conv(6, 6, 3), conv(6, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.sigmoid()
        y = self.a(x)
        x.mul_(2)
        return y + self.b(x)


class Scaled(Written):
    def forward(self, x: Tensor) -> Tensor:
        return torch.add(self.a(x), self.b(x), alpha=2)


APART = {
    "a convolution that is used elsewhere": lambda: Used(conv(6, 6, 1), 0),
    "another one": lambda: Used(conv(6, 6, 1), 1),
    "a norm that is used elsewhere": lambda: Used(norm(6), 1),
    "written over": Written,
    "another centre": lambda: Branches(conv(6, 6, 3, padding=0, stride=3), conv(6, 6, 1, padding=0, stride=3)),
    "another dilation": lambda: Branches(conv(6, 6, 3), conv(6, 6, 3, padding=2, dilation=2)),
    "another stride": lambda: Branches(conv(6, 6, 1, stride=5), conv(6, 6, 1, stride=6)),
    "other groups": lambda: Branches(conv(6, 6, 3), conv(6, 6, 1, groups=6)),
    "neither inside the other": lambda: Branches(conv(6, 6, (1, 3)), conv(6, 6, (3, 1))),
    "an activation between": lambda: Branches(conv(6, 6, 3), sequence(conv(6, 6, 1), nn.ReLU())),
    "another input": lambda: Branches(conv(6, 6, 3), sequence(nn.Sigmoid(), conv(6, 6, 1))),
    "a norm of another input": lambda: Branches(conv(6, 6, 3), sequence(nn.Sigmoid(), norm(6))),
    "the input alone": lambda: Branches(conv(6, 6, 3), nn.Identity()),
    "one filter for all channels": lambda: Branches(conv(6, 6, 3), conv(6, 1, 1)),
    "scaled": Scaled,
}


def is_merged(fused: str) -> bool:
    return fused.count("conv") > 1 or "identity" in fused


@pytest.mark.parametrize("name", APART)
def test_what_stays_apart(name: str) -> None:
    model, x = APART[name](), torch.randn(2, 6, 9, 9)
    count = sum(isinstance(module, nn.Conv2d) for module in model.modules())
    for found in (check(model, x, FROZEN).parts, parts(check_fused(model, x))):
        assert (len(found), any(map(is_merged, found))) == (count, False), found


def reflecting() -> nn.Module:
    return Branches(conv(6, 6, 3, padding_mode="reflect"), conv(6, 6, 3))


def with_hooks() -> nn.Module:
    return Branches(conv(6, 6, 3), hooked(conv(6, 6, 1)), hooked(norm(6)))


def out_of_range() -> nn.Module:
    model = Branches(conv(6, 6, 3), conv(6, 6, 1)).half()
    for branch in model.branches:
        nn.init.constant_(branch.weight, 4e4)  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize("make", [reflecting, with_hooks, out_of_range])
def test_what_fuse_leaves_apart(make: Any) -> None:
    """Of what it sees and an ATen graph does not have."""
    model = make().eval()
    fused, x = fuse_quietly(model), torch.randn(2, 6, 9, 9, dtype=model.branches[0].weight.dtype) / 1024
    assert (len(parts(fused)), any(map(is_merged, parts(fused)))) == (2, False)
    with torch.no_grad():
        assert relative_error(fused(x).double(), model(x).double()) < 4 * torch.finfo(x.dtype).eps


def test_a_norm_in_training_mode_stays() -> None:
    model = Branches(conv(6, 6, 3), conv(6, 6, 1), norm(6)).eval()
    model.branches[2].train()
    assert parts(fastconv.fuse(model)) == ["conv+conv+residual+relu"]


def test_weights_that_may_change_are_not_summed_in_every_call() -> None:
    model, x = MERGED["RepVGG"][0](), torch.randn(2, 6, 9, 8)
    assert sorted(check(model, x, OURS).parts) == ["conv+bn", "conv+bn+residual"]


def test_training() -> None:
    model, x = MERGED["5x5 and 3x3"][0](), torch.randn(2, 6, 9, 8)
    torch._dynamo.reset()
    compiled = fastconv.compile(model, algorithm="implicit_gemm", frozen=True)
    compiled(x).sum().backward()
    assert not any(is_merged(row.fused) for row in compiled.report.rows)
    wanted = copy.deepcopy(model).double()
    wanted.zero_grad()
    wanted(x.double()).sum().backward()
    for a, b in zip(model.parameters(), wanted.parameters(), strict=True):
        assert relative_error(a.grad.double(), b.grad) < 1e-5


def test_shared_layers() -> None:
    """One block twice is one layer; two blocks that share a convolution are two."""
    shared, x = conv(6, 6, 3), torch.randn(2, 6, 9, 8)
    a, b = Branches(shared, normed(6, 6, 1)), Branches(shared, conv(6, 6, 1), norm(6))
    before = shared.weight.clone()
    model = sequence(a, b, a)
    fused = check_fused(model, x)
    assert sorted(parts(fused)) == ["conv+conv+bn+relu", "conv+conv+identity+bn+relu"]
    assert sorted(check(model, x, FROZEN).parts) == ["conv+conv+bn+relu"] * 2 + ["conv+conv+identity+bn+relu"]
    assert torch.equal(shared.weight, before)


def test_sums_that_begin_or_end_with_zero() -> None:
    """As in MobileOne, where a branch is missing."""

    def behind(y: Tensor) -> Tensor:
        y += 0
        return F.relu(y)

    class Zero(nn.Module):
        def forward(self, x: Tensor) -> int:
            return 0

    model = Branches(Zero(), conv(6, 8, 1), conv(6, 8, 1), behind=behind, in_place=True)
    x = torch.randn(2, 6, 9, 8)
    assert parts(check_fused(model, x)) == check(model, x, FROZEN).parts == ["conv+conv+relu"]


@pytest.mark.parametrize("name", ["RepVGG", "identity"])
def test_under_autocast_the_input_decides_the_type(name: str) -> None:
    class Identity(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = conv(8, 8, 3, padding=1), conv(8, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.a(x) + self.b(x) + x)

    model = Identity().eval() if name == "identity" else MERGED[name][0]().eval()
    fused = fastconv.fuse(model, algorithm="implicit_gemm")
    x = torch.randn(2, 8 if name == "identity" else 6, 9, 8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for given in (x, x.bfloat16()):
            y, expected = fused(given), model(given)
            assert y.dtype == expected.dtype
            assert relative_error(y.double(), expected.double()) < 0.02


def test_compiled_and_exported(tmp_path: Any) -> None:
    """What branches are made of is computed before the first call."""
    from fastconv.compiler.ahead import rewritten

    model, x = MERGED["RepVGG"][0]().eval(), torch.randn(2, 6, 9, 8)
    with torch.no_grad():
        module, _ = rewritten(model, (x,), FROZEN)
        exact = copy.deepcopy(model).double()(x.double())
        assert relative_error(module(x).double(), exact) < 1e-5
        for target in (torch.ops.aten.add.Tensor, torch.ops.aten.diag_embed.default):
            assert not module.graph.find_nodes(op="call_function", target=target)
        torch._dynamo.reset()
        compiled = fastconv.compile(model, algorithm="implicit_gemm", frozen=True)
        assert relative_error(compiled(x).double(), exact) < 1e-5
    assert [row.fused for row in compiled.report.rows] == [REPVGG]
    assert f" {REPVGG} " in str(compiled.report)
