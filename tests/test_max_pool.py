"""A 2x2 max-pool behind the activation: kernels, planner, operators, layers, `fuse` and the rewrites.

`test_measured`, `test_planner` and `test_integrations` have it among their epilogues.
"""

import math
import pickle
from dataclasses import replace

import pytest
import torch
import torch._inductor.lowering  # a decomposition of PyTorch's needs it
import torch.nn.functional as F
from fusing import Function, check, codes, parts, sequence
from harness import (
    ALGORITHMS,
    CLASSES,
    DEVICES,
    LAYOUTS,
    OWN,
    Epilogue,
    hostile,
    make_case,
    shared,
    supported,
    yardstick,
)
from harness import conv2d as run
from layers import relative_error
from rewriting import OURS, compiled
from rewriting import check as check_rewritten
from shapes import SMALL, Shape
from torch import nn
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import fastconv
from fastconv import _C, FusedConv2d, ops, reference, tuning
from fastconv.ops import autograd
from fastconv.rewrites import Asked
from fastconv.testing import errors, poisoned_memory

pytestmark = pytest.mark.usefixtures("full_precision")
INSIDE = ["winograd_f2", "winograd_f4"]  # whose kernels pool
POOLED = [
    Epilogue(max_pool=True),
    Epilogue(bias=True, activation="relu", max_pool=True),
    Epilogue(activation="silu", max_pool=True),
    Epilogue(bias=True, activation="leaky_relu", negative_slope=-0.3, max_pool=True),  # not monotonous, as SiLU
    Epilogue(bias=True, activation="relu6", max_pool=True),
]
# Odd sizes, one channel, one filter, the smallest output, vectors of filters and none.
TILES = [
    Shape(1, 1, 2, 2, 1, 3, 3, padding=(1, 1)),
    Shape(3, 5, 9, 6, 3, 3, 3),
    Shape(2, 8, 17, 4, 34, 3, 3, padding=(2, 0)),
    Shape(5, 67, 6, 13, 19, 3, 3, padding=(1, 1)),
    Shape(3, 33, 12, 11, 33, 1, 1, groups=33),
]
CHUNKS = Shape(2, 64, 51, 47, 40, 3, 3, padding=(1, 1))  # of tiles, several on a CPU


# --- Kernels


