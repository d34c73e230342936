"""Rewrites of ATen graphs: what becomes of a convolution and of what follows it, without a compiler behind them."""

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from fusing import Function, codes, norm, parts, sequence
from fusing import check as check_fused
from layers import relative_error
from rewriting import OURS, check, compiled
from torch import Tensor, nn

import fastconv
from fastconv import ops, rewrites, settings
from fastconv.rewrites import Asked

pytestmark = pytest.mark.usefixtures("full_precision")
aten = torch.ops.aten


def conv(*channels: int, **arguments: Any) -> nn.Conv2d:
    return nn.Conv2d(*channels, 3, padding=1, **arguments)


# The model, what becomes of its convolution, and the code of what stays apart.
WITH_SIX = {
    "conv": (lambda: conv(6, 6), "conv", ""),
    "norm": (lambda: sequence(conv(6, 6), norm(6)), "conv+bn", ""),
    "norm without bias": (lambda: sequence(conv(6, 6, bias=False), norm(6)), "conv+bn", ""),
    "norm without affine": (lambda: sequence(conv(6, 6), norm(6, affine=False, eps=0.1)), "conv+bn", ""),
    "norm of batches": (lambda: sequence(conv(6, 6), norm(6, track_running_stats=False)), "conv", ""),
    "two norms": (lambda: sequence(conv(6, 6), norm(6), norm(6)), "conv+bn+bn", ""),
    "relu": (lambda: sequence(conv(6, 6), nn.ReLU(inplace=True)), "conv+relu", ""),
    "relu6": (lambda: sequence(conv(6, 6), norm(6), nn.ReLU6()), "conv+bn+relu6", ""),
    "silu": (lambda: sequence(conv(6, 6), nn.SiLU()), "conv+silu", ""),
    "leaky_relu": (lambda: sequence(conv(6, 6), nn.LeakyReLU(-0.3)), "conv+leaky_relu", ""),
    "hardtanh": (lambda: sequence(conv(6, 6), nn.Hardtanh()), "conv", ""),
    "sigmoid": (lambda: sequence(conv(6, 6), nn.Sigmoid()), "conv", "activation"),
    "gelu": (lambda: sequence(conv(6, 6), norm(6), nn.GELU()), "conv+bn", "activation"),
    "gelu_tanh": (
        lambda: Function(lambda m, x: F.gelu(m.conv(x), approximate="tanh") + x),
        "conv",
        "activation",
    ),
    "hardswish": (lambda: Function(lambda m, x: F.hardswish(m.conv(x) + x)), "conv+residual", "activation"),
    "silu in two steps": (lambda: Function(lambda m, x: (lambda y: y * y.sigmoid())(m.conv(x))), "conv", ""),
    "two activations": (lambda: sequence(conv(6, 6), nn.ReLU6(), nn.SiLU()), "conv+relu6", ""),
    "norm after activation": (lambda: sequence(conv(6, 6), nn.SiLU(), norm(6)), "conv+silu", ""),
    "residual": (lambda: Function(lambda m, x: F.relu(m.norm(m.conv(x)) + x)), "conv+bn+residual+relu", ""),
    "residual first": (lambda: Function(lambda m, x: x + m.conv(x)), "conv+residual", ""),
    "residual in place": (lambda: Function(lambda m, x: F.silu(m.conv(x).add_(x))), "conv+residual+silu", ""),
    "residual after the activation": (lambda: Function(lambda m, x: F.relu(m.conv(x)) + x), "conv+relu+residual", ""),
    "norm after the residual": (lambda: Function(lambda m, x: m.norm(m.conv(x) + x)), "conv+residual", ""),
    "two residuals": (lambda: Function(lambda m, x: m.conv(x) + x + x.sin()), "conv+residual", ""),
    "scaled residual": (lambda: Function(lambda m, x: torch.add(m.conv(x), x, alpha=2)), "conv", ""),
    "doubled": (lambda: Function(lambda m, x: (lambda y: y + y)(m.conv(x))), "conv", ""),
    "number": (lambda: Function(lambda m, x: m.conv(x) + 1), "conv", ""),
    "broadcast": (lambda: Function(lambda m, x: m.conv(x) + x[:1, :, :1, :1]), "conv", "residual"),
    "promoted": (lambda: Function(lambda m, x: m.conv(x) + x.to(torch.bfloat16)), "conv", "residual"),
    "several readers": (lambda: Function(lambda m, x: (lambda y: F.relu(y) * y)(m.conv(x))), "conv", "users"),
    "same padding": (lambda: nn.Conv2d(6, 6, 4, padding="same"), "conv", ""),
    "geometry": (lambda: nn.Conv2d(6, 9, (3, 2), (2, 1), (1, 2), (1, 2), 3), "conv", ""),
    "transposed": (lambda: nn.ConvTranspose2d(6, 4, 2, 2), "conv", "transposed"),
}


