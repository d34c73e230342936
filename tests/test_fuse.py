"""fuse: what is computed inside a convolution, what stays apart, and why."""

import copy
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fusing import Function, check, codes, fuse_quietly, hooked, layers, norm, parts, sequence
from layers import DEVICES, relative_error
from torch import Tensor, nn

import fastconv
from fastconv import FusedConv2d

pytestmark = pytest.mark.usefixtures("full_precision")


# ------------------------------------------------------------------------------------------------- what is fused

ACTIVATIONS = {
    "relu": [nn.ReLU(), nn.ReLU(inplace=True)],
    "relu6": [nn.ReLU6(), nn.ReLU6(inplace=True)],
    "silu": [nn.SiLU(), nn.SiLU(inplace=True)],
    "leaky_relu": [nn.LeakyReLU(0.2), nn.LeakyReLU(inplace=True), nn.LeakyReLU(-0.3)],
    "gelu": [nn.GELU()],
    "gelu_tanh": [nn.GELU("tanh")],
    "hardswish": [nn.Hardswish(), nn.Hardswish(inplace=True)],
    "sigmoid": [nn.Sigmoid()],
}
FUNCTIONS = {
    "relu": [
        F.relu, torch.relu, torch.relu_, lambda y: F.relu(y, inplace=True), lambda y: y.relu(), lambda y: y.relu_(),
    ],
    "relu6": [F.relu6, lambda y: F.relu6(y, True)],
    "silu": [F.silu, lambda y: F.silu(y, inplace=True)],
    "leaky_relu": [F.leaky_relu, lambda y: F.leaky_relu(y, 0.3), lambda y: F.leaky_relu(y, negative_slope=0.2)],
    "gelu": [F.gelu, lambda y: F.gelu(y, approximate="none")],
    "gelu_tanh": [lambda y: F.gelu(y, approximate="tanh")],
    "hardswish": [F.hardswish, lambda y: F.hardswish(y, inplace=True)],
    "sigmoid": [F.sigmoid, torch.sigmoid, torch.sigmoid_, lambda y: y.sigmoid()],
}  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_modules(activation: str, device: str) -> None:
    for module in ACTIVATIONS[activation]:
        model = sequence(nn.Conv2d(5, 7, 3, bias=False), norm(7), module, nn.Conv2d(7, 3, 1), module).to(device)
        fused = check(model, torch.randn(2, 5, 9, 7, device=device))
        assert parts(fused) == [f"conv+bn+{activation}", f"conv+{activation}"]
        assert layers(fused) == len(list(fused.children())) == 2


@pytest.mark.parametrize("activation", FUNCTIONS)
def test_activation_functions(activation: str) -> None:
    for function in FUNCTIONS[activation]:
        fused = check(Function(lambda self, x, f=function: f(self.norm(self.conv(x)))), torch.randn(2, 6, 5, 8))
        assert parts(fused) == [f"conv+bn+{activation}"]


SUMS = {
    "plus": lambda a, b: a + b,
    "other_way": lambda a, b: b + a,
    "method": lambda a, b: a.add(b),
    "method_in_place": lambda a, b: a.add_(b),
    "function": torch.add,
    "alpha": lambda a, b: torch.add(a, b, alpha=1),
}


def in_place(a: Tensor, b: Tensor) -> Tensor:
    a += b
    return a


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [*SUMS, "in_place"])
@pytest.mark.parametrize("activated", [True, False])
def test_sums(name: str, activated: bool, device: str) -> None:
    add = SUMS.get(name, in_place)

    def forward(self: Any, x: Tensor) -> Tensor:
        y = add(self.norm(self.conv(x)), x)
        return F.relu(y) if activated else y

    fused = check(Function(forward).to(device), torch.randn(3, 6, 7, 13, device=device))
    assert parts(fused) == ["conv+bn+residual" + "+relu" * activated]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("algorithm", [row.name for row in fastconv.algorithms()])
