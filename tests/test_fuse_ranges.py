"""fuse: concatenations along channels that become ranges of one tensor, and norms before convolutions that these
compute: what is done for which inputs, and values against float64."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from concatenating import CASES, NORMS, Model, calibrated, cat, dense, model, nested, picture
from fusing import check, fuse_quietly, hooked, parts
from layers import DEVICES, NO_GPU, relative_error
from torch import Tensor, nn

import fastconv
from benchmarks.corpus import definitions
from fastconv.fuse import lowering, ranges

pytestmark = pytest.mark.usefixtures("full_precision")

# An algorithm of ours whose kernels take ranges and norms on every CPU: the planner's costs decide nothing.
OURS = {"algorithm": "implicit_gemm", "precision": "fp32"}


def fused(module: nn.Module, *inputs: Tensor) -> fastconv.FusedModule:
    """Holds it against the model in float64, for each input twice; no result is a part of a larger tensor."""
    module = module.eval()
    result = fuse_quietly(module, **OURS)
    exact = copy.deepcopy(module).double()
    with torch.no_grad():
        for x in (*inputs, *inputs):
            y, plain, wanted = result(x.clone()), module(x.clone()), exact(x.double())
            assert (y.shape, y.dtype, y.stride()) == (plain.shape, plain.dtype, plain.stride())
            assert y.untyped_storage().nbytes() == y.numel() * y.element_size()
            assert relative_error(y.double(), wanted) < 1e-5
    return result


def ours(module: fastconv.FusedModule) -> list[str]:
    return sorted(each for each in parts(module) if each)


def codes(module: fastconv.FusedModule) -> list[str]:
    return sorted(code for code, count in module.report.concatenations.items() for _ in range(count))


# What differs from graphs that Inductor lowers, which computes values where they are copied to: a list of one value is
# a concatenation here, what reads a value in eager calls may not take a range, and a layer that is called twice is one.
DIFFERENT = {
    "dense block": (["", "", "", ""], 4),
    "skip connection": (["producers"], 0),
    "another reader": (["", "producers"], 1),
    "returned, too": ([""], 1),
    "a part of itself is returned": (["", "readers"], 3),
    "a chain of sums": ([""] * 3, 3),
    "a chain that is returned": ([""] * 3, 3),
    "a chain from the input": ([""] * 2, 2),
    "a chain of chains": ([""] * 4, 3),
    "a residual in a narrower tensor": (["", ""], 3),
    "a sum that nobody else computes": (["producers"], 0),
    "resized": (["producers"], 0),
}


@pytest.mark.parametrize("name", CASES)
def test_ranges(name: str) -> None:
    forward, expected, direct, _ = CASES[name]
    expected, direct = DIFFERENT.get(name, (expected, direct))
    result = fused(model(forward), picture(), picture(3, 6, 9), picture(1, 4, 2))
    assert codes(result) == sorted(expected)
    assert sum(each.endswith("+cat") for each in ours(result)) == direct


@pytest.mark.parametrize("name", NORMS)
def test_norms_before(name: str) -> None:
    forward, expected, left = NORMS[name]
    result = fused(model(forward), picture(), picture(1, 3, 8))
    assert [each for each in ours(result) if each] == sorted(expected)
    assert sum(kinds.get("batch norm", 0) for kinds in result.report.left.values()) == left


def inception(m: Any, x: Tensor) -> Tensor:
    y = torch.concat([F.relu(m.a(x)), m.c(F.relu(m.b(x))), F.max_pool2d(x, 3, 1, 1)], dim=-3)
    return m.wider(y) + F.avg_pool2d(m.wider(y), 3, 1, 1)


def test_branches_and_blocks() -> None:
    result = fused(model(inception), picture(), picture(1, 6, 5))
    assert codes(result) == [""]
    assert ours(result) == ["conv", "conv+cat", "conv+relu", "conv+relu+cat", "conv+residual"]
    block = definitions.Dense(12, 12).to(memory_format=torch.channels_last)  # of RRDB
    x = torch.randn(1, 12, 7, 9).contiguous(memory_format=torch.channels_last)
    assert codes(fused(block, x)) == [""] * 5


def twice(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2)


# Upsamplings by integers write their range, too: the model, codes, how many of the convolutions and of them do.
UPSAMPLED: dict[str, Any] = {
    "lateral": (lambda m, x: m.wide(cat(twice(m.a(F.avg_pool2d(x, 2, 2))), x[:, :, :6, :4])), [""], 0, 1),
    "two": (lambda m, x: cat(twice(m.a(x)), twice(m.b(x))), [""], 0, 2),
    "beside a convolution": (lambda m, x: cat(m.b(m.up(x)), twice(m.a(x))), [""], 1, 1),
    "in two": (lambda m, x: cat(y := twice(m.a(x)), m.up(x)) + cat(m.b(m.up(x)), y), ["", ""], 1, 1),
    "read by an activation": (lambda m, x: cat(y := twice(m.a(x)), m.up(x)).sum() * F.relu(y), [""], 0, 1),
    "another reader": (lambda m, x: cat(y := twice(m.a(x)), m.up(x)).sum() * y.sin(), ["producers"], 0, 0),
    "twice the same": (lambda m, x: cat(y := twice(m.a(x)), y), ["twice"], 0, 0),
    "written over": (lambda m, x: cat(twice(m.a(x)).add_(1), m.up(x)), ["in_place"], 0, 0),
    "no integer": (lambda m, x: cat(F.interpolate(x, scale_factor=1.5), m.up(x)[..., :10, :7]), ["producers"], 0, 0),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", UPSAMPLED)
def test_upsamplings(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, expected, convolutions, upsamplings = UPSAMPLED[name]
    calls = []
    made = ranges.upsample_into
    monkeypatch.setattr(ranges, "upsample_into", lambda *args: calls.append(1) or made(*args))
    x = picture().to(device)
    result = fused(model(forward).to(device), x)
    assert codes(result) == expected
    assert sum(each.endswith("+cat") for each in ours(result)) == convolutions
    with torch.no_grad():
        calls.clear()
        result(x)
    assert len(calls) == upsamplings


def test_layout_alignment_and_empty_batches() -> None:
    result = fused(Model(dense), picture().contiguous())
    assert set(codes(result)) == {"layout"}
    result = fused(model(lambda m, x: cat(m.a(x), m.b(x)), 6), picture())
    assert codes(result) == ["alignment"]
    result = fused(model(dense), picture(), picture()[:, :, :1, :1])
    with torch.no_grad():
        assert result(picture()[:0]).shape == (0, 32, 7, 5)


IN_PLACE = {
    "over a concatenation": lambda m, x: cat(y := m.a(x), m.b(y)).relu_() + cat(y, y),
    "over a value in it": lambda m, x: (y := m.a(x), z := cat(y, m.b(x)), y.mul_(2), z * cat(y, y))[-1],
    "through a view": lambda m, x: (y := m.a(x), z := cat(y, m.b(x)), y[:, :2].zero_(), z * cat(y, y))[-1],
    "over the input": lambda m, x: (y := cat(x, m.a(x)), x.relu_(), y * cat(x, x))[-1],
    "over what a norm reads": lambda m, x: m.a((y := m.norm(x), x.zero_(), F.relu(y))[-1]) + x,
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_is_written_over_stays_apart(name: str) -> None:
    result = fused(model(IN_PLACE[name]), picture())
    assert set(codes(result)) <= {"in_place", "twice", "producers"}
    assert not any("cat" in each or each.startswith("bn") for each in ours(result))


def test_values_in_channels_last_of_a_model_that_is_not() -> None:
    """As where an attention ends in a permutation; the report asks the planner for the layers as they ran."""

    class Permuted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = x.permute(0, 3, 1, 2)
            return cat(self.a(x), self.b(x))

    result = fused(Permuted(), torch.randn(2, 9, 7, 8))
    assert ours(result) == ["conv+cat"] * 2
    assert "concatenations without a copy: 1" in str(result.report)


def densenet() -> nn.Module:
    network = torchvision.models.DenseNet(8, (2, 3), 16, num_classes=10)
    calibrated(network)
    return network.eval().to(memory_format=torch.channels_last)


def images(n: int, size: int) -> Tensor:
    return torch.randn(n, 3, size, size).contiguous(memory_format=torch.channels_last)


def test_densenet() -> None:
    network = densenet()
    result = fused(network, images(2, 32), images(1, 48))
    assert codes(result) == [""] * 7
    assert ours(result) == ["bn+relu+conv"] + ["bn+relu+conv+bn+relu"] * 5 + ["conv+bn+relu"] + ["conv+cat"] * 5
    assert result.report.left == {"alone": {"batch norm": 1, "activation": 1}}  # the head's
    assert "concatenations without a copy: 7" in str(result.report)
    assert list(result.state_dict()) == [name for name in check(network, images(1, 32)).state_dict()]
    x = images(2, 32)
    with torch.no_grad():
        y = result(x)
        assert torch.equal(result(x=x), y)
        for other in (copy.deepcopy(result), pickle.loads(pickle.dumps(result))):
            assert torch.equal(other(x), y)
            assert ours(other) == ours(result)
        with torch.inference_mode():
            assert torch.equal(fuse_quietly(network, **OURS)(x), y)


def rrdb() -> nn.Module:
    """With fewer channels and blocks, and sums that stay within half types."""
    body = [definitions.Residual(nn.Sequential(*(definitions.Dense(16, 8) for _ in range(3)))) for _ in range(2)]
    network = nn.Sequential(definitions.conv(3, 16), *body, *definitions.upsample(16, 1), definitions.conv(16, 3))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(0.5)
    return network.eval().to(memory_format=torch.channels_last)


def test_rrdb() -> None:
    """Nothing is copied: the sum behind a block is in its last convolution, that around three blocks is computed in the
    range that comes next."""
    result = fused(rrdb(), images(1, 12), images(2, 7))
    assert codes(result) == [""] * 30
    assert ours(result).count("conv+residual+cat") == 6
    assert ours(result).count("conv+cat") == 25
    names = result._lowerings.latest.forward.__code__.co_names
    assert {name.rpartition("ranges_")[2] for name in names if name.endswith("into")} == {"convolve_into", "add_into"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types(dtype: torch.dtype) -> None:
    for network, part, count in ((densenet(), "bn+relu+conv+bn+relu", 5), (rrdb(), "conv+residual+cat", 6)):
        m, x = network.to(dtype), images(2, 32).to(dtype)
        result = fuse_quietly(m, **OURS)
        with torch.no_grad():
            y, plain, exact = result(x), m(x), copy.deepcopy(m).double()(x.double())
        assert ours(result).count(part) == count
        assert relative_error(y.double(), exact) < 2 * relative_error(plain.double(), exact)


def test_weights_that_change_take_the_norms_along() -> None:
    first, second = densenet(), densenet()
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.mul_(1.1)
    x = images(2, 32)
    result, other = (fuse_quietly(network, **OURS) for network in (first, second))
    with torch.no_grad():
        result(x)
        result.load_state_dict(other.state_dict())
        assert torch.equal(result(x), other(x))
        for tensor in result.state_dict().values():
            if tensor.is_floating_point():
                tensor.data.zero_()
        fastconv.refresh(result)
        assert not result(x).any()
        exact = copy.deepcopy(second).double()(x.double())
        other = fuse_quietly(second)
        assert relative_error(other(x).double(), exact) < 1e-5
        assert relative_error(other.double()(x.double()), exact) < 1e-6  # its folded filters were rounded
        assert relative_error(other.float()(x).double(), exact) < 1e-5


def test_gradients_transforms_and_compilation_take_the_plain_way() -> None:
    network, x = densenet(), images(2, 32)
    result = fuse_quietly(network, **OURS)
    with torch.no_grad():
        y = result(x)
        for other in (
            torch.func.vmap(result)(x[:, None])[:, 0],
            torch.export.export(result, (x,)).module()(x),
            torch.compile(result, backend="eager", fullgraph=True)(x),
            torch.jit.trace(result, (x,), check_trace=False)(x),
        ):
            assert relative_error(other, y) < 1e-5
        with torch.autocast("cpu", torch.bfloat16):
            assert relative_error(result(x).float(), y) < 5e-2
    gradients = []
    for module in (result, network):
        leaf = x.clone().requires_grad_()
        module(leaf).square().sum().backward()
        gradients.append(leaf.grad)
    assert relative_error(*gradients) < 1e-4
    norm = result.features.denseblock1.denselayer1.norm1
    norm.weight.requires_grad_()
    result(x).sum().backward()
    assert norm.weight.grad.any()


def test_modules_that_were_replaced_since() -> None:
    m, x = model(NORMS["in a dense block"][0]).eval(), picture()
    for name, change in (
        ("a", lambda r, plain: r.set_submodule("a", nn.Sequential(plain.a))),
        ("norm", lambda r, plain: (r.set_submodule("norm", nn.Identity()), setattr(plain, "norm", nn.Identity()))),
        ("norm in training mode", lambda r, plain: (r.norm.train(), plain.norm.train())),
    ):
        result, plain = fuse_quietly(m, **OURS), copy.deepcopy(m)
        with torch.no_grad():
            result(x)
            change(result, plain)
            assert relative_error(result(x), plain(x)) < 1e-5, name


def test_hooks_see_what_they_saw() -> None:
    m, x = model(NORMS["in a dense block"][0]).eval(), picture()
    result = fuse_quietly(m, **OURS)
    with torch.no_grad():
        y = result(x)
        seen: dict[str, tuple[Tensor, Tensor]] = {}
        for name in ("a", "wide", "norm", "wide_norm"):
            layer = result.get_submodule(name)
            layer.register_forward_hook(lambda _, inputs, output, n=name: seen.update({n: (inputs[0], output)}))
        assert relative_error(result(x), y) < 1e-6
        assert relative_error(seen["norm"][1], m.norm(x)) < 1e-6
        assert relative_error(seen["a"][0], F.relu(m.norm(x))) < 1e-6
        assert relative_error(seen["wide"][1], y) < 1e-6
        assert fuse_quietly(sequence_with_hook(m), **OURS)(x).shape == y.shape


@pytest.mark.parametrize("name", ["a", "wide", "norm", "wide_norm"])
def test_a_forward_of_its_own_is_called(name: str) -> None:
    m, x = model(NORMS["in a dense block"][0]).eval(), picture()
    result = fuse_quietly(m, **OURS)
    with torch.no_grad():
        y = result(x)
        inner, called = result.get_submodule(name), []
        inner.forward = lambda x, forward=inner.forward: called.append(name) or forward(x)
        assert relative_error(result(x), y) < 1e-6
    assert called == [name]


def sequence_with_hook(m: nn.Module) -> nn.Module:
    m.norm = hooked(m.norm)
    return m


def test_a_number_is_not_for_others() -> None:
    """It may decide how many channels there are, after as many sizes as are asked for one by one, too."""

    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x: Tensor, n: int) -> Tensor:
            return torch.cat([self.a(x), x[:, :n], self.a(x).relu()], 1) * 2

    m = Cut().eval().to(memory_format=torch.channels_last)
    result = fuse_quietly(m, **OURS)
    with torch.no_grad():
        for height, n in [*((height, 8) for height in range(4, 14)), (4, 4), (20, 4)]:
            x = torch.randn(2, 8, height, 6).contiguous(memory_format=torch.channels_last)
            assert relative_error(result(x, n), m(x, n)) < 1e-5


def test_a_norm_or_a_range_that_costs_more_than_a_pass_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the inputs that the planner is asked for, and for others that are served alike."""
    m, x = model(NORMS["in a dense block"][0]).eval(), picture()
    result = fuse_quietly(m, **OURS)
    with torch.no_grad():
        result(x)
        assert "bn+relu+conv+cat" in ours(result)
        for layer in (result.a, result.wide):
            layer._fastconv.resolved = "torch"  # PyTorch's has neither
        for y in (x, picture(1, 9, 4)):
            assert relative_error(result(y).double(), copy.deepcopy(m).double()(y.double())) < 1e-5
        assert result.a.last_algorithm == "torch"
    result = fuse_quietly(m, algorithm="torch")
    with torch.no_grad():
        assert relative_error(result(x), m(x)) < 1e-5
    assert ours(result) == ["conv", "conv"]
    assert codes(result) == ["producers"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason=f"test_rrdb_on_a_gpu: {NO_GPU}")
