"""The operator `group_norm`, and the group norms that `fastconv.compile` makes of it."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import LAYOUTS, hostile
from layers import DEVICES, NO_GPU
from rewriting import check, compiled, on_a_gpu
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.library import opcheck

import fastconv
from fastconv import _C, ops
from fastconv.testing import poisoned_memory

pytestmark = pytest.mark.usefixtures("full_precision")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ACTIVATIONS: dict[str, Any] = {"none": lambda y: y, "relu": F.relu, "relu6": F.relu6, "silu": F.silu}
# N, C, H, W and groups. Groups of a part of an access, of several, across them; one group, one channel each; few pixels
# and one; more than a block's accesses to a pixel; pixels that no chunks and rows divide; fewer than a cluster's.
# On Hopper clusters take what fits our kernels, but for the last four: images too large, groups of too many channels.
CASES = [
    ((2, 64, 13, 14), 32), ((1, 320, 9, 7), 32), ((3, 40, 5, 5), 8), ((2, 24, 17, 3), 1), ((1, 16, 40, 41), 16),
    ((2, 8, 1, 1), 2), ((1, 2560, 4, 5), 32), ((1, 4096, 2, 3), 64), ((5, 128, 67, 31), 32), ((1, 96, 1, 700), 3),
    ((1, 6, 9, 8), 3), ((1, 4104, 2, 2), 8), ((7, 48, 1, 5), 3), ((2, 1280, 3, 7), 32), ((300, 64, 2, 1), 8),
    ((1, 4096, 2, 3), 1), ((2, 2560, 5, 4), 1), ((1, 40, 145, 144), 4), ((1, 64, 130, 131), 1),
]  # fmt: skip
# Of diffusion models; the last one for three kernels.
IMAGES = [
    (1, 512, 64, 64), (2, 1280, 16, 16), (2, 640, 32, 32), (2, 320, 64, 64), (2, 1920, 32, 32), (1, 512, 128, 128),
    (1, 128, 256, 256),
]  # fmt: skip


def error_bound(x: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """Of each value of a norm without weights: some units in the last place of its group's largest value over the
    standard deviation (the mean is rounded, and so is the deviation from it), and one rounding of the result."""
    grouped = x.double().flatten(2).unflatten(1, (groups, -1)).flatten(2)
    spread = (grouped.var(-1, correction=0) + 1e-5).sqrt()
    largest = (grouped - grouped.mean(-1, keepdim=True)).abs().amax(-1) / spread
    unit = 2.0**-24
    rounding = torch.finfo(dtype).eps if dtype != torch.float32 else 0.0
    bound = 8 * unit * (1 + grouped.abs().amax(-1) / spread + largest) + rounding * (1 + largest)
    return bound.repeat_interleave(x.shape[1] // groups, 1)[:, :, None, None]


@pytest.mark.sanitize
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("sizes", "groups"), CASES)
def test_it_is_the_norm(sizes: tuple[int, ...], groups: int, layout: str, dtype: torch.dtype, device: str) -> None:
    """Against float64, whatever surrounds the input; by our kernels far from zero as well, where the sums of squares of
    PyTorch's for the CPU cancel."""
    ours = device == "cuda" and layout == "nhwc"
    generator = torch.Generator().manual_seed(sum(sizes))
    far = 100.0 if dtype == torch.float32 else 4.0
    ranges = (1.0, 0.0), (3.0, far * ours), (1e-3, 0.0)
    for scale, offset in ranges if device == "cuda" else ranges[1:2]:
        x = (torch.randn(sizes, generator=generator) * scale + offset).to(dtype)
        weight, bias = ((torch.randn(sizes[1], generator=generator) + 1).to(dtype) for _ in range(2))
        bound = error_bound(x, groups, dtype) * (weight.double().abs().amax() + bias.double().abs().amax() + 1)
        for parameters in ((weight, bias), (weight, None), (None, None)):
            exact = F.group_norm(x.double(), groups, *(p if p is None else p.double() for p in parameters))
            for name, activation in ACTIVATIONS.items():
                given = hostile(x.to(device), layout)
                with poisoned_memory():
                    placed = [p if p is None else p.to(device) for p in parameters]
                    y = ops.call(ops.group_norm_op, given, *placed, groups, 1e-5, name)
                assert (y.shape, y.dtype) == (x.shape, dtype)
                assert ops.format_of(y) == ops.format_of(given)
                error = (y.cpu().double() - activation(exact)).abs()
                assert bool((error <= bound).all()), (scale, name, float((error / bound).max()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", IMAGES)
def test_images_of_diffusion_models(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(sum(sizes))
    x = (torch.randn(sizes, generator=generator) + 2).to(dtype)
    x[0, :, 0, 0] = 30.0  # a first value that is none of the others'
    weight, bias = ((torch.randn(sizes[1], generator=generator) + 1).to(dtype) for _ in range(2))
    bound = error_bound(x, 32, dtype) * (weight.double().abs().amax() + bias.double().abs().amax() + 1)
    exact = F.silu(F.group_norm(x.double(), 32, weight.double(), bias.double()))
    given = hostile(x.cuda(), "nhwc")
    with poisoned_memory():
        y = ops.group_norm_op(given, weight.cuda(), bias.cuda(), 32, 1e-5, "silu")
    error = (y.cpu().double() - exact).abs()
    assert bool((error <= bound).all()), float((error / bound).max())
    for _ in range(3):  # one after the other: each may begin beside the one before
        assert torch.equal(ops.group_norm_op(given, weight.cuda(), bias.cuda(), 32, 1e-5, "silu"), y)


@pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)
def test_it_waits_for_what_writes_its_input() -> None:
    """In a graph, where a launch may begin beside the one before: a chain of norms, each of the one before."""
    x = torch.randn(1, 64, 40, 40, device="cuda", dtype=torch.float16).to(memory_format=torch.channels_last)
    weight = torch.full((64,), 1.5, device="cuda", dtype=torch.float16)

    def chain(y: Tensor) -> Tensor:
        for _ in range(20):
            y = ops.group_norm_op(y + 0.5, weight, None, 8, 1e-5, "relu")
            y = ops.group_norm_op(y, weight, None, 16, 1e-5, "silu")
        return y

    expected = chain(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(x)
    for _ in range(5):
        y.zero_()
        graph.replay()
        assert torch.equal(y, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_not_finite_stays_in_its_group(device: str) -> None:
    x = torch.randn(2, 32, 9, 8).to(memory_format=torch.channels_last)
    expected = F.group_norm(x, 8)
    x[0, 5, 3, 3], x[1, 30, 0, 0] = math.inf, math.nan
    y = ops.group_norm_op(x.to(device), None, None, 8, 1e-5, "none").cpu()
    touched = torch.zeros(2, 8, dtype=torch.bool)
    touched[0, 1] = touched[1, 7] = True
    touched = touched.repeat_interleave(4, 1)[:, :, None, None].expand_as(y)
    assert not y[touched].isfinite().any()
    torch.testing.assert_close(y[~touched], expected[~touched])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("groups", [32, 1])
def test_it_is_deterministic(groups: int, device: str) -> None:
    x = torch.randn(1, 64, 150, 151, device=device).to(memory_format=torch.channels_last)
    first = ops.group_norm_op(x, None, None, groups, 1e-5, "silu")
    for _ in range(5):
        assert torch.equal(ops.group_norm_op(x, None, None, groups, 1e-5, "silu"), first)


def test_bad_arguments() -> None:
    x, weight = torch.randn(2, 6, 8, 9), torch.randn(6)
    good: dict[str, Any] = {
        "x": x, "weight": weight, "bias": None, "groups": 3, "epsilon": 1e-5, "activation": "none",
    }  # fmt: skip
    for changed, message in (
        ({"x": x[0]}, r"x has shape \[6, 8, 9\]; expected \[N, C, H, W\]"),
        ({"groups": 4}, r"groups is 4; expected a divisor of x's 6 channels"),
        ({"groups": 0}, r"groups is 0; expected a divisor"),
        ({"epsilon": -1.0}, r"epsilon is -1.0+; expected 0 or more"),
        ({"weight": weight[:5]}, r"weight has shape \[5\]; expected \[C\] = \[6\]"),
        ({"bias": weight.half()}, r"bias is float16; expected x's float32"),
        ({"activation": "leaky_relu"}, "activation is 'leaky_relu'; expected none, relu, relu6 or silu"),
        ({"activation": "gelu"}, "activation is 'gelu'"),
    ):
        with pytest.raises((RuntimeError, ValueError), match=message):
            ops.group_norm_op(*(good | changed).values())
    assert ops.group_norm_op(x[:0], weight, None, 3, 1e-5, "silu").shape == (0, 6, 8, 9)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_and_transforms(device: str) -> None:
    x, v = (torch.randn(2, 6, 5, 4, device=device).to(memory_format=torch.channels_last) for _ in range(2))
    weight, bias = torch.randn(6, device=device), torch.randn(6, device=device)

    def ours(x: Tensor, weight: Tensor = weight) -> Tensor:
        return ops.group_norm_op(x, weight, bias, 3, 1e-5, "silu")

    def theirs(x: Tensor, weight: Tensor = weight) -> Tensor:
        # Contiguous, here and in the last: PyTorch 2.11 transforms no other group norm.
        return F.silu(F.group_norm(x.contiguous(), 3, weight, bias))

    for transform in (
        lambda f: torch.func.grad(lambda x: (f(x) ** 2).sum())(x),
        lambda f: torch.func.vmap(f)(x.expand(4, *x.shape)),
        lambda f: torch.func.vmap(f, in_dims=1)(x.expand(4, *x.shape).transpose(0, 1)),
        lambda f: torch.func.vmap(lambda w: f(x, w))(torch.stack([weight, 2 * weight])),
        lambda f: torch.func.jvp(f, (x.contiguous(),), (v.contiguous(),))[1],
    ):
        torch.testing.assert_close(transform(ours), transform(theirs), rtol=1e-4, atol=1e-5)
    for leaf in (x.clone().requires_grad_(), x):
        opcheck(ops.group_norm_op, (leaf, weight, bias, 3, 1e-5, "silu"))


# --- The rewrite


class Block(nn.Module):
    """As of a decoder or a UNet."""

    def __init__(self, activation: Any = F.silu) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.Conv2d(16, 8, 3)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.activation(self.norm(self.first(x))))


def rewritten(model: nn.Module, dtype: torch.dtype = torch.float16, like: torch.dtype | None = None) -> fx.Graph:
    return on_a_gpu(model, (2, 8, 9, 10), dtype, like)


def norms(graph: fx.Graph) -> list[str]:
    """The activations behind the group norms of ours."""
    return [str(node.args[-1]) for node in graph.find_nodes(op="call_function", target=ops.group_norm_op)]


def test_the_planner_has_kernels_for_the_sizes_that_fit() -> None:
    h200, cpu = _C.h200_device(), _C.cpu_device(1)
    for size, dtype, device, expected in (
        ((1, 512, 64, 64), "float16", h200, True), ((1, 320, 64, 64), "bfloat16", h200, True),
        ((2, 12, 8, 8), "float32", h200, True), ((2, 12, 8, 8), "float16", h200, False),
        ((1, 8192, 8, 8), "float16", h200, False), ((1, 256, 2048, 2048), "float16", h200, True),
        ((1, 64, 8, 8), "other", h200, False), ((1, 64, 8, 8), "float32", cpu, False),
    ):  # fmt: skip
        assert _C.has_group_norm(*size, dtype, device) is expected, (size, dtype)


def test_compile_takes_it_with_its_activation() -> None:
    for activation, name in ((F.silu, "silu"), (F.relu, "relu"), (F.relu6, "relu6"), (nn.Identity(), "none")):
        assert norms(rewritten(Block(activation))) == [name]
    assert norms(rewritten(Block(F.leaky_relu))) == ["none"]
    assert norms(rewritten(Block(lambda y: F.silu(y) + y))) == ["none"]
    assert norms(rewritten(Block(lambda y: F.silu(y).to(memory_format=torch.contiguous_format)))) == ["silu"]
    assert norms(rewritten(Block(), torch.bfloat16)) == norms(rewritten(Block(), torch.float32)) == ["silu"]
    assert norms(rewritten(Block(), torch.bfloat16, like=torch.float32)) == []


def test_a_copy_to_nchw_before_it_goes_and_what_is_returned_keeps_its_format() -> None:
    """PyTorch's kernel for GPUs reads NCHW, and its operator may copy before it."""

    class Copied(Block):
        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.first(x).contiguous())

    class Returned(Copied):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(super().forward(x))

    clone = torch.ops.aten.clone.default
    inside = rewritten(Returned())
    assert norms(inside) == ["none"]
    assert not inside.find_nodes(op="call_function", target=clone)
    graph = rewritten(Copied())
    (norm,) = graph.find_nodes(op="call_function", target=ops.group_norm_op)
    assert ops.format_of(norm.meta["val"]) == torch.channels_last
    ((y,),) = (graph.output_node().all_input_nodes,)
    assert ops.format_of(y.meta["val"]) == ops.format_of(eager_norm()), y.target


def eager_norm() -> Tensor:
    """What PyTorch's group norm of a contiguous value is on a GPU, as a fake tensor."""
    with FakeTensorMode(), torch.device("cuda"):
        return F.group_norm(torch.empty(2, 16, 9, 10), 4)


def test_a_factor_of_one_is_no_pass_over_memory() -> None:
    class Scaled(Block):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = factor

        def forward(self, x: Tensor) -> Tensor:
            y = (self.first(x) + F.relu(self.first(x))) / self.factor
            return self.second(F.silu(self.norm(y)) * self.factor) / self.factor

    for factor, divisions in ((1.0, 0), (2.0, 2)):
        graph = rewritten(Scaled(factor))
        assert norms(graph) == ["silu"]
        assert len(graph.find_nodes(op="call_function", target=torch.ops.aten.div.Tensor)) == divisions
    x = torch.randn(2, 8, 9, 10)
    check(Scaled(1.0), x)
    check(Scaled(2.0), x)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_left_to_inductor(device: str) -> None:
    """On a CPU every norm; on a GPU one in another layout, and one that records a gradient."""
    x = torch.randn(2, 8, 9, 10, device=device)
    backend = check(Block().to(device), x, limit=1e-5)
    assert backend.count(ops.group_norm_op) == 0
    model = Block().to(device).to(memory_format=torch.channels_last)
    function, backend = compiled(model)
    function(x.to(memory_format=torch.channels_last)).sum().backward()
    assert backend.count(ops.group_norm_op) == 0
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_what_is_returned_has_the_format_of_eager_mode(format: torch.memory_format, device: str) -> None:
    """On a CPU the input's, on a GPU none but NCHW."""
    model = nn.Sequential(nn.Conv2d(5, 5, 3), nn.GroupNorm(1, 5)).to(device).to(memory_format=format).eval()
    x = torch.randn(2, 5, 9, 10, device=device).to(memory_format=format)
    with torch.no_grad():
        assert compiled(model)[0](x).stride() == model(x).stride()


@pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_compiled_block(frozen: bool, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    model = Block().cuda().to(dtype=dtype).to(memory_format=torch.channels_last).eval()
    x = torch.randn(2, 8, 33, 35, device="cuda", dtype=dtype).to(memory_format=torch.channels_last)
    compiled_model = fastconv.compile(model, "fp32", frozen=frozen)
    with torch.no_grad(), torch.compiler.config.patch(force_disable_caches=True):  # cached code has no report
        y, exact = compiled_model(x), model.double()(x.double())
    assert compiled_model.report.group_norms == 1
    assert "group norms: 1 ours" in str(compiled_model.report)
    error = (y.double() - exact).norm() / exact.norm()
    assert float(error) < 4 * torch.finfo(dtype).eps