def test_every_algorithm_has_the_epilogue(algorithm: str, device: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.activation(self.norm(self.conv(x)) + x)

    for name, modules in ACTIVATIONS.items():
        model = Function(forward, modules[0]).to(device, memory_format=torch.channels_last)
        for n in (1, 3):
            x = torch.randn(n, 6, 9, 11, device=device).to(memory_format=torch.channels_last)
            try:
                fused = check(model, x, algorithm=algorithm, precision="fp32")
            except fastconv.UnsupportedError:
                continue
            assert parts(fused) in ([f"conv+bn+residual+{name}"], [""])
            if parts(fused) != [""]:
                assert fused.report.rows[0].algorithm == algorithm
                with torch.no_grad():
                    assert fused(x).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "conv",
    [
        {"bias": False},
        {"groups": 3},
        {"stride": 2},
        {"dilation": 2},
        {"padding_mode": "reflect"},
        {"padding_mode": "circular"},
        {"kernel_size": 4, "padding": "same"},
        {"kernel_size": (3, 2), "padding": "valid"},
        {"kernel_size": 1, "padding": (2, 1)},
    ],
    ids=str,
)
def test_geometry(conv: dict[str, Any]) -> None:
    arguments = {"kernel_size": 3, "padding": 1} | conv
    model = sequence(nn.Conv2d(6, 9, **arguments), norm(9), nn.ReLU())
    for x in (torch.randn(2, 6, 11, 13), torch.randn(2, 6, 8, 7).to(memory_format=torch.channels_last)):
        assert parts(check(model, x)) == ["conv+bn+relu"]


@pytest.mark.parametrize("arguments", [{"affine": False}, {"momentum": None}, {"eps": 0.1}], ids=str)
def test_norms(arguments: dict[str, Any]) -> None:
    assert parts(check(sequence(nn.Conv2d(4, 6, 3), norm(6, **arguments)), torch.randn(1, 4, 6, 5))) == ["conv+bn"]


def test_dropouts_and_identities_do_not_stand_in_the_way() -> None:
    model = sequence(nn.Conv2d(4, 6, 3), nn.Identity(), norm(6), nn.Dropout2d(), nn.ReLU(), nn.Dropout())
    assert parts(check(model, torch.randn(1, 4, 6, 5))) == ["conv+bn+relu"]


def test_of_two_convolutions_that_are_added_one_takes_the_sum() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm1 = nn.Conv2d(4, 6, 3, padding=1), norm(6)
            self.second, self.norm2 = nn.Conv2d(4, 6, 1), norm(6)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm1(self.first(x))
            y += self.norm2(self.second(x.sin()))  # another input: no branches of one
            return F.relu_(y)

    fused = check(Block(), torch.randn(2, 4, 7, 5))
    assert parts(fused) == ["conv+bn+residual+relu", "conv+bn"]  # the one whose output the sum is written over
    assert codes(fused) == ["", ""]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half(dtype: torch.dtype) -> None:
    model = sequence(nn.Conv2d(8, 8, 3, padding=1), norm(8), nn.ReLU()).to(dtype)
    x = torch.randn(2, 8, 9, 9).to(dtype)
    fused = check(model, x, 2e-2)
    assert fused(x).dtype == dtype
    assert parts(fused) == ["conv+bn+relu"]


def test_norm_in_float32_behind_a_half_convolution() -> None:
    model = sequence(nn.Conv2d(8, 8, 3, padding=1), norm(8), nn.ReLU())
    model[0].to(torch.bfloat16)
    fused = fuse_quietly(model)
    x = torch.randn(2, 8, 9, 9).to(torch.bfloat16)
    with torch.no_grad():
        assert parts(fused) == ["conv+bn+relu"]
        assert fused(x).dtype == model(x).dtype == torch.bfloat16
        assert relative_error(fused(x), model(x)) < 2e-2


def test_the_fold_is_rounded_once() -> None:
    conv, bn = nn.Conv2d(5, 7, 3), norm(7)
    (layer,) = fuse_quietly(sequence(conv, bn)).children()
    s = bn.weight.double() / (bn.running_var.double() + bn.eps).sqrt()
    weight = conv.weight.double() * s[:, None, None, None]
    bias = (conv.bias.double() - bn.running_mean.double()) * s + bn.bias.double()
    assert (layer.weight.double() - weight).abs().max() <= 2.0**-24 * weight.abs().max()
    assert (layer.bias.double() - bias).abs().max() <= 2.0**-24 * bias.abs().max()


# ------------------------------------------------------------------------------------- residuals of other kinds


