"""Frozen convolutions whose channels are no whole accesses: what gets channels of zeros, and values against float64, in
`compile`, `export` and `fuse`."""

import copy
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from concatenating import cat, model
from fusing import fuse_quietly, hooked
from layers import NO_GPU, relative_error
from rewriting import OURS, check, compiled, on_a_gpu
from torch import Tensor, nn

import fastconv
from fastconv import ops
from fastconv.compiler import ahead
from fastconv.rewrites import widening
from fastconv.rewrites.convolution import plan_of, problem_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
import golden_plans

aten = torch.ops.aten
FROZEN = replace(OURS, packed=True, scatters=True)


@pytest.fixture(autouse=True)
def costs(full_precision, monkeypatch):
    """What the rewrite does does not hang on this machine's costs: here each unaligned end of a convolution costs."""

    def aligned(call: Any, **around: Any) -> Any:
        problem = problem_of(call, **around)
        return {"cost_us": 100.0 * (problem.c % 4 != 0) + 100.0 * (problem.k % 4 != 0)}

    monkeypatch.setattr(widening, "plan_of", aligned)


def narrow(forward: Any) -> Any:
    """Convolutions from 8 channels to 6, and from 14 (`wide`) or 20 (`wider`) to 8."""
    return model(forward, 6)


def picture(k: int = 8) -> Tensor:
    return torch.randn(2, k, 7, 5).contiguous(memory_format=torch.channels_last)


def back(m: Any, y: Tensor) -> Tensor:
    """From 6 channels to 6."""
    return F.conv2d(y, m.a.weight[:, :6], m.b.bias, padding=1)


# The model, how many of its convolutions have wider filters, how many values are copied to be wider.
CASES = {
    "output and input": (lambda m, x: back(m, F.relu(m.a(x))).exp(), 2, 0),
    "another reader": (lambda m, x: back(m, y := m.a(x)).sin() * y, 2, 0),
    "residual": (lambda m, x: F.relu(back(m, y := F.relu(m.a(x))) + y).exp(), 2, 0),
    "block of what Inductor computes": (lambda m, x: (back(m, F.relu(back(m, y := x[:, :6].cos()))) + y).exp(), 2, 1),
    "returned": (lambda m, x: m.a(x), 0, 0),
    "input, returned": (lambda m, x: back(m, m.a(x)), 1, 0),
    "concatenated": (lambda m, x: m.wide(cat(x, m.a(x))), 2, 1),
    "aligned": (lambda m, x: m.up(x).exp(), 0, 0),
}


def wider(backend: Any) -> int:
    calls = [
        node for graph in backend.graphs for node in graph.find_nodes(op="call_function", target=ops.pack_weight_op)
    ]
    return sum(node.args[0].target is aten.constant_pad_nd.default for node in calls)


@pytest.mark.parametrize("name", CASES)
def test_values(name):
    forward, widened, copied = CASES[name]
    backend = check(narrow(forward), picture(), FROZEN)
    assert (wider(backend), backend.count(ops.channel_scatter_op)) == (widened, 2 * copied)


def test_only_frozen_weights_of_one_group_in_channels_last():
    forward = CASES["output and input"][0]
    assert wider(check(narrow(forward), picture(), OURS)) == 0
    assert wider(check(narrow(forward), picture(), FROZEN, dynamic=True)) == 0
    assert (
        wider(check(narrow(lambda m, x: F.conv2d(x[:, :6], m.a.weight[:, :3], groups=2).exp()), picture(), FROZEN)) == 0
    )


def test_what_costs_more_stays(monkeypatch):
    monkeypatch.setattr(widening, "plan_of", lambda call: {"cost_us": 100.0 * problem_of(call).k})
    assert wider(check(narrow(CASES["output and input"][0]), picture(), FROZEN)) == 0


def test_values_that_are_not_finite_stay_where_they_are():
    m, x = narrow(CASES["output and input"][0]).eval(), picture()
    x[0, 3, 2, 2] = torch.nan
    function, backend = compiled(m, FROZEN)
    with torch.no_grad():
        torch.testing.assert_close(function(x), m(x), rtol=1e-4, atol=1e-4, equal_nan=True)
    assert wider(backend) == 2


