"""How a tile of the implicit GEMM ends: every way to y with every epilogue, many tiles for each block of the grid."""

from dataclasses import replace

import pytest
import torch
from harness import CLASSES, GATED, LAYOUTS, Epilogue, make_case, planner_device, problem, yardstick
from harness import conv2d as run
from shapes import Shape

from fastconv import _C
from fastconv.testing import poisoned_memory

pytestmark = [
    pytest.mark.usefixtures("full_precision"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPES = [
    Shape(16, 64, 28, 28, 256, 1, 1),  # by copies
    Shape(16, 64, 27, 27, 120, 1, 1),  # by copies, cut short in both dimensions
    Shape(16, 64, 55, 55, 128, 1, 1, stride=(2, 2)),
    Shape(4, 1024, 14, 14, 256, 1, 1),  # few tiles, whose reduction is cut
    Shape(16, 64, 28, 28, 40, 1, 1),  # less filters than a copy of y or of the residual brings
    Shape(16, 64, 56, 56, 64, 3, 3, padding=(1, 1)),
    Shape(16, 32, 56, 56, 48, 3, 3, padding=(1, 1)),
    Shape(16, 64, 28, 28, 255, 1, 1),  # filters that are no multiple of 16 bytes
    Shape(16, 3, 64, 64, 32, 3, 3, padding=(1, 1)),  # a first layer
    Shape(16, 3, 65, 65, 44, 3, 3, padding=(1, 1)),
]
EPILOGUES = [
    Epilogue(bias=True, activation="leaky_relu", negative_slope=0.1),
    Epilogue(bias=True, activation="leaky_relu", negative_slope=1.5),
    Epilogue(bias=True, activation="silu"),
    *(Epilogue(bias=True, activation=activation) for activation in GATED),
    Epilogue(residual=True),
    Epilogue(residual=True, residual_after=True),
    Epilogue(bias=True, residual=True, activation="relu"),
    Epilogue(bias=True, residual=True, activation="relu6", residual_after=True),
    Epilogue(bias=True, residual=True, activation="leaky_relu", negative_slope=0.1),
    Epilogue(bias=True, residual=True, activation="leaky_relu", negative_slope=0.1, residual_after=True),
    Epilogue(bias=True, residual=True, activation="silu", residual_after=True),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("cls", [cls for cls in CLASSES if cls != "ieee"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_epilogue(layout, cls, shape):
    wrong = []
    with poisoned_memory():
        for epilogue in EPILOGUES:
            case = make_case(shape, cls, layout, "cuda", epilogue)
            found = yardstick(case, cls).violations(run(case, "implicit_gemm", cls), "implicit_gemm", cls)
            config = _C.choose("implicit_gemm", problem(shape, cls, layout, epilogue), planner_device("cuda"))["config"]
            wrong += [f"{config}, {epilogue}: {text}" for text in found]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("value", [float("inf"), float("nan")], ids=str)
@pytest.mark.parametrize("cls", ["fp16", "bf16"])
def test_a_residual_that_is_not_finite_stays_where_it_is(cls, value):
    """Sums of half types start with it: its neighbours must not hear of it."""
    case = make_case(Shape(16, 64, 28, 28, 256, 1, 1), cls, "nhwc", "cuda", Epilogue(residual=True))
    finite = run(case, "implicit_gemm", cls)
    residual = case.residual.clone(memory_format=torch.preserve_format)
    residual[3, 100, 9, 20] = value
    result = run(replace(case, residual=residual), "implicit_gemm", cls)
    others = torch.ones_like(result, dtype=torch.bool)
    others[3, 100, 9, 20] = False
    assert not result[3, 100, 9, 20].isfinite()
    assert torch.equal(result[others], finite[others])