@pytest.mark.parametrize("shape", [(1, 6, 1, 8), (2, 6, 5, 8), (2, 2, 6, 5, 8)], ids=str)
def test_a_residual_that_must_be_broadcast(shape: tuple[int, ...]) -> None:
    model = Function(lambda self, x: F.relu(self.conv(x) + self.other))
    model.register_buffer("other", torch.randn(shape))
    assert parts(check(model, torch.randn(2, 6, 5, 8))) == ["conv+residual+relu"]


def test_residuals_promote_as_sums_do() -> None:
    x, wide = torch.randn(2, 6, 5, 8).bfloat16(), torch.randn(2, 6, 5, 8)
    for add in (SUMS["plus"], in_place):
        model = Function(lambda self, x, add=add: add(self.conv(x), self.other)).bfloat16()
        model.register_buffer("other", wide)
        fused = fuse_quietly(model)
        assert parts(fused) == ["conv+residual"]
        with torch.no_grad():
            assert fused(x).dtype == model(x).dtype
            assert relative_error(fused(x), model(x)) < 1e-2


def test_a_number_of_the_graph_as_residual() -> None:
    assert parts(check(Function(lambda self, x: self.conv(x) + x.shape[2]), torch.randn(2, 6, 5, 8))) == [
        "conv+residual"
    ]


def test_unbatched() -> None:
    model = Function(lambda self, x: F.relu(self.conv(x) + x))
    assert parts(check(model, torch.randn(6, 5, 8))) == ["conv+residual+relu"]


# ---------------------------------------------------------------------------------------------- what stays apart


class OtherNorm(nn.BatchNorm2d):
    pass


def far_norm() -> nn.BatchNorm2d:
    layer = norm(6)
    layer.running_var.fill_(6e4)
    nn.init.constant_(layer.weight, 1e-4)
    return layer


def overflowing_norm() -> nn.BatchNorm2d:
    layer = norm(6)
    nn.init.constant_(layer.bias, 1e6)
    return layer


def with_own_forward(module: nn.Module) -> nn.Module:
    module.forward = lambda x: x + 1  # type: ignore[method-assign]
    return module


def half_conv(*behind: nn.Module) -> nn.Module:
    return sequence(nn.Conv2d(4, 6, 3).half(), *behind)


REFUSED = {
    "norm_class": lambda: sequence(nn.Conv2d(4, 6, 3), OtherNorm(6)),
    "norm_training": lambda: sequence(nn.Conv2d(4, 6, 3), norm(6)),
    "norm_statistics": lambda: sequence(nn.Conv2d(4, 6, 3), norm(6, track_running_stats=False)),
    "norm_dtype": lambda: sequence(nn.Conv2d(4, 6, 3), norm(6).double()),
    "norm_range": lambda: sequence(nn.Conv2d(4, 6, 3), far_norm()).half(),
    "norm_range of the bias": lambda: half_conv(overflowing_norm()),
    "hooks": lambda: sequence(nn.Conv2d(4, 6, 3), hooked(norm(6))),
    "hooks instead of a forward": lambda: sequence(nn.Conv2d(4, 6, 3), with_own_forward(norm(6))),
    "users": lambda: Function(lambda self, x: self.norm(y := self.conv(x)) + y.mean()),
    "in_place": lambda: Function(lambda self, x: (self.norm(self.conv(x)), x.mul_(2))[0]),
}


@pytest.mark.parametrize("code", REFUSED)
def test_norms_that_stay_apart(code: str) -> None:
    model = REFUSED[code]().eval()
    if code == "norm_training":
        model[1].train()
    fused = fuse_quietly(model) if code != "norm_training" else fastconv.fuse(model)
    if code == "in_place":  # behind everything: no harm done
        assert codes(fused) == [""]
        return
    assert codes(fused) == [code.split()[0]]
    assert parts(fused) == ["conv"]
    assert layers(fused) == 0
    with pytest.raises(fastconv.UnsupportedError, match=code.split()[0]):
        fastconv.fuse(model, strict=True)


def test_values_with_other_readers_are_kept() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        return F.relu(y) + y

    fused = check(Function(forward), torch.randn(2, 6, 5, 8))
    assert parts(fused) == ["conv+bn"]
    assert codes(fused) == ["users"]


