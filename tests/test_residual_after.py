"""A residual behind the activation, act(conv + bias) + residual: kernels, operators, layers, `fuse` and the rewrites.

`test_algorithms`, `test_ops`, `test_measured` and `test_integrations` have it among their epilogues.
"""

import copy
import itertools
import pickle
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from fusing import Function, check, codes, fuse_quietly, norm, parts, sequence
from harness import (
    ALGORITHMS,
    CLASSES,
    DEVICES,
    LAYOUTS,
    OWN,
    Epilogue,
    activated,
    make_case,
    shared,
    supported,
    yardstick,
)
from harness import conv2d as run
from layers import relative_error
from rewriting import check as check_rewritten
from shapes import SMALL, Shape
from test_activations import ACTIVATIONS, SHAPES, SPECIAL, assert_same
from torch import Tensor, nn
from torch.library import opcheck

import fastconv
from fastconv import _C, FusedConv2d, ops, reference, tuning
from fastconv.models.yolov3 import Residual
from fastconv.ops import autograd
from fastconv.rewrites import Asked
from fastconv.testing import errors, poisoned_memory

pytestmark = pytest.mark.usefixtures("full_precision")
AFTER = [
    Epilogue(bias=True, residual=True, activation="leaky_relu", negative_slope=0.1, residual_after=True),
    Epilogue(residual=True, activation="relu", residual_after=True),
    Epilogue(residual=True, activation="silu", residual_after=True),
    Epilogue(bias=True, residual=True, activation="relu6", residual_after=True),
]


# --- Kernels


@pytest.mark.parametrize("algorithm", OWN)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_shapes(algorithm, layout, cls, device):
    """Every way to store an output, odd sizes among them; the activations take turns."""
    if cls not in ALGORITHMS[algorithm]["accuracy"]:
        pytest.skip(f"{algorithm} does not offer class {cls}")
    step = 4 if device == "cpu" else 1
    wrong = []
    with poisoned_memory():
        for i, shape in enumerate(shared(algorithm, SMALL[::step], cls, layout, device)):
            case = make_case(shape, cls, layout, device, AFTER[i % len(AFTER)])
            found = yardstick(case, cls).violations(run(case, algorithm, cls), algorithm, cls)
            wrong += [f"{shape} {case.epilogue}: {text}" for text in found]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cls", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("algorithm", OWN)