@pytest.mark.parametrize("name", WITH_SIX)
def test_what_becomes_of_a_convolution(name):
    make, fused, code = WITH_SIX[name]
    backend = check(make(), torch.randn(2, 6, 7, 5))
    assert (backend.parts, backend.codes) == ([fused], [code])
    assert backend.count(ops.conv2d_op) == (code != "transposed")


# What only `fuse` refuses, and what it takes since it does not know shapes and dtypes.
FUSED_OTHERWISE = {
    "norm of batches": ("conv", "norm_statistics"),
    "broadcast": ("conv+residual", ""),
    "promoted": ("conv+residual", ""),
    "number": ("conv+shift", ""),
    "transposed": ("conv", ""),
    "sigmoid": ("conv+sigmoid", ""),
    "gelu": ("conv+bn+gelu", ""),
    "gelu_tanh": ("conv+gelu_tanh+residual", ""),
    "hardswish": ("conv+residual+hardswish", ""),
}


@pytest.mark.parametrize("name", WITH_SIX)
def test_fuse_finds_the_same(name):
    make, *found = WITH_SIX[name]
    fused = check_fused(sequence(make()), torch.randn(2, 6, 7, 5))
    assert [*parts(fused), *codes(fused)] == list(FUSED_OTHERWISE.get(name, found))


def test_what_is_left_apart_and_why():
    """A dense layer's norm stands before its convolution; a value with two readers; a second activation."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.conv(F.relu(m.norm(x)))
        z = F.relu(y)
        return z * F.silu(F.relu6(m.conv(z))) + y

    wanted = {"alone": {"batch norm": 1, "activation": 2}, "users": {"activation": 1, "sum": 1}}
    x = torch.randn(2, 6, 7, 5)
    report = check_fused(Function(forward), x).report
    assert report.left == wanted
    assert "left apart [users]: 1 activation, 1 sum" in str(report)
    backend = check(Function(forward), x)
    assert sorted(backend.left) == sorted(
        (what, code) for code, counts in wanted.items() for what, count in counts.items() for _ in range(count)
    )


def test_what_is_computed_of_the_same_is_computed_once():
    """A convolution that is called twice with its norm is folded once; with another norm, once more."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.a, self.b = conv(6, 6), norm(6), norm(6)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(self.conv(self.a(self.conv(x)) + self.b(self.conv(x))))

    backend = check(Shared(), torch.randn(2, 6, 7, 5))
    assert sorted(backend.parts) == ["conv+bn", "conv+bn", "conv+bn+residual"]
    assert backend.count(aten.rsqrt.default) == 2


@pytest.mark.parametrize("channels_last", [False, True])
def test_of_two_that_are_added_one_takes_the_sum(channels_last):
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = conv(4, 6), nn.Conv2d(4, 6, 1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.a(x) + self.b(x))

    format = torch.channels_last if channels_last else torch.contiguous_format
    backend = check(Two().to(memory_format=format), torch.randn(2, 4, 7, 5).contiguous(memory_format=format))
    assert sorted(backend.parts) == ["conv", "conv+residual+relu"]


