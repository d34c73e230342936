"""A 1x1 layer whose epilogue the library's product ends in (im2col_gemm, NHWC): what it does not promise is asked."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from harness import CLASSES, Case, Epilogue, conv2d, make_case, yardstick
from shapes import Shape

import fastconv
from fastconv.testing import poisoned_memory

# Few and many pixels, filters and channels, which have kernels of their own; and rows that are no whole 16 bytes.
SHAPES = [
    Shape(64, 256, 14, 14, 64, 1, 1),
    Shape(4, 512, 7, 7, 2048, 1, 1),
    Shape(1, 64, 7, 7, 256, 1, 1),
    Shape(2, 64, 56, 56, 256, 1, 1),
    Shape(1, 2048, 1, 1, 1000, 1, 1),
    Shape(3, 72, 5, 9, 24, 1, 1),
    Shape(2, 40, 8, 8, 8, 3, 3, padding=(1, 1)),
    Shape(2, 36, 9, 10, 18, 1, 1),
    Shape(1, 3, 9, 10, 7, 1, 1),
]
ENDS = [
    Epilogue(bias=bias, residual=residual, activation=activation)
    for bias, residual, activation in itertools.product((True, False), (True, False), ("relu", "none"))
    if bias or residual or activation == "relu"
]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def plan(dtype: str, precision: str, k: int = 64, c: int = 256, layout: str = "nhwc", **epilogue: object) -> str:
    problem = fastconv._C.ConvProblem(
        64,
        c,
        14,
        14,
        k,
        1,
        1,
        dtype=dtype,
        precision=precision,
        layout=layout,
        **epilogue,  # type: ignore[arg-type]
    )
    return fastconv._C.choose("im2col_gemm", problem, fastconv._C.h200_device())["config"]


@pytest.mark.parametrize(("dtype", "precision"), [("float16", "fp32"), ("bfloat16", "fp32"), ("float32", "tf32")])
def test_the_plan_says_where(dtype, precision):
    ended = "in place, epilogue in the product"
    assert plan(dtype, precision, bias=True, activation="relu") == ended
    assert plan(dtype, precision, bias=True, residual=True) == ended
    assert plan(dtype, precision) == "in place"
    for elsewhere in ({"activation": "silu"}, {"k": 18}, {"c": 18}, {"layout": "nchw"}):
        assert plan(dtype, precision, bias=True, **elsewhere) == "in place"
    after = {"residual": True, "residual_after": True}
    assert plan(dtype, precision, activation="relu", **after) == "in place"


@needs_cuda
@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(shape, cls):
    with poisoned_memory():
        for end in ENDS:
            case = make_case(shape, cls, "nhwc", "cuda", end)
            wrong = yardstick(case, cls).violations(conv2d(case, "im2col_gemm", cls), "im2col_gemm", cls)
            assert not wrong, f"{end}: {wrong}"


def spoilt(case: Case, operand: str, value: float) -> Case:
    tensor = getattr(case, operand).clone(memory_format=torch.preserve_format)
    tensor[-1 if tensor.dim() == 1 else (-1, -1, 0, 0)] = value
    return replace(case, **{operand: tensor})


def in_double(case: Case) -> torch.Tensor:
    bias, residual = (None if each is None else each.double() for each in (case.bias, case.residual))
    y = F.conv2d(case.input.double(), case.weight.double(), bias, padding=case.shape.padding)
    y = y if residual is None else y + residual
    return F.relu(y) if case.epilogue.activation == "relu" else y


@needs_cuda
@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nan_and_infinities(shape, cls):
    """Each stays where it belongs: some kernels of the library make zeros of it in their ReLU, and are not
    taken."""
    for end in ENDS:
        case = make_case(shape, cls, "nhwc", "cuda", end)
        operands = [name for name in ("input", "weight", "bias", "residual") if getattr(case, name) is not None]
        if shape.padding != (0, 0):  # times an infinity: NaN or not, by kernel
            operands.remove("weight")
        for operand, value in itertools.product(operands, (float("nan"), float("inf"), float("-inf"))):
            bad = spoilt(case, operand, value)
            got, expected = conv2d(bad, "im2col_gemm", cls), in_double(bad)
            for test in (torch.isnan, torch.isposinf, torch.isneginf):
                assert torch.equal(test(got), test(expected)), f"{end}, {value} in {operand}: {test.__name__}"


@needs_cuda
def test_inside_a_graph_from_the_first_call_on():
    """A shape that was never met asks the library while a stream is being captured."""
    x = torch.randn(3, 88, 6, 5, device="cuda", dtype=torch.half).to(memory_format=torch.channels_last)
    layer = fastconv.FusedConv2d(88, 104, 1, activation="relu", algorithm="im2col_gemm").half().cuda().eval()
    with torch.no_grad():
        layer(x[:1])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        x.fill_(float("nan"))
        graph.replay()
    assert bool(y.isnan().all())