def test_special_values(algorithm, cls, device):
    """The bias is what is activated, the residual what is added: of infinities, NaN and zeros the sum is PyTorch's."""
    dtype, precision = CLASSES[cls]
    shapes = supported(algorithm, SHAPES, cls, "nchw", device)
    for shape, format, (activation, slope) in itertools.product(shapes, LAYOUTS.values(), ACTIVATIONS):
        bias = torch.tensor(SPECIAL + SPECIAL)[: shape.k].to(device, dtype)
        values = torch.tensor(SPECIAL).repeat(shape.k * shape.p * shape.q // len(SPECIAL) + 1)
        residual = values[: shape.k * shape.p * shape.q].view(1, shape.k, shape.p, shape.q).to(device, dtype)
        x = torch.zeros(shape.n, shape.c, shape.h, shape.w, dtype=dtype, device=device).to(memory_format=format)
        w = torch.ones(shape.k, shape.c // shape.groups, shape.r, shape.s, dtype=dtype, device=device)
        y = autograd.conv2d(
            x, w, bias, residual.contiguous(memory_format=format), [1, 1], list(shape.padding), [1, 1], shape.groups,
            algorithm, precision, activation, slope, 4, None, None, True,
        )  # fmt: skip
        arriving = (bias.float() + 0.0)[None, :, None, None]
        expected = (activated(arriving, activation, slope) + residual.float()).to(dtype)
        assert_same(y, expected, activation, f"{shape} {activation} {slope} {format}", arriving)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cls", ["fp32", "tf32"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("largest", [2.0**-90, 2.0**40], ids=["small", "one large pixel"])
def test_it_comes_where_scales_are_rare(largest, layout, cls, device):
    """Ends of a tile that are for all scales, and tiles that are computed again because one did not fit them: what has
    been fetched of the residual beforehand is not lost, nor taken for that of the next tile."""
    shapes = [
        Shape(2, 64, 28, 28, 256, 1, 1),
        Shape(2, 64, 27, 27, 120, 1, 1),
        Shape(2, 64, 28, 28, 128, 3, 3, padding=(1, 1)),
    ][:: 3 if device == "cpu" else 1]
    for shape, epilogue in itertools.product(shapes, [Epilogue(bias=True, residual=True), AFTER[0], AFTER[2]]):
        case = make_case(shape, cls, layout, device, epilogue, scale=min(largest, 1.0))
        if largest > 1.0:
            case.input[1, :, 13, 7] *= largest
        else:
            for values in (case.bias, case.residual):
                if values is not None:
                    values.mul_(largest)
        bare = run(replace(case, residual=torch.zeros_like(case.residual)), "implicit_gemm", cls)
        assert torch.equal(run(case, "implicit_gemm", cls), bare + case.residual), f"{shape} {epilogue}"


# --- The planner


def test_without_an_activation_there_is_one_problem():
    sizes = {"n": 2, "c": 8, "h": 7, "w": 5, "k": 8, "r": 3, "s": 3, "residual": True}
    before, after = (_C.ConvProblem(**sizes, residual_after=flag) for flag in (False, True))
    assert before == after
    assert hash(before) == hash(after)
    before, after = (_C.ConvProblem(**sizes, residual_after=flag, activation="silu") for flag in (False, True))
    assert before != after
    assert repr(before).endswith(" + residual + silu")
    assert repr(after).endswith(" + silu + residual")
    none = _C.ConvProblem(**sizes | {"residual": False}, residual_after=True, activation="silu")
    assert repr(none).endswith("fp32 + silu")


def test_explain_knows_it():
    def costs(**epilogue):
        return [row.cost_us for row in fastconv.explain((2, 8, 9, 9), (8, 8, 3, 3), **epilogue).rows]

    both = {"residual": True, "activation": "relu"}
    assert costs(**both, residual_after=True) == costs(**both)


# --- The operators


def tensors(dtype=torch.float32, requires_grad=True):
    sizes = (2, 4, 7, 5), (6, 2, 3, 3), (6,), (2, 6, 4, 7)
    return [torch.randn(size, dtype=dtype, requires_grad=requires_grad) for size in sizes]


GEOMETRY = ([2, 1], [1, 2], [1, 1], 2)


@pytest.mark.parametrize(("activation", "slope"), [("leaky_relu", 0.1), ("silu", 0.0), ("none", 0.0)])
def test_opcheck(activation, slope):
    x, w, bias, residual = tensors()
    arguments = (bias, residual, *GEOMETRY)
    results = opcheck(
        ops.conv2d_op,
        (x, w, *arguments, "auto", "fp32", activation, slope, 4, None, None, True),
        raise_exception=False,
    )
    assert all(result == "SUCCESS" for result in results.values()), results
    packed = ops.pack_weight(w, 2, "implicit_gemm", "fp32")
    results = opcheck(
        ops.conv2d_packed_op,
        (x, packed, w.shape, *arguments, False, "implicit_gemm", "fp32", activation, slope, True),
        raise_exception=False,
    )
    assert all(result == "SUCCESS" for result in results.values()), results


@pytest.mark.parametrize("wanted", [(0, 1, 2, 3), (0,), (2,), (3,), (1, 3)])
@pytest.mark.parametrize(("activation", "slope"), [("relu", 0.0), ("leaky_relu", 0.1), ("silu", 0.0)])
def test_gradients_of_the_operators(activation, slope, wanted):
    """A graph may call them where a gradient is asked for. The residual's is the output's."""
    given = tensors(torch.float64)
    inputs = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(given)]
    expected = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(given)]
    y = autograd.conv2d(*inputs, *GEOMETRY, "auto", "fp32", activation, slope, 4, None, None, True)
    exact = reference.conv2d(
        *expected[:3], *GEOMETRY, residual=expected[3], activation=activation, negative_slope=slope, residual_after=True
    )
    cotangent = torch.randn_like(exact)
    asked, exactly = ([ts[i] for i in wanted] for ts in (inputs, expected))
    found = torch.autograd.grad(y, asked, cotangent)
    for f, e in zip(found, torch.autograd.grad(exact, exactly, cotangent), strict=True):
        torch.testing.assert_close(f, e, rtol=1e-10, atol=1e-10)
    if wanted == (3,):
        assert torch.equal(found[0], cotangent)