def test_the_one_that_nobody_else_reads_takes_the_sum():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = conv(4, 6), nn.Conv2d(4, 6, 1)

        def forward(self, x: Tensor) -> Tensor:
            a, b = self.a(x), self.b(x)
            return (a + b) * b

    backend = check(Two(), torch.randn(2, 4, 7, 5))
    assert sorted(backend.parts) == ["conv", "conv+residual"]


def test_what_is_not_served_stays_as_it_is():
    one = nn.Sequential(nn.Conv1d(4, 6, 3), nn.ReLU())
    assert check(one, torch.randn(2, 4, 9)).codes == ["dimensions"]
    three = nn.Conv3d(2, 2, 3)
    assert check(three, torch.randn(1, 2, 5, 5, 5)).codes == ["dimensions"]
    backend = check(conv(4, 6).double(), torch.randn(2, 4, 5, 5, dtype=torch.float64))
    assert backend.codes == ["dtype"]
    assert backend.count(aten.convolution.default) == 1


def test_a_named_algorithm_that_does_not_fit_leaves_the_convolution_and_says_why():
    model = sequence(nn.Conv2d(4, 6, 3, stride=2), nn.ReLU6())
    backend = check(model, torch.randn(2, 4, 9, 9), Asked(algorithm="winograd_f4"))
    assert backend.codes == ["stride"]
    assert "stride" in backend.found[0].obstacle[1]
    assert (backend.count(ops.conv2d_op), backend.count(aten.convolution.default)) == (0, 1)


def test_what_the_planner_leaves_to_pytorch_is_pytorchs():
    model = sequence(conv(6, 6), norm(6), nn.LeakyReLU(0.3))
    backend = check(model, torch.randn(2, 6, 7, 5), Asked(algorithm="torch"))
    assert (backend.parts, backend.codes) == (["conv+bn+leaky_relu"], ["cost"])
    assert backend.count(aten.convolution.default) == 1


def test_disabled(monkeypatch):
    monkeypatch.setattr(settings, "disabled", True)
    monkeypatch.setattr(settings, "auto_algorithm", "torch")
    assert check(conv(6, 6), torch.randn(2, 6, 7, 5)).count(ops.conv2d_op) == 0


@pytest.mark.parametrize("channels_last", [False, True])
def test_packed(channels_last):
    format = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.randn(2, 16, 9, 9).contiguous(memory_format=format)
    model = sequence(conv(16, 16), norm(16), nn.SiLU(), conv(16, 16)).to(memory_format=format)
    backend = check(model, x, Asked(algorithm="winograd_f2", packed=True))
    assert (backend.count(ops.pack_weight_op), backend.count(ops.conv2d_packed_op)) == (2, 2)
    # One algorithm's packing may not fit another size.
    assert check(model, x, Asked(algorithm="winograd_f2", packed=True), dynamic=True).count(ops.conv2d_op) == 2


def test_a_model_that_calls_the_operator_is_fused_and_keeps_its_algorithm():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = fastconv.Conv2d(6, 6, 3, padding=1, algorithm="winograd_f2", precision="fp32")
            self.norm = norm(6)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.norm(self.conv(x)))

    function, backend = compiled(Own().eval(), Asked(algorithm="torch"))
    with torch.no_grad():
        x = torch.randn(2, 6, 7, 5)
        torch.testing.assert_close(function(x), function._orig_mod(x))
    assert backend.parts == ["conv+bn+relu"]
    assert backend.found[0].algorithm == "winograd_f2"


def test_half_types():
    x = torch.randn(2, 6, 7, 5).bfloat16()
    model = sequence(conv(6, 6), norm(6), nn.SiLU()).bfloat16()
    limit = 4 * 2.0**-8  # input and filter are exact; the folded filter and the output are rounded once each
    assert check(model, x, limit=limit).parts == ["conv+bn+silu"]