@pytest.mark.parametrize("gpu", ["h200", "h100"])
@pytest.mark.parametrize(("dtype", "channels"), [(torch.float16, 24), (torch.float32, 20)])
def test_hrnets_branch_on_a_gpu(monkeypatch, dtype, channels, gpu):
    """18 channels of 56x56 pixels: the planner takes kernels for whole accesses, and no value is copied."""
    monkeypatch.setattr(widening, "plan_of", plan_of)
    monkeypatch.setattr(ops, "device_info", lambda device: golden_plans.devices()[gpu])

    class Branch(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Conv2d(64, 18, 3, padding=1)
            self.a, self.b, self.c = (torch.nn.Conv2d(18, 18, 3, padding=1) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x).relu()
            return self.c((self.b(self.a(y).relu()) + y).relu()).exp()

    asked = replace(FROZEN, algorithm="auto", precision="tf32" if dtype is torch.float32 else None)
    graph = on_a_gpu(Branch(), (64, 64, 56, 56), dtype, asked=asked)
    calls = graph.find_nodes(op="call_function", target=ops.conv2d_packed_op)
    assert [node.meta["val"].shape[1] for node in calls][:3] == [channels] * 3
    assert not graph.find_nodes(op="call_function", target=ops.channel_scatter_op)


def test_with_inductor():
    network, x = narrow(CASES["residual"][0]).eval(), picture()
    function = fastconv.compile(network, "fp32", algorithm="implicit_gemm", frozen=True)
    torch._dynamo.reset()
    with torch.no_grad(), torch.compiler.config.patch(force_disable_caches=True):
        y = function(x)
        exact = copy.deepcopy(network).double()(x.double())
    assert relative_error(y.double(), exact) < 1e-5


def test_export():
    m, x = narrow(CASES["block of what Inductor computes"][0]).eval(), picture()
    with torch.no_grad():
        module, _ = ahead.rewritten(m, (x,), FROZEN)
        assert relative_error(module(x).double(), copy.deepcopy(m).double()(x.double())) < 1e-5
    packed = [node.args[2] for node in module.graph.find_nodes(op="call_function", target=ops.conv2d_packed_op)]
    assert packed == [[8, 8, 3, 3]] * 2
    assert [name for name, _ in module.named_parameters()] == []


class Chain(nn.Module):
    """A block as HRNet's, and what a test does behind it."""

    def __init__(self, behind: Any = torch.exp, **arguments: Any) -> None:
        super().__init__()
        arguments = {"kernel_size": 3, "padding": 1} | arguments
        self.first = nn.Conv2d(8, 6, **arguments)
        self.a, self.b = nn.Conv2d(6, 6, **arguments), nn.Conv2d(6, 6, **arguments)
        self.relu, self.behind = nn.ReLU(), behind

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.first(x))
        return self.behind(self.relu(self.b(self.relu(self.a(y))) + y))