def test_gradients_of_a_packed_weight():
    x, w, bias, residual = tensors()
    packed = ops.pack_weight(w, 2, "implicit_gemm", "fp32")
    y = autograd.conv2d_packed(
        x, packed, w.shape, bias, residual, *GEOMETRY, False, "implicit_gemm", "fp32", "leaky_relu", 0.1, True
    )
    doubles = [t.detach().double().requires_grad_() for t in (x, bias, residual)]
    exact = reference.conv2d(
        doubles[0], w.detach(), doubles[1], *GEOMETRY, residual=doubles[2], activation="leaky_relu",
        negative_slope=0.1, residual_after=True,
    )  # fmt: skip
    cotangent = torch.randn_like(y)
    found = torch.autograd.grad(y, (x, bias, residual), cotangent)
    for f, e in zip(found, torch.autograd.grad(exact, doubles, cotangent.double()), strict=True):
        assert errors(f, e).relative_l2 < 1e-5


def test_what_is_trained_computes_its_convolution_once():
    """PyTorch adds the residual where the activation's gradient needs its value, so that nothing is computed again."""
    x, w, bias, residual = tensors()
    for tensor in (x, w):  # whose gradients are convolutions
        tensor.requires_grad_(False)

    def convolutions(function):
        with torch.profiler.profile() as profile:
            function()
        return sum(event.count for event in profile.key_averages() if event.key == "fastconv::conv2d")

    def forward():
        return fastconv.conv2d(
            x, w, bias, *GEOMETRY, residual=residual, activation="relu", residual_after=True, algorithm="direct"
        )

    y = forward()
    assert convolutions(lambda: torch.autograd.grad(y, (residual, bias), torch.ones_like(y))) == 0
    bias.requires_grad_(False)
    assert torch.equal(torch.autograd.grad(forward().sum(), residual)[0], torch.ones_like(residual))


@pytest.mark.parametrize("grouped", [False, True])
def test_vmap(grouped):
    """A bias for each example is added before the activation, wherever the residual is."""
    x, w, bias, residual = tensors(requires_grad=False)
    biases, residuals = torch.randn(3, *bias.shape), torch.randn(3, *residual.shape)
    filters = torch.randn(3, *w.shape) if grouped else w
    epilogue = {"activation": "relu", "residual_after": True}

    def call(w, bias, residual):
        return fastconv.conv2d(x, w, bias, *GEOMETRY, residual=residual, **epilogue, precision="fp32")

    for in_dims in ((0 if grouped else None, 0, 0), (0 if grouped else None, 0, None)):
        given = (filters, biases, residuals if in_dims[2] == 0 else residual)
        pick = [[t if d is None else t[i] for t, d in zip(given, in_dims, strict=True)] for i in range(3)]
        expected = torch.stack([reference.conv2d(x, a, b, *GEOMETRY, residual=r, **epilogue) for a, b, r in pick])
        assert errors(torch.vmap(call, in_dims)(*given), expected).relative_l2 < 1e-5
    packed = ops.pack_weight(w, 2, "direct", "fp32")

    def call_packed(bias, residual):
        return autograd.conv2d_packed(
            x, packed, w.shape, bias, residual, *GEOMETRY, False, "direct", "fp32", "relu", 0.0, True
        )

    expected = [
        reference.conv2d(x, w, b, *GEOMETRY, residual=r, **epilogue) for b, r in zip(biases, residuals, strict=True)
    ]
    assert errors(torch.vmap(call_packed)(biases, residuals), torch.stack(expected)).relative_l2 < 1e-5