@pytest.mark.parametrize("algorithm", OWN)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_shapes(algorithm, layout, cls, device):
    if cls not in ALGORITHMS[algorithm]["accuracy"]:
        pytest.skip(f"{algorithm} does not offer class {cls}")
    step = 1 if device == "cuda" else 3 if algorithm in INSIDE else 9
    shapes = [shape for shape in SMALL[::step] + TILES if min(shape.p, shape.q) >= 2]
    shapes += [CHUNKS] * (algorithm in INSIDE)
    wrong = []
    with poisoned_memory():
        for i, shape in enumerate(shared(algorithm, shapes, cls, layout, device)):
            case = make_case(shape, cls, layout, device, POOLED[i % len(POOLED)])
            output = run(case, algorithm, cls)
            assert output.shape == (shape.n, shape.k, shape.p // 2, shape.q // 2)
            if not all(case.input.is_contiguous(memory_format=its) for its in LAYOUTS.values()):  # of one channel, say
                assert output.is_contiguous(memory_format=LAYOUTS[layout])
            found = yardstick(case, cls).violations(output, algorithm, cls)
            wrong += [f"{shape} {case.epilogue}: {text}" for text in found]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cls", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_not_finite(algorithm, cls, device):
    """NaN is larger than all else, an infinity than what is finite: of what the algorithm makes of infinities and NaN
    in the input and in the bias, the pool is PyTorch's."""
    shapes = [
        Shape(2, 5, 11, 14, 11, 3, 3, padding=(1, 1)),
        Shape(2, 5, 11, 14, 16, 1, 1),
        Shape(2, 11, 11, 14, 11, 1, 1, groups=11),
    ]
    taken = shapes if algorithm == "torch" else supported(algorithm, shapes, cls, "nchw", device)
    special = torch.tensor([-math.inf, -2.0, -0.0, 0.0, 5.5, math.inf, math.nan, 7.0, 1.0, -1.0, 0.5])
    for i, shape in enumerate(taken):
        for layout in LAYOUTS:
            case = make_case(shape, cls, layout, device, POOLED[(3 * i + 1) % len(POOLED)])
            x = case.input.clone()
            x[0, 0, 2, 3], x[0, 1, 7, 9], x[1, 2, 10, 13] = math.nan, math.inf, -math.inf
            bias = special.repeat(2)[: shape.k].to(case.input.dtype).to(device)
            case = replace(case, input=hostile(x, layout), bias=bias)
            y = run(case, algorithm, cls)
            unpooled = run(replace(case, epilogue=replace(case.epilogue, max_pool=False)), algorithm, cls)
            tolerance = 16 * torch.finfo(y.dtype).eps
            what = f"{shape} {layout} {case.epilogue}"
            assert unpooled.isnan().any() and unpooled.isfinite().any(), what  # noqa: PT018
            torch.testing.assert_close(
                y, F.max_pool2d(unpooled, 2), rtol=tolerance, atol=tolerance, equal_nan=True, msg=what
            )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_empty_batch(algorithm):
    weight, groups = (torch.randn(4, 1, 1, 1), 4) if algorithm == "null" else (torch.randn(4, 4, 3, 3), 1)
    asked = {"groups": groups, "algorithm": algorithm, "max_pool": True}
    for _ in range(2):
        y = fastconv.conv2d(torch.randn(0, 4, 9, 8), weight, **asked)
        assert y.shape == (0, 4, 4 if groups == 4 else 3, 4 if groups == 4 else 3)


# --- The planner


def test_the_problem():
    sizes = {"n": 2, "c": 8, "h": 7, "w": 5, "k": 8, "r": 3, "s": 3, "activation": "relu"}
    plain, pooled = (_C.ConvProblem(**sizes, max_pool=flag) for flag in (False, True))
    assert plain != pooled
    assert pooled == _C.ConvProblem(**sizes, max_pool=True)
    assert hash(pooled) == hash(_C.ConvProblem(**sizes, max_pool=True))
    assert repr(pooled) == repr(plain) + " + max_pool"
    assert (pooled.p, pooled.q) == (plain.p, plain.q) == (5, 3)
    assert plain.compulsory_bytes - pooled.compulsory_bytes == 4 * 2 * 8 * (5 * 3 - 2 * 1)
    with pytest.raises(ValueError, match="expected no residual"):
        _C.ConvProblem(**sizes, residual=True, max_pool=True)
    with pytest.raises(ValueError, match="at least"):
        _C.ConvProblem(**sizes | {"w": 3}, max_pool=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("device", [_C.h200_device(), _C.cpu_device(4)], ids=["h200", "cpu"])
def test_costs(device, layout):
    """Kernels that pool write a quarter; behind others it is a pass, which costs what it moves."""
    sizes = {"n": 8, "c": 64, "h": 56, "w": 57, "k": 64, "r": 3, "s": 3, "padding": (1, 1), "layout": layout}
    device.has_kernels = True
    plain, pooled = (
        {row["algorithm"]: row for row in _C.candidates(_C.ConvProblem(**sizes, max_pool=flag), device)}
        for flag in (False, True)
    )
    for name, row in pooled.items():
        assert row["ok"] == plain[name]["ok"]
        if not row["ok"]:
            continue
        added = row["cost_us"] - plain[name]["cost_us"]
        assert row["pools_apart"] == (name not in INSIDE)
        assert row["packed_bytes"] == plain[name]["packed_bytes"]
        if name in INSIDE:
            assert added < 0
        else:
            moved = 4 * 8 * 64 * (56 * 57 + 28 * 28)
            assert added > 1e6 * moved / device.bandwidth_bytes_per_s
            assert row["config"] == plain[name]["config"] + ", then max-pool"


def test_explain_and_last_call():
    explained = fastconv.explain((2, 8, 9, 9), (8, 8, 3, 3), max_pool=True, activation="relu", device="cpu")
    assert explained.problem.endswith(" + relu + max_pool")
    fastconv.conv2d(torch.randn(2, 8, 9, 9), torch.randn(8, 8, 3, 3), max_pool=True, algorithm="direct")
    assert ops.last_call()["config"].endswith(", then max-pool")


# --- The operators


GEOMETRY = ([2, 1], [1, 2], [1, 1], 2)


def tensors(dtype=torch.float32, requires_grad=True):
    """Input, weight and bias of an output [2, 6, 4, 7]."""
    torch.manual_seed(0)
    return [torch.randn(size, dtype=dtype, requires_grad=requires_grad) for size in ((2, 4, 7, 5), (6, 2, 3, 3), (6,))]


@pytest.mark.parametrize(("activation", "slope"), [("leaky_relu", -0.3), ("silu", 0.0), ("none", 0.0)])
def test_opcheck(activation, slope):
    x, w, bias = tensors()
    rest = (activation, slope)
    call = (x, w, bias, None, *GEOMETRY, "auto", "fp32", *rest, 4, None, None, False, True)
    results = opcheck(ops.conv2d_op, call, raise_exception=False)
    assert all(result == "SUCCESS" for result in results.values()), results
    packed = ops.pack_weight(w, 2, "implicit_gemm", "fp32")
    call = (x, packed, w.shape, bias, None, *GEOMETRY, False, "implicit_gemm", "fp32", *rest, False, True)
    results = opcheck(ops.conv2d_packed_op, call, raise_exception=False)
    assert all(result == "SUCCESS" for result in results.values()), results


@pytest.mark.parametrize("wanted", [(0, 1, 2), (0,), (1,), (2,)])
@pytest.mark.parametrize(("activation", "slope"), [("relu", 0.0), ("leaky_relu", -0.3), ("silu", 0.0), ("none", 0.0)])
def test_gradients_of_the_operators(activation, slope, wanted):
    """A graph may call them where a gradient is asked for, and the gradient's gradient."""
    given = tensors(torch.float64)
    inputs, expected = ([t.detach().requires_grad_(i in wanted) for i, t in enumerate(given)] for _ in range(2))
    y = autograd.conv2d(*inputs, None, *GEOMETRY, "auto", "fp32", activation, slope, 4, None, None, False, True)
    named = None if activation == "none" else activation
    exact = reference.conv2d(*expected, *GEOMETRY, activation=named, negative_slope=slope, max_pool=True)
    torch.testing.assert_close(y, exact, rtol=1e-10, atol=1e-10)
    cotangent = torch.randn_like(exact)
    asked, exactly = ([ts[i] for i in wanted] for ts in (inputs, expected))
    for first, second in ((asked, y), (exactly, exact)):
        grads = torch.autograd.grad(second, first, cotangent, create_graph=True)
        total = sum(grad.square().sum() for grad in grads)
        again = torch.autograd.grad(total, first, allow_unused=True) if total.requires_grad else ()
        if second is y:
            found = [*grads, *again]
        else:
            for f, e in zip(found, [*grads, *again], strict=True):
                assert (f is None) == (e is None)
                if f is not None:
                    torch.testing.assert_close(f, e, rtol=1e-9, atol=1e-9)


def test_gradients_of_a_packed_weight():
    x, w, bias = tensors()
    packed = ops.pack_weight(w, 2, "implicit_gemm", "fp32")
    y = autograd.conv2d_packed(
        x, packed, w.shape, bias, None, *GEOMETRY, False, "implicit_gemm", "fp32", "relu", 0.0, False, True
    )
    doubles = [t.detach().double().requires_grad_() for t in (x, bias)]
    exact = reference.conv2d(doubles[0], w.detach(), doubles[1], *GEOMETRY, activation="relu", max_pool=True)
    cotangent = torch.randn_like(y)
    found = torch.autograd.grad(y, (x, bias), cotangent)
    for f, e in zip(found, torch.autograd.grad(exact, doubles, cotangent.double()), strict=True):
        assert errors(f, e).relative_l2 < 1e-5


@pytest.mark.parametrize("grouped", [False, True])
def test_vmap(grouped):
    x, w, _ = tensors(requires_grad=False)
    biases, filters = torch.randn(3, 6), torch.randn(3, *w.shape) if grouped else w
    epilogue = {"activation": "silu", "max_pool": True}

    def call(w, bias):
        return fastconv.conv2d(x, w, bias, *GEOMETRY, **epilogue, precision="fp32")

    expected = [reference.conv2d(x, filters[i] if grouped else w, biases[i], *GEOMETRY, **epilogue) for i in range(3)]
    found = torch.vmap(call, (0 if grouped else None, 0))(filters, biases)
    assert errors(found, torch.stack(expected)).relative_l2 < 1e-5
    packed = ops.pack_weight(w, 2, "direct", "fp32")

    def call_packed(bias):
        return autograd.conv2d_packed(
            x, packed, w.shape, bias, None, *GEOMETRY, False, "direct", "fp32", "silu", 0.0, False, True
        )

    expected = [reference.conv2d(x, w, bias, *GEOMETRY, **epilogue) for bias in biases]
    assert errors(torch.vmap(call_packed)(biases), torch.stack(expected)).relative_l2 < 1e-5


@pytest.mark.parametrize("algorithm", ["auto", "torch", "winograd_f2", "direct"])
def test_the_function_again_and_again(algorithm):
    """The second call with a weight takes another way than the first, one with a pool another than one without; so does
    one that is trained."""
    x, w = torch.randn(2, 8, 9, 10), torch.randn(8, 8, 3, 3)
    for pool, trained in ((True, False), (False, False), (True, False), (True, True), (True, False)):
        asked = {"padding": 1, "activation": "leaky_relu", "negative_slope": 0.3, "max_pool": pool}
        inner = w.clone().requires_grad_() if trained else w
        y = fastconv.conv2d(x, inner, algorithm=algorithm, precision="fp32", **asked)
        assert errors(y, reference.conv2d(x, w, **asked)).relative_l2 < 1e-5
        assert y.requires_grad == trained


def test_unbatched_autocast_float64_and_refusals():
    x, w, bias = tensors(requires_grad=False)
    asked = {"activation": "relu", "max_pool": True}
    expected = reference.conv2d(x, w, bias, *GEOMETRY, **asked)
    assert torch.equal(fastconv.conv2d(x.double(), w.double(), bias.double(), *GEOMETRY, **asked), expected)
    for algorithm in ("auto", "torch"):
        y = fastconv.conv2d(x[0], w, bias, *GEOMETRY, algorithm=algorithm, precision="fp32", **asked)
        assert errors(y, expected[0]).relative_l2 < 1e-5
    with torch.autocast("cpu", torch.bfloat16):
        y = fastconv.conv2d(x, w, bias, *GEOMETRY, **asked)
    assert y.dtype == torch.bfloat16
    assert errors(y, expected).relative_l2 < 2e-2
    for dtype in (torch.float32, torch.float64):
        given = [t.to(dtype) for t in (x, w, bias)]
        with pytest.raises(RuntimeError, match="max_pool is True; expected no residual"):
            fastconv.conv2d(*given, *GEOMETRY, residual=torch.zeros(2, 6, 4, 7, dtype=dtype), **asked)
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"max_pool is True of an output of \[1, 7\]"):
            fastconv.conv2d(x[:, :, :1], w, bias, *GEOMETRY, **asked)
    with pytest.raises(TypeError, match="max_pool is 2; expected a bool"):
        fastconv.conv2d(x, w, bias, *GEOMETRY, max_pool=2)
    with pytest.raises(RuntimeError, match="expected no residual"):
        autograd.conv2d(
            x, w, bias, torch.zeros(2, 6, 4, 7), *GEOMETRY, "auto", "fp32", "none", 0.0, 4, None, None, False, True
        )


def test_operations_are_those_of_the_convolution():
    x, w = torch.randn(2, 8, 9, 10), torch.randn(8, 8, 3, 3)
    counts = []
    for pool in (False, True):
        with FlopCounterMode(display=False) as counter:
            fastconv.conv2d(x, w, max_pool=pool)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] == 2 * 2 * 8 * 7 * 8 * 8 * 9