class Narrow(nn.Module):
    """From 8 channels by 6 to 8, with a norm that is folded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a = nn.Conv2d(8, 6, 3, padding=1), nn.Conv2d(6, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8).eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.a(self.first(x).relu())).exp()


ALGORITHM = {"algorithm": "implicit_gemm", "precision": "fp32"}


def fused(m: nn.Module, *inputs: Tensor, wide: set[str], limit: float = 1e-5) -> fastconv.FusedModule:
    """Holds it against the model in float64, for each input twice."""
    result = fuse_quietly(m.to(memory_format=torch.channels_last), **ALGORITHM)
    exact = copy.deepcopy(m).double()
    with torch.no_grad():
        for x in (*inputs, *inputs):
            y, like, wanted = result(x.clone()), m(x), exact(x.double())  # cuDNN's in float64 are never channels_last
            assert (y.shape, y.stride()) == (like.shape, like.stride())
            assert relative_error(y.double(), wanted) < limit
    lowered = result._lowerings and result._lowerings.latest
    assert (lowered.wide if lowered else set()) == wide
    return result


ALL = {"first", "a", "b"}


@pytest.mark.parametrize("arguments", [{}, {"padding": "same"}, {"kernel_size": (3, 1), "padding": (1, 0)}])
def test_fused(arguments):
    result = fused(Chain(**arguments), picture(), picture()[:1, :, :3, :4], wide=ALL)
    assert [row.last_input_shape for row in result.report.rows if row.fused] == [(1, 8, 3, 4)] * 3
    assert list(result.state_dict()) == list(Chain(**arguments).state_dict())


def test_fused_what_stays_narrow():
    class Returned(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return self.first(x)

    fused(Returned(), picture(), wide=set())
    fused(Chain(lambda y: y.mul_(2)), picture(), wide={"first", "a"})  # over its value
    fused(Chain(padding_mode="circular"), picture(), wide=set())
    result, x = fuse_quietly(Chain(), **ALGORITHM), picture().contiguous()
    with torch.no_grad():
        result(x)
    assert not result._lowerings.latest.wide


def test_fused_layers_whose_weights_may_change():
    class Plain(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(self.first(x))).exp()

    fused(Plain(), picture(), wide=ALL)
    swapped = Plain().to(memory_format=torch.channels_last).eval()
    fastconv.swap_(swapped, **ALGORITHM)
    result, x = fuse_quietly(swapped), picture()
    with torch.no_grad():
        assert relative_error(result(x), swapped(x)) < 1e-6
        assert not result._lowerings.latest.wide


def test_fused_unbatched_images_stay_narrow():
    model = Chain().to(memory_format=torch.channels_last).eval()
    result, x = fuse_quietly(model, **ALGORITHM), picture()[0].clone()
    with torch.no_grad():
        assert relative_error(result(x), model(x)) < 1e-6
    assert not result._lowerings.latest.wide


SUMS = [(5,), (4, 5), (1, 1, 4, 5), (2, 1, 4, 5), (1, 6, 4, 5), (6, 4, 5), (2, 6, 1, 1)]


@pytest.mark.parametrize("shape", [*SUMS, (2, 6, 4, 5)])
def test_fused_sums_that_pytorch_broadcasts_stay_narrow(shape, monkeypatch):
    class Sum(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("added", torch.randn(shape))

        def forward(self, x: Tensor) -> Tensor:
            return self.b((self.first(x) + self.added).relu()).exp()

    monkeypatch.setattr(widening, "_pays", lambda *_: True)
    x = torch.randn(2, 8, 4, 5).contiguous(memory_format=torch.channels_last)
    fused(Sum(), x, wide={"b"} if shape in SUMS else {"first", "b"})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fused_half_types(dtype):
    m, x = Chain().to(dtype).to(memory_format=torch.channels_last).eval(), picture().to(dtype)
    result = fuse_quietly(m, algorithm="implicit_gemm")
    with torch.no_grad():
        y, plain, wanted = result(x), m(x), copy.deepcopy(m).double()(x.double())
    assert result._lowerings.latest.wide == ALL
    assert relative_error(y.double(), wanted) < 2 * relative_error(plain.double(), wanted)


def test_fused_weights_that_change():
    m, other, x = Chain(), Chain(), picture()
    result = fused(m, x, wide=ALL)
    with torch.no_grad():
        for copied in (copy.deepcopy(result), pickle.loads(pickle.dumps(result))):
            assert torch.equal(copied(x), result(x))
        result.load_state_dict(other.state_dict())
        assert relative_error(result(x).double(), other.double()(x.double())) < 1e-5
        for parameter in result.parameters():
            parameter.data.zero_()
        fastconv.refresh(result)
        assert torch.equal(result(x), torch.ones_like(result(x)))
        result.load_state_dict(other.state_dict())
        assert relative_error(result.half()(x.half()).double(), other(x.double())) < 1e-2
        assert relative_error(result.float()(x).double(), other(x.double())) < 1e-2  # its filters were rounded


def scaled(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach() * 3, requires_grad=False)


CHANGED = {
    "new weight": lambda layer: setattr(layer, "weight", scaled(layer.weight)),
    "new weight.data": lambda layer: setattr(layer.weight, "data", scaled(layer.weight).data),
    "assigned state": lambda layer: layer.load_state_dict(
        {name: scaled(value) for name, value in layer.state_dict().items()}, assign=True
    ),
    "weight in another order": lambda layer: setattr(layer.weight, "data", layer.weight.data.transpose(2, 3)),
    "new bias": lambda layer: setattr(layer, "bias", scaled(layer.bias)),
    "new bias.data": lambda layer: setattr(layer.bias, "data", scaled(layer.bias).data),
    "bias in place": lambda layer: layer.bias.mul_(3),
    "no bias": lambda layer: setattr(layer, "bias", None),
    "refreshed weight": lambda layer: (layer.weight.data.mul_(3), layer.bias.data.mul_(3), fastconv.refresh(layer)),
}


@pytest.mark.parametrize("change", CHANGED)
def test_fused_parameters_that_are_others(change):
    """Wide layers see what frozen layers see: another weight, and whatever happens to a bias."""
    m, x = Chain(), picture()
    result = fused(m, x, wide=ALL)
    exact = copy.deepcopy(m).double()
    with torch.no_grad():
        for layer in (result.a, exact.a) * 2:
            CHANGED[change](layer)
        for _ in range(2):
            assert relative_error(result(x).double(), exact(x.double())) < 1e-5
        assert len(result.a._dropped) == (change == "no bias")


UNCOUNTED = {
    "data": lambda bias: bias.data.mul_(3),
    "NumPy": lambda bias: bias.numpy().__imul__(3),
}


@pytest.mark.parametrize("write", UNCOUNTED)
def test_fused_biases_that_are_written_uncounted_need_refresh(write):
    m, x = Chain(), picture()
    result = fused(m, x, wide=ALL)
    exact = copy.deepcopy(m).double()
    with torch.no_grad():
        before = result(x)
        for layer in (result.a, exact.a):
            UNCOUNTED[write](layer.bias.detach())
        assert torch.equal(result(x), before)
        fastconv.refresh(result)
        assert relative_error(result(x).double(), exact(x.double())) < 1e-5


def test_fused_parameters_of_inference_mode():
    """PyTorch does not count what is written into these."""
    with torch.inference_mode():
        m, x = Chain(), picture()
        result, exact = fused(m, x, wide=ALL), copy.deepcopy(m).double()
        for layer in (result.a, exact.a):
            layer.bias.mul_(3)
        for _ in range(2):
            assert relative_error(result(x).double(), exact(x.double())) < 1e-5


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_fused_biases_that_are_wide_enough(mode):
    """A wide layer's bias is its own where its filters have more channels, and no more of them: another bias of the
    layer's is not written into the one before. Of a model made in inference mode it can be written outside of it."""
    with mode():
        m, x = copy.deepcopy(Narrow()), picture()  # whose parameters are tensors of the mode
        result = fused(m, x, wide={"first", "a"})
        before = result.a.bias
        kept = before.clone()
        result.a.bias = nn.Parameter(before + 1, requires_grad=False)
        m.norm.bias = nn.Parameter(m.norm.bias + 1, requires_grad=False)
        assert relative_error(result(x).double(), copy.deepcopy(m).double()(x.double())) < 1e-5
    assert torch.equal(before, kept)