def test_autocast():
    model = sequence(conv(6, 6), nn.ReLU()).eval()
    function, backend = compiled(model)
    x = torch.randn(2, 6, 7, 5)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y = function(x)
        torch.testing.assert_close(y, model(x), rtol=2.0**-7, atol=2.0**-7)
    assert y.dtype == torch.bfloat16
    assert backend.found[0].dtype == "bfloat16"


def test_what_is_not_finite_passes():
    model = sequence(conv(4, 6), norm(6), nn.ReLU())
    x = torch.randn(2, 4, 9, 9)
    x[0, 1, 4, 4], x[1, 2, 0, 0] = torch.nan, torch.inf
    function, _ = compiled(model.eval())
    with torch.no_grad():
        assert torch.equal(function(x).isnan(), model(x).isnan())


def test_another_batch_an_empty_one_and_one_graph_for_all_sizes():
    model = sequence(conv(3, 6), norm(6), nn.SiLU(), conv(6, 6)).eval()
    function, backend = compiled(model)
    with torch.no_grad():
        for n in (2, 5, 3, 0):
            x = torch.randn(n, 3, 7, 5)
            torch.testing.assert_close(function(x), model(x), rtol=1e-4, atol=1e-5)
        assert set(backend.parts) == {"conv+bn+silu", "conv"}
        function, backend = compiled(model, dynamic=True)
        for shape in ((2, 3, 7, 5), (4, 3, 9, 9), (1, 3, 33, 13)):
            x = torch.randn(shape)
            torch.testing.assert_close(function(x), model(x), rtol=1e-4, atol=1e-5)
    assert len(backend.graphs) <= 2  # a batch of one is a graph of its own
    assert backend.count(ops.conv2d_op) == 2 * len(backend.graphs)


def test_graph_breaks():
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.norm = conv(3, 6), conv(6, 6), norm(6)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.relu(self.first(x))
            torch._dynamo.graph_break()
            return self.norm(self.second(y))

    backend = check(Broken(), torch.randn(2, 3, 7, 5))
    assert backend.parts == ["conv+relu", "conv+bn"]
    assert len(backend.graphs) == 2


TRAINED = {
    "relu": lambda: sequence(conv(4, 6), nn.ReLU(), conv(6, 4, groups=2)),
    "silu": lambda: sequence(conv(4, 6), nn.SiLU(), nn.Conv2d(6, 4, 3, 2, 1)),
    "norm": lambda: sequence(conv(4, 6), norm(6), nn.ReLU(), conv(6, 4)),
    "residual": lambda: sequence(Function(lambda m, x: F.relu(m.conv(x) + x)), nn.Conv2d(6, 6, 1)),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", TRAINED)
def test_gradients(name, dynamic):
    model = TRAINED[name]().train()
    exact = copy.deepcopy(model).double()
    x = torch.randn(3, model[0].conv.in_channels if name == "residual" else 4, 7, 9, requires_grad=True)
    x64 = x.detach().double().requires_grad_()
    function, backend = compiled(model, dynamic=dynamic)
    y, y64 = function(x), exact(x64)
    cotangent = torch.randn_like(y)
    inputs, inputs64 = [x, *model.parameters()], [x64, *exact.parameters()]
    found = torch.autograd.grad(y, inputs, cotangent, allow_unused=True)
    wanted = torch.autograd.grad(y64, inputs64, cotangent.double(), allow_unused=True)
    assert relative_error(y.double(), y64) < 1e-5
    largest = max(float(w.norm()) for w in wanted if w is not None)
    for f, w in zip(found, wanted, strict=True):
        assert (f is None) == (w is None)
        if w is not None:  # the bias before a norm has none but rounding's
            assert float((f.double() - w).norm()) < 2e-5 * max(float(w.norm()), largest * 1e-2)
    assert backend.count(ops.conv2d_op) == 2
    assert backend.count(ops.conv2d_gradients_op) >= 1  # both of one convolution
    assert backend.count(ops.conv2d_gradients_op) + backend.count(ops.weight_gradient_op) == 2
    assert backend.count(aten.convolution_backward.default) == 0
    gradients = [taken.algorithm for taken in backend.found if taken.parts == ["gradients"]]
    assert gradients
    if not dynamic:  # the planner is asked where sizes are known
        assert all(re.fullmatch(r"(input: (torch|(phases|together) \w+), )?weight: \w+", each) for each in gradients)


class DecoderBlock(nn.Module):
    """Of a latent diffusion model's decoder: group norm, SiLU and convolution twice, a shortcut, upsampling."""

    def __init__(self, c: int, k: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(2, c), nn.GroupNorm(2, k)
        self.conv1, self.conv2, self.shortcut, self.up = conv(c, k), conv(k, k), nn.Conv2d(c, k, 1), conv(k, k)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))
        return self.up(F.interpolate(self.shortcut(x) + y, scale_factor=2.0, mode="nearest"))