# --- Layers, fuse


@pytest.mark.parametrize("algorithm", ["auto", "torch", "winograd_f2"])
def test_a_layer(algorithm):
    layer = FusedConv2d(8, 8, 3, padding=1, activation="relu", algorithm=algorithm, max_pool=True)
    assert "max_pool=True" in repr(layer)
    x = torch.randn(2, 8, 9, 11)
    expected = F.max_pool2d(F.relu(nn.Conv2d.forward(layer, x)), 2)
    with torch.no_grad():
        for _ in range(3):
            assert relative_error(layer(x), expected) < 1e-5
        assert relative_error(pickle.loads(pickle.dumps(layer))(x[0]), expected[0]) < 1e-5
        for residual in (torch.zeros(2, 8, 9, 11), torch.zeros(8, 1, 1)):
            with pytest.raises(RuntimeError, match="expected no residual"):
                layer(x, residual)
    found = torch.autograd.grad(layer(x).sum(), list(layer.parameters()))
    for f, e in zip(found, torch.autograd.grad(expected.sum(), list(layer.parameters())), strict=True):
        assert relative_error(f, e) < 1e-5
    del layer.__dict__["max_pool"]  # as one that was pickled before
    assert layer(x).shape == (2, 8, 9, 11)


def tower():
    """Pools of every spelling, one behind another's, one whose input is read again, and some that are others."""
    torch.manual_seed(0)
    pools = nn.MaxPool2d(2), nn.MaxPool2d((2, 2), stride=2), nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(2, ceil_mode=True)
    layers = []
    for i, pool in enumerate(pools):
        layers += [nn.Conv2d(8 if i else 3, 8, 3, padding=1), nn.ReLU(inplace=True), pool]
    return sequence(*layers, nn.Conv2d(8, 8, 1), nn.MaxPool2d(2, 2, 0, 1)).eval()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fuse_takes_a_pool(layout, device):
    model = tower().to(device, memory_format=LAYOUTS[layout])
    x = torch.randn(2, 3, 77, 66, device=device).to(memory_format=LAYOUTS[layout])
    fused = check(model, x, strict=True)
    assert parts(fused) == ["conv+relu+max_pool"] * 2 + ["conv+relu"] * 2 + ["conv+max_pool"]
    found = tuning.record(pickle.loads(pickle.dumps(fused)), x)
    assert sorted(convolution.max_pool for convolution in found.elements()) == [False] * 2 + [True] * 3