@pytest.mark.parametrize("algorithm", ["auto", "torch", "winograd_f2"])
def test_the_function_again_and_again(algorithm):
    """The second call with a weight takes another way than the first; one order of sums is another layer's than the
    other's."""
    x, w, residual = torch.randn(2, 8, 9, 9), torch.randn(8, 8, 3, 3), torch.randn(2, 8, 9, 9)
    for after in (True, False, True, True, False):
        asked = {"padding": 1, "residual": residual, "activation": "leaky_relu", "residual_after": after}
        y = fastconv.conv2d(x, w, algorithm=algorithm, precision="fp32", negative_slope=0.3, **asked)
        assert errors(y, reference.conv2d(x, w, negative_slope=0.3, **asked)).relative_l2 < 1e-5


@pytest.mark.parametrize("trained", [False, True])
def test_autocast_and_refusals(trained):
    x, w, bias, residual = tensors(requires_grad=trained)
    asked = {"residual": residual, "activation": "relu", "residual_after": True}
    with torch.autocast("cpu", torch.bfloat16):
        y = fastconv.conv2d(x, w, bias, *GEOMETRY, **asked)
    assert y.dtype == torch.bfloat16
    assert errors(y, reference.conv2d(x, w, bias, *GEOMETRY, **asked)).relative_l2 < 2e-2
    for wrong in (residual[..., :1], residual.double()):
        with pytest.raises(RuntimeError, match="residual"):
            fastconv.conv2d(x, w, bias, *GEOMETRY, **asked | {"residual": wrong})
    with pytest.raises(TypeError, match="residual_after is 1; expected a bool"):
        fastconv.conv2d(x, w, bias, *GEOMETRY, **asked | {"residual_after": 1})


# --- Layers, fuse


def test_a_layer_takes_residuals_of_any_shape_in_turn():
    layer = FusedConv2d(8, 8, 3, padding=1, activation="relu", algorithm="winograd_f2", residual_after=True)
    assert "residual_after=True" in repr(layer)
    x = torch.randn(2, 8, 9, 9)
    with torch.no_grad():
        y = F.relu(nn.Conv2d.forward(layer, x))
        assert relative_error(layer(x), y) < 1e-5
        for shape in ((2, 8, 9, 9), (8, 1, 1), (2, 8, 9, 9), (1, 1, 1, 9), ()):
            residual = torch.randn(shape)
            assert relative_error(layer(x, residual), y + residual) < 1e-5
    residual = torch.randn(2, 8, 9, 9)
    assert relative_error(layer(x, residual), y + residual) < 1e-5  # with a gradient to record


def test_a_layer_that_was_pickled_before():
    layer = FusedConv2d(8, 8, 3, padding=1, activation="relu")
    del layer.__dict__["residual_after"]  # as it was
    again = pickle.loads(pickle.dumps(layer))
    x, residual = torch.randn(1, 8, 5, 5), torch.randn(1, 8, 5, 5)
    with torch.no_grad():
        expected = F.relu(F.conv2d(x, layer.weight, layer.bias, padding=1) + residual)
        assert relative_error(again(x, residual), expected) < 1e-5