def test_a_decoder():
    backend = check(sequence(DecoderBlock(8, 8), DecoderBlock(8, 4)), torch.randn(1, 8, 6, 6))
    assert sorted(backend.parts) == ["conv"] * 6 + ["conv+residual"] * 2


def test_a_residual_network():
    model = torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=5)
    model.eval()
    backend = check(model, torch.randn(2, 3, 32, 32), Asked(), limit=1e-4)
    assert sorted(set(backend.parts)) == ["conv+bn", "conv+bn+relu", "conv+bn+residual+relu"]
    assert len(backend.found) == 12


def test_a_table_keeps_what_the_patterns_name():
    from torch._inductor.decomposition import select_decomp_table

    table = rewrites.table(select_decomp_table())
    assert aten.silu.default not in table
    assert aten.gelu.default not in table
    assert aten.elu.default in table
    args = [torch.rand(3) for _ in range(4)]
    x = torch.randn(2, 3, 4, 4)
    for operator in (aten.native_batch_norm.default, aten.cudnn_batch_norm.default):
        for training in (False, True):
            found = table[operator](x, *args[:2], *(a.clone() for a in args[2:]), training, 0.1, 1e-5)[0]
            torch.testing.assert_close(found, F.batch_norm(x, args[2], args[3], *args[:2], training, 0.0, 1e-5))


def test_asked_state_tells_apart_what_makes_other_graphs():
    states = [Asked().state(), OURS.state(), Asked(precision="tf32").state(), Asked(packed=True).state()]
    states.append(Asked(max_error=2.0).state())
    assert len(set(states)) == len(states)


def test_inputs_are_expected_in_channels_last():
    """Also one that is contiguous in the graph: who lowers the graph makes it so, and the operator copies nothing."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).contiguous().sin())

    network = Network().to(memory_format=torch.channels_last)
    x = torch.randn(2, 8, 5, 6).contiguous(memory_format=torch.channels_last)
    backend = check(network, x)
    (graph,) = backend.graphs
    _, second = graph.find_nodes(op="call_function", target=ops.conv2d_op)
    assert second.args[0].meta["val"].is_contiguous()
    (image, weight, *_), _ = second.meta["eager_input_vals"]
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert weight is second.args[1].meta["val"]


def test_what_is_known_at_run_time_alone_stays_pytorchs():
    """Groups that are images, as of a modulated convolution; a slope that is a size."""

    def modulated(x, w, s):
        n, c, *size = x.shape
        weight = (w[None] * s[:, None, :, None, None]).reshape(-1, c, 3, 3)
        return F.conv2d(x.reshape(1, n * c, *size), weight, padding=1, groups=n).reshape(n, -1, *size)

    def leaky(x, w, s):
        return F.leaky_relu(F.conv2d(x, w, padding=1), s.shape[0] * 0.1)

    w = torch.randn(8, 4, 3, 3)
    for function in (modulated, leaky):
        call, _ = compiled(function)
        for n in (2, 3, 5):
            arguments = torch.randn(n, 4, 8, 8), w, torch.randn(n, 4)
            with torch.no_grad():
                torch.testing.assert_close(call(*arguments), function(*arguments), rtol=1e-4, atol=1e-4)