def test_rrdb_on_a_gpu() -> None:
    network, x = rrdb().cuda(), images(1, 128).cuda()
    exact = copy.deepcopy(network).double()
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        plain = copy.deepcopy(network).to(dtype)
        with torch.no_grad():
            wanted = exact(x.double())
            limit = max(1e-4, 2 * relative_error(plain(x.to(dtype)).double(), wanted))
            for arguments in ({}, OURS, {"algorithm": "winograd_fused"}):
                result = fuse_quietly(plain, **arguments)
                for _ in range(2):
                    assert relative_error(result(x.to(dtype)).double(), wanted) < limit, arguments


@pytest.mark.skipif(not torch.cuda.is_available(), reason=f"test_half_types_and_graphs_on_a_gpu: {NO_GPU}")
def test_half_types_and_graphs_on_a_gpu() -> None:
    """Captured after one call; the weights change between replays."""
    network, x = densenet().cuda(), images(2, 64).cuda()
    exact = copy.deepcopy(network).double()
    for dtype in (torch.float32, torch.float16):
        plain = copy.deepcopy(network).to(dtype)
        result, y = fuse_quietly(plain, **OURS), torch.empty(0)
        image, graph = x.to(dtype), torch.cuda.CUDAGraph()
        with torch.no_grad():
            result(image)
            with torch.cuda.graph(graph):
                y = result(image)
            assert "conv+cat" in ours(result)
            for _ in range(2):
                image.normal_()
                graph.replay()
                wanted = exact(image.double())
                assert relative_error(y.double(), wanted) < max(1e-4, 2 * relative_error(plain(image).double(), wanted))
            norm = result.get_submodule("features.denseblock1.denselayer1.norm1")
            norm.weight.mul_(2)
            fastconv.refresh(result)
            graph.replay()
            assert relative_error(y, result(image)) < 1e-6