OTHER_SUMS = {
    "itself": lambda self, x: (y := self.conv(x)) + y,
    "alpha": lambda self, x: torch.add(self.conv(x), x, alpha=2),
    "difference": lambda self, x: self.conv(x) - x,
    "slope_of_the_graph": lambda self, x: F.leaky_relu(self.conv(x), x.shape[0] / 8),
    "hardtanh": lambda self, x: F.hardtanh(self.conv(x)),
    "norm_twice": lambda self, x: self.norm(torch.tanh(self.conv(x))),
}


@pytest.mark.parametrize("name", OTHER_SUMS)
def test_what_only_looks_like_it(name: str) -> None:
    fused = check(Function(OTHER_SUMS[name]), torch.randn(2, 6, 5, 8))
    assert parts(fused) == ["conv"]
    assert codes(fused) == [""]


def written_before_the_sum(self: Any, x: Tensor) -> Tensor:
    x = x * 1
    y = self.norm(self.conv(x))
    x.mul_(3)
    return y + x


def written_by_the_sum(self: Any, x: Tensor) -> Tensor:
    x = x * 1
    z = x.sin()
    x += self.conv(z)
    return x * z


def written_by_an_activation(self: Any, x: Tensor) -> Tensor:
    x = x * 1
    y = self.conv(x)
    x = F.relu(x, True)
    return F.relu(y + x)


def written_as_out(self: Any, x: Tensor) -> Tensor:
    x = x * 1
    y = self.conv(x)
    torch.sin(x, out=x)
    return F.relu(y + x)


def written_under_another_name(self: Any, x: Tensor) -> Tensor:
    y = z = self.conv(x)
    y += x
    return y * z


@pytest.mark.parametrize(
    "forward", [written_before_the_sum, written_by_the_sum, written_by_an_activation, written_as_out]
)
def test_operations_in_place_keep_their_order(forward: Any) -> None:
    fused = check(Function(forward), torch.randn(2, 6, 5, 8))
    assert codes(fused) == ["in_place"]
    assert layers(fused) <= 1


def test_an_operation_in_place_that_went_into_a_convolution_writes_nothing() -> None:
    """Two branches side by side: the first one's ReLU does not stand in the way of the second's."""

    def forward(self: Any, x: Tensor) -> Tensor:
        a, b = self.conv(x), self.norm(self.conv(x * 2))
        a, b = F.relu_(a), F.silu(b, inplace=True)
        return a * b

    fused = check(Function(forward), torch.randn(2, 6, 5, 8))
    assert sorted(parts(fused)) == ["conv+bn+silu", "conv+relu"]
    assert codes(fused) == ["", ""]


def test_a_sum_in_place_with_another_name() -> None:
    fused = check(Function(written_under_another_name), torch.randn(2, 6, 5, 8))
    assert codes(fused) == ["users"]


def test_hooks() -> None:
    seen: list[str] = []

    def note(name: str) -> Any:
        return lambda module, inputs, output: seen.append(name)

    model = nn.Sequential(OrderedDict(
        conv=nn.Conv2d(4, 4, 3), relu=nn.ReLU(), whole=sequence(nn.Conv2d(4, 4, 1), norm(4)),
        other=nn.Conv2d(4, 4, 1), last=nn.ReLU(),
    ))  # fmt: skip
    model.conv.register_forward_hook(note("conv"))
    model.whole.register_forward_hook(note("whole"))
    model.last.register_forward_hook(note("last"))
    fused = fuse_quietly(model)
    assert codes(fused) == ["hooks", "not_called", "hooks"]
    with torch.no_grad():
        fused(torch.randn(1, 4, 5, 5))
    assert seen == ["conv", "whole", "last"]
    assert type(fused.whole[0]) is fastconv.Conv2d


def test_convolutions_that_are_not_ours_stay_as_they_are() -> None:
    class Own(nn.Conv2d):
        pass

    model = sequence(Own(4, 4, 3), norm(4), nn.Conv2d(4, 4, 1), norm(4), nn.ConvTranspose2d(4, 4, 3), norm(4))
    nn.utils.parametrize.register_parametrization(model[2], "weight", nn.Identity())
    model.append(nn.Conv2d(4, 4, 1)).append(nn.ReLU())
    fused = check(model, torch.randn(1, 4, 9, 9), filter_fn=lambda name, module: name != "6")
    assert codes(fused) == ["subclass", "parametrized", "kind", "filtered"]
    assert parts(fused) == ["", "", "conv", ""]
    assert isinstance(fused.get_submodule("0"), Own)