FORWARDS = {
    "function": (lambda self, x: F.max_pool2d(F.silu(self.conv(x)), 2), ["conv+silu+max_pool"]),
    "keywords": (lambda self, x: F.max_pool2d(self.conv(x), kernel_size=2, stride=[2, 2]), ["conv+max_pool"]),
    "torch": (lambda self, x: torch.max_pool2d(self.conv(x), [2, 2]), ["conv+max_pool"]),
    "norm": (lambda self, x: F.max_pool2d(F.relu(self.norm(self.conv(x))), 2), ["conv+bn+relu+max_pool"]),
    "behind a sum": (lambda self, x: F.max_pool2d(F.relu(self.conv(x) + x), 2), ["conv+residual+relu"]),
    "before a sum": (lambda self, x: F.max_pool2d(self.conv(x), 2) + x[..., ::2, ::2][..., :2, :4], ["conv+max_pool"]),
    "before an activation": (lambda self, x: F.relu(F.max_pool2d(self.conv(x), 2)), ["conv+max_pool"]),
    "twice": (lambda self, x: F.max_pool2d(F.max_pool2d(self.conv(x), 2), 2), ["conv+max_pool"]),
    "with indices": (lambda self, x: (y := F.max_pool2d(self.conv(x), 2, return_indices=True))[0] + y[1], ["conv"]),
    "stride 1": (lambda self, x: F.max_pool2d(self.conv(x), 2, 1), ["conv"]),
    "padded": (lambda self, x: F.max_pool2d(self.conv(x), 2, padding=1), ["conv"]),
    "read again": (lambda self, x: F.max_pool2d(y := F.relu(self.conv(x)), 2).sum() * y, ["conv+relu"]),
}


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("front", ["fuse", "compile"])
def test_what_is_a_pool_of_ours(front, name):
    forward, expected = FORWARDS[name]
    x = torch.randn(2, 6, 5, 8)
    if front == "fuse":
        fused = check(Function(forward), x, strict=True)
        assert (parts(fused), codes(fused)) == (expected, [""])
    else:
        assert check_rewritten(Function(forward), x, Asked(algorithm="winograd_f2")).parts == expected