@pytest.mark.skipif(not torch.cuda.is_available(), reason=f"test_fused_parameters_in_a_graph: {NO_GPU}")
def test_fused_parameters_in_a_graph():
    """A captured graph follows what is written into the memory that it reads."""
    m, x = Chain().cuda(), picture().cuda()
    result = fused(m, x, wide=ALL)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        with torch.cuda.graph(graph):
            y = result(x)
        for change in (lambda layer: layer.bias.mul_(3), CHANGED["new weight.data"]):
            for layer in (result.a, m.a):
                change(layer)
            result(x)
            graph.replay()
            assert relative_error(y.double(), copy.deepcopy(m).double()(x.double())) < 1e-5


def test_fused_layers_that_were_altered_since():
    x = picture()
    for change in (
        lambda layer: hooked(layer),
        lambda layer: layer.weight.requires_grad_(),
        lambda layer: setattr(layer, "forward", layer.forward),
    ):
        m = Chain()
        result = fused(m, x, wide=ALL)
        change(result.a)
        with torch.no_grad():
            assert relative_error(result(x).double(), copy.deepcopy(m).double()(x.double())) < 1e-5
    result.set_submodule("a", nn.Sequential(m.a, m.relu))
    with torch.no_grad():
        assert relative_error(result(x).double(), copy.deepcopy(m).double()(x.double())) < 1e-5