def test_nothing_to_fuse_warns() -> None:
    with pytest.warns(UserWarning, match="no convolution"):
        fastconv.fuse(sequence(nn.Linear(3, 3)).eval())


# ------------------------------------------------------------------------------------------------ shared modules


def test_a_convolution_that_is_used_in_two_ways_becomes_two() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x))) * torch.sigmoid(self.conv(x)) * F.silu(self.conv(x))

    fused = check(Function(forward), torch.randn(2, 6, 5, 8))
    assert sorted(parts(fused)) == ["conv+bn+relu", "conv+sigmoid", "conv+silu"]
    assert layers(fused) == 3
    assert len({row.name for row in fused.report.rows}) == 3


def test_a_block_that_is_used_twice_stays_one() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        for _ in range(3):
            x = F.relu(self.norm(self.conv(x)) + x)
        return x

    fused = check(Function(forward), torch.randn(2, 6, 5, 8))
    assert parts(fused) == ["conv+bn+residual+relu"]
    assert layers(fused) == 1


def test_one_module_under_two_names() -> None:
    conv = nn.Conv2d(4, 4, 3, padding=1)
    fused = check(sequence(conv, nn.ReLU(), conv, norm(4)), torch.randn(1, 4, 5, 5))
    assert sorted(parts(fused)) == ["conv+bn", "conv+relu"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_nan_is_kept(dtype: torch.dtype, device: str) -> None:
    for algorithm in ("auto", "torch"):
        layer = FusedConv2d(64, 64, 3, padding=1, activation="relu", algorithm=algorithm).to(device, dtype)
        x = torch.randn(2, 64, 9, 9).to(device, dtype, memory_format=torch.channels_last)
        x[0, 0, 4, 4] = float("nan")
        with torch.no_grad():
            assert layer(x)[0, :, 3:6, 3:6].isnan().all()


def test_modules_that_are_left_in_training_mode_stay_in_it() -> None:
    """Batch statistics, Monte Carlo dropout: the model is in evaluation mode, but for them."""
    model = sequence(nn.Conv2d(4, 6, 3), norm(6), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.Dropout(0.5), nn.ReLU()).eval()
    x = torch.randn(3, 4, 9, 9)
    for place in (1, 4):
        model[place].train()
    copies = [fastconv.fuse(model), copy.deepcopy(fastconv.fuse(model))]
    copies.append(pickle.loads(pickle.dumps(copies[0])))
    for fused in copies:
        assert parts(fused) == ["conv", "conv"]
        outputs = []
        for each in (copy.deepcopy(model), fused):
            torch.manual_seed(3)
            with torch.no_grad():
                outputs.append(each(x))
        assert relative_error(outputs[1], outputs[0]) < 1e-5
        assert not fused.training


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_every_hook_is_called(place: int, register: str) -> None:
    """Of the convolution, an identity behind it, the norm and the activation."""
    model = sequence(nn.Conv2d(4, 6, 3), nn.Identity(), norm(6), nn.ReLU())

    def double(module: nn.Module, inputs: Any, output: Any = None) -> Any:
        return tuple(2 * x for x in inputs) if output is None else 2 * output

    getattr(model[place], register)(double)
    check(model, torch.randn(1, 4, 9, 9))


def test_uses_that_differ_in_the_slope_or_in_the_kind_of_sum_become_two_layers() -> None:
    fused = check(
        Function(lambda self, x: F.leaky_relu(self.conv(x), 0.1) * F.leaky_relu(self.conv(x), 0.5)),
        torch.randn(2, 6, 5, 8),
    )
    assert layers(fused) == 2
    wide = torch.randn(2, 6, 5, 8)
    model = Function(lambda self, x: (SUMS["plus"](self.conv(x), self.other), in_place(self.conv(x), self.other)))
    model.register_buffer("other", wide)
    model.conv.bfloat16()
    fused = fuse_quietly(model)
    assert [y.dtype for y in fused(torch.randn(2, 6, 5, 8).bfloat16())] == [torch.float32, torch.bfloat16]