# --- Rewrites


@pytest.mark.parametrize("packed", [False, True])
def test_rewrites_take_a_pool_that_kernels_have(packed):
    x = torch.randn(2, 3, 77, 66)
    backend = check_rewritten(sequence(*tower()[:12]), x, Asked(algorithm="winograd_f4", packed=packed))
    assert backend.parts == ["conv+relu+max_pool"] * 2 + ["conv+relu"] * 2
    assert backend.count(ops.conv2d_packed_op if packed else ops.conv2d_op) == 4
    backend = check_rewritten(sequence(*tower()[:12]), x, OURS)  # by kernels that have none
    assert backend.parts == ["conv+relu"] * 4
    assert backend.codes == ["max_pool"] * 2 + [""] * 2


def test_a_call_of_the_models_own():
    """It stays the operator; where PyTorch has to compute it, the pool is PyTorch's."""

    class Model(nn.Conv2d):
        def forward(self, x):
            return fastconv.conv2d(x, self.weight, self.bias, activation="relu", max_pool=True, precision="ieee")

    backend = check_rewritten(Model(3, 8, 3), torch.randn(2, 3, 12, 9))
    assert backend.count(ops.conv2d_op) == 1


def test_rewritten_gradients():
    """In training the pool's indices are read, too: it stays apart."""
    torch.manual_seed(0)
    model = sequence(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 6, 1))
    function, backend = compiled(model, Asked(algorithm="winograd_f2"))
    x = torch.randn(2, 3, 9, 12)
    exact = sequence(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 6, 1)).double()
    exact.load_state_dict(model.state_dict())
    found = torch.autograd.grad(function(x).sum(), list(model.parameters()))
    for f, e in zip(found, torch.autograd.grad(exact(x.double()).sum(), list(exact.parameters())), strict=True):
        assert relative_error(f.double(), e) < 1e-5
    assert "max_pool" not in "".join(backend.parts)
