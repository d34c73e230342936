"""What the tests of the layer and of the swap share."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastconv import _C

NO_GPU = "needs a CUDA GPU; torch.cuda.is_available() is False"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU))]


def turns(cases: Iterable[tuple[Any, Any]], device: str, *indices: int) -> list[tuple[Any, Any]]:
    """On a CPU every other pair of two, by the parity of the indices of a test's parameters: each value of any of them
    still meets all pairs."""
    return [case for i, case in enumerate(cases) if device != "cpu" or (i + i // 2 + sum(indices)) % 2 == 0]


def packed_algorithms() -> list[str]:
    """The algorithms that read a packed weight for a 3x3 convolution."""
    problem = _C.ConvProblem(n=1, c=8, h=13, w=13, k=8, r=3, s=3, padding=(1, 1))
    rows = _C.candidates(problem, _C.cpu_device(1))
    return [row["algorithm"] for row in rows if row["ok"] and row["packed_bytes"] > 0]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))


def assert_alike(found: Any, expected: Any, bound: float, what: Any = None) -> None:
    for a, b in zip(found, expected, strict=True):
        assert relative_error(a.double(), b) < bound, what


def exact(layer: nn.Module, x: Tensor) -> tuple[list[Tensor], Tensor]:
    """Leaves in float64, input first, and what PyTorch makes of them."""
    leaves = [t.detach().double().requires_grad_() for t in (x, *layer.parameters())]
    bias = leaves[2] if len(leaves) > 2 else None
    if isinstance(layer, nn.ConvTranspose2d):
        geometry = layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation
        return leaves, F.conv_transpose2d(*leaves[:2], bias, *geometry)
    return leaves, F.conv2d(*leaves[:2], bias, layer.stride, layer.padding, layer.dilation, layer.groups)


def reference(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """What nn.Conv2d computes from the layer's attributes as they are now."""
    return nn.Conv2d.forward(layer, x)


def check(layer: nn.Conv2d, x: Tensor, bound: float = 1e-5) -> Tensor:
    y = layer(x)
    assert relative_error(y, reference(layer, x)) < bound
    return y