def shortcuts():
    """A block of YOLOv3 and what surrounds it: the first sum's other value is an activation that others read, too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.LeakyReLU(0.1, inplace=True), Residual(8), Residual(8)).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.load_state_dict(norm(module.num_features).state_dict())
    return model


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fuse_takes_a_shortcut(layout, device):
    model = shortcuts().to(device, memory_format=LAYOUTS[layout])
    x = torch.randn(2, 3, 13, 11, device=device).to(memory_format=LAYOUTS[layout])
    fused = check(model, x, strict=True)
    one, two = "conv+bn+leaky_relu", "conv+bn+leaky_relu+residual"
    assert sorted(parts(fused)) == [one, one, two, two, "conv+leaky_relu"]
    assert len(list(fused.graph.nodes)) == 5 + 2  # and the input and the output
    found = tuning.record(pickle.loads(pickle.dumps(fused)), x)
    assert sorted(convolution.residual_after for convolution in found.elements()) == [False] * 3 + [True] * 2
    with torch.no_grad():
        y = copy.deepcopy(fused)(x)
        assert torch.equal(y, fused(x))


def in_place(a: Tensor, b: Tensor) -> Tensor:
    a += b
    return a


@pytest.mark.parametrize("add", [torch.add, lambda a, b: b + a, lambda a, b: a.add_(b), in_place])
def test_fuse_takes_sums_of_every_kind(add):
    fused = check(Function(lambda self, x: add(F.relu(self.norm(self.conv(x))), x)), torch.randn(2, 6, 5, 8))
    assert (parts(fused), codes(fused)) == (["conv+bn+relu+residual"], [""])


def test_fuse_adds_what_must_be_broadcast():
    fused = check(Function(lambda self, x: F.silu(self.conv(x)) + x[:1, :, :1, :1]), torch.randn(2, 6, 5, 8))
    assert parts(fused) == ["conv+silu+residual"]


class Two(nn.Module):
    def __init__(self, forward) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(4, 6, 1)
        self.function = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.a(x), self.b(x), x)


# What two convolutions become: of two that could take a sum, one that can take
# the activation behind it, too.
TWO = {
    "both activated": (lambda a, b, x: F.relu(a) + F.silu(b), ["conv+relu", "conv+silu+residual"]),
    "one activated": (lambda a, b, x: F.relu(a) + b, ["conv+relu", "conv+residual"]),
    "the other": (lambda a, b, x: a + F.relu(b), ["conv+residual", "conv+relu"]),
    "the sum is activated": (lambda a, b, x: F.relu(a + F.relu(b)), ["conv+residual+relu", "conv+relu"]),
    "read twice": (lambda a, b, x: (y := F.relu(b)) + F.relu(a) * y.sin(), ["conv+relu", "conv+relu"]),
    "activated twice": (lambda a, b, x: F.relu(F.silu(a)) + F.relu6(b), ["conv+silu", "conv+relu6+residual"]),
}


@pytest.mark.parametrize("name", TWO)
@pytest.mark.parametrize("front", ["fuse", "compile"])
def test_of_two_that_are_added_one_takes_the_sum(front, name):
    forward, expected = TWO[name]
    x = torch.randn(2, 4, 7, 5)
    if front == "fuse":
        assert parts(check(Two(forward), x)) == expected
    else:
        assert sorted(check_rewritten(Two(forward), x).parts) == sorted(expected)


def test_the_reason_why_a_sum_stays_apart():
    fused = fuse_quietly(Function(lambda self, x: (y := F.relu(self.conv(x))) + x * y))
    assert (parts(fused), codes(fused)) == (["conv+relu"], ["users"])
    with pytest.raises(fastconv.UnsupportedError, match="2 operations read"):
        fastconv.fuse(Function(lambda self, x: (y := F.relu(self.conv(x))) + x * y).eval(), strict=True)


# --- Rewrites


@pytest.mark.parametrize("asked", [Asked(algorithm="implicit_gemm"), Asked(algorithm="torch"),
                                   Asked(algorithm="winograd_f2", packed=True)])  # fmt: skip
def test_rewrites_take_a_shortcut(asked):
    model = shortcuts() if asked.algorithm != "winograd_f2" else sequence(*(shortcuts()[i] for i in (2, 3)))
    x = torch.randn(2, 3 if asked.algorithm != "winograd_f2" else 8, 13, 11)
    backend = check_rewritten(model, x, asked)
    assert backend.parts.count("conv+bn+leaky_relu+residual") == 2
    assert backend.parts.count("conv+bn+leaky_relu") == 2
    sums = backend.count(torch.ops.aten.add.Tensor)
    own = asked.algorithm == "implicit_gemm"
    assert backend.count(ops.conv2d_op) == (5 if own else 0)
    assert not own or sums == 4 * 2  # the norms' foldings: epsilon and shift


def test_rewritten_gradients():
    """In training the gradient reads the activation's value, which so stays a value of the graph."""
    model = sequence(Function(lambda m, x: F.leaky_relu(m.conv(x), 0.1) + x), nn.Conv2d(6, 6, 1))
    exact = copy.deepcopy(model).double()
    x = torch.randn(2, 6, 7, 9)
    y, y64 = torch.compile(model, backend="fastconv")(x), exact(x.double())
    found = torch.autograd.grad(y.sum(), list(model[0].conv.parameters()))
    expected = torch.autograd.grad(y64.sum(), list(exact[0].conv.parameters()))
    assert relative_error(y.double(), y64) < 1e-5
    for f, e in zip(found, expected, strict=True):
        assert relative_error(f.double(), e) < 1e-5