def test_many_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """After some the planner is not asked again."""
    calls = []
    made = lowering._lowered
    monkeypatch.setattr(lowering, "_lowered", lambda *args: calls.append(1) or made(*args))
    result = fused(model(nested), *(picture(1, 3, w) for w in range(2, 14)))
    assert len(calls) == 8
    assert codes(result) == ["", "", ""]


class Correlation(nn.Module):
    """As many channels as pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        rows = self.a(x).permute(0, 2, 3, 1).reshape(n, h * w, c)
        volume = torch.bmm(rows, rows.transpose(1, 2)).view(n, h, w, h * w).permute(0, 3, 1, 2)
        return torch.cat([self.b(x), volume], 1)


def test_channels_that_are_a_matter_of_sizes() -> None:
    layers = Correlation().eval().to(memory_format=torch.channels_last)
    fused = fastconv.fuse(layers, algorithm="implicit_gemm")
    with torch.no_grad():
        for height in range(24, 2, -2):  # more sizes than code is made for
            x = torch.randn(1, 8, height, 4).to(memory_format=torch.channels_last)
            torch.testing.assert_close(fused(x), layers(x), rtol=1e-4, atol=1e-4)


def test_a_graph_that_was_edited_is_what_runs() -> None:
    layers = Correlation().eval().to(memory_format=torch.channels_last)
    fused = fastconv.fuse(layers, algorithm="implicit_gemm")
    x = torch.randn(1, 8, 6, 4).to(memory_format=torch.channels_last)
    with torch.no_grad():
        y, output = fused(x), fused.graph.output_node()
        with fused.graph.inserting_before(output):
            output.args = (fused.graph.call_function(torch.neg, (output.args[0],)),)
        fused.recompile()
        torch.testing.assert_close(fused(x), -y)


def test_values_that_are_not_known_before() -> None:
    """A model with a function that needs its values is left as it is; sizes that differ are an error, as they are in
    torch.cat."""

    def of_values(m: Any, x: Tensor) -> Tensor:
        return cat(m.a(x), m.b(x))[torch.nonzero(x[:, 0, 0, 0] > 0).flatten()]

    result = fused(model(of_values), picture(4))
    assert codes(result) == []
    for write in (ranges.copy_into, lambda x, *where: ranges.add_into(x, x, *where)):
        with pytest.raises(RuntimeError, match="expected the same dtype, and sizes that differ in channels alone"):
            write(picture(1, 1, 1), picture(1, 3, 3), 0)


def test_sums_of_values_that_differ() -> None:
    """As `+` takes them."""
    x, y = picture(2, 3, 4), torch.randn(8, 1, 1)
    buffer = ranges.add_into(x, y, 16, 8)
    assert torch.equal(buffer[:, 8:], x + y)
    assert torch.equal(ranges.add_into(x, x, buffer, 0)[:, :8], x + x)
    assert torch.equal(buffer[:, 8:], x + y)


def test_layers_with_a_residual_that_were_replaced_since() -> None:
    m, x = model(CASES["a chain of sums"][0]).eval(), picture()
    result = fuse_quietly(m, **OURS)
    with torch.no_grad():
        y, called = result(x), []
        wide = result.get_submodule("wide")
        wide.forward = lambda *inputs, forward=wide.forward: called.append(len(inputs)) or forward(*inputs)
        assert relative_error(result(x), y) < 1e-6
        assert called == [2] * 3
        wide._fastconv.resolved = "torch"
        del wide.forward
        assert relative_error(result(x), y) < 1e-5
