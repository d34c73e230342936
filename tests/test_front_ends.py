"""`compile` and `fuse` find the same: one set of fusions for each pattern, in graphs of operators and of modules, here
with values against float64, and as planned for a GPU that need not be there."""

import collections
import copy
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from fusing import fuse_quietly, norm
from layers import relative_error
from rewriting import OURS, check
from torch import Tensor, nn

from fastconv import ops
from fastconv.rewrites import Asked, widening
from fastconv.rewrites.convolution import problem_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
import compare_front_ends
import golden_plans

pytestmark = pytest.mark.usefixtures("full_precision")
FROZEN = replace(OURS, precision="fp32", packed=True, scatters=True)


class Network(nn.Module):
    """Layers with k channels, called by a function."""

    def __init__(self, call: Any, k: int = 8) -> None:
        super().__init__()
        self.call = call
        self.a, self.b, self.c, self.d = (nn.Conv2d(k, k, 3, padding=1) for _ in range(4))
        self.point, self.fewer, self.more = nn.Conv2d(k, k, 1), nn.Conv2d(k, 2, 1), nn.Conv2d(2, k, 1)
        self.depthwise = nn.Conv2d(k, k, 3, padding=1, groups=k)
        self.down, self.wide = nn.Conv2d(k, 2 * k, 3, 2, 1), nn.Conv2d(2 * k, k, 3, padding=1)
        self.norm_a, self.norm_b, self.norm_c, self.norm_d = (norm(k) for _ in range(4))
        self.relu, self.silu, self.twice = nn.ReLU(), nn.SiLU(), nn.Upsample(scale_factor=2)
        self.depth, self.pool = torchvision.ops.StochasticDepth(0.2, "row"), nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Any:
        return self.call(self, x)


def basic(m: Any, x: Tensor) -> Tensor:
    """A block of ResNet."""
    y = m.relu(m.norm_a(m.a(x)))
    return m.d(m.relu(m.norm_b(m.b(y)) + x))


def inverted(m: Any, x: Tensor) -> Tensor:
    """A block of EfficientNet, with squeeze-and-excitation and a depth that training makes random."""
    y = m.silu(m.norm_a(m.point(x)))
    y = m.silu(m.norm_b(m.depthwise(y)))
    y = y * torch.sigmoid(m.more(m.silu(m.fewer(y.mean((2, 3), keepdim=True)))))
    z = m.depth(m.norm_c(m.a(y)))
    z += x
    return m.d(z)


def high_resolution(m: Any, x: Tensor) -> Tensor:
    """The end of a stage of HRNet: two branches into each other."""
    y = m.relu(m.norm_a(m.a(x)))
    z = m.relu(m.down(y))
    return m.d(m.relu(y + m.twice(m.norm_b(m.wide(z)))))


def branches(m: Any, x: Tensor) -> Tensor:
    """A block of RepVGG."""
    return m.d(m.relu(m.norm_a(m.a(x)) + m.norm_b(m.point(x)) + m.norm_c(x)))


def dense(m: Any, x: Tensor) -> Tensor:
    """A layer of a dense block, whose norm stands before its convolution."""
    y = m.b(x)
    return m.wide(torch.cat([y, m.a(m.point(m.relu(m.norm_a(y))))], 1))


def pooled(m: Any, x: Tensor) -> Tensor:
    return m.d(m.pool(m.relu(m.a(x))))


def skip(m: Any, x: Tensor) -> Tensor:
    """A level of a U-Net: a value that is pooled, and concatenated."""
    y = m.relu(m.norm_a(m.a(x)))
    return m.wide(torch.cat([y, m.twice(m.b(m.pool(y)))], 1))


# A call, and what is in its convolutions.
PATTERNS: dict[str, tuple[Any, list[str]]] = {
    "activations": (
        lambda m, x: m.d(F.leaky_relu(m.c(F.relu6(m.b(F.silu(m.a(x))))), 0.2)),
        ["conv", "conv+leaky_relu", "conv+relu6", "conv+silu"],
    ),
    "basic": (basic, ["conv", "conv+bn+relu", "conv+bn+residual+relu"]),
    "residual last": (lambda m, x: m.d(m.silu(m.norm_a(m.a(x))) + x), ["conv", "conv+bn+silu+residual"]),
    "dropouts": (lambda m, x: m.d(F.dropout2d(F.dropout(m.a(x), training=False), 0.3, False)), ["conv", "conv"]),
    "max-pool": (pooled, ["conv", "conv+relu"]),
    "inverted": (
        inverted,
        ["conv", "conv", "conv+bn+residual", "conv+bn+silu", "conv+bn+silu", "conv+silu"],
    ),
    "high resolution": (high_resolution, ["conv", "conv+bn", "conv+bn+relu", "conv+relu"]),
    "branches": (branches, ["conv", "conv+bn+conv+bn+identity+bn+relu"]),
    "dense": (dense, ["bn+relu+conv", "conv", "conv+cat", "conv+cat"]),
}


# Where Inductor widens what its own code computes for nothing, and eager calls would copy it.
PASSES_BEFORE = ("inverted", "max-pool")
# What a layer of `fuse` does in a pass behind kernels that do not end in it, here the gate's with two channels; of a
# compiled graph that is Inductor's.
PASSES_BEHIND = ("max_pool", "sigmoid")
# Without those whose eager calls between convolutions read no ranges on a CPU.
PLANNED = {name: call for name, (call, _) in PATTERNS.items()} | {"skip": skip}


def kernels_parts(parts: Iterable[str]) -> list[str]:
    return [part for part in parts if part not in PASSES_BEHIND]


def algorithm_of(taken: Any) -> str | None:
    """None where the gate is one front end's pass and the other's Inductor's: each chooses for another problem."""
    return None if taken.obstacle[0] == "activation" or "sigmoid" in taken.parts else taken.algorithm


@pytest.mark.parametrize("k", [8, 6])
@pytest.mark.parametrize("name", PATTERNS)
def test_values(name: str, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 6 channels, where each unaligned end of a convolution costs."""

    def aligned(call: Any) -> Any:
        problem = problem_of(call)
        return {"cost_us": 100.0 * (problem.c % 4 != 0) + 100.0 * (problem.k % 4 != 0)}

    monkeypatch.setattr(widening, "plan_of", aligned)
    forward, expected = PATTERNS[name]
    model = Network(forward, k).to(memory_format=torch.channels_last).eval()
    x = torch.randn(2, k, 8, 6).contiguous(memory_format=torch.channels_last)
    backend = check(model, x, FROZEN)
    fused = fuse_quietly(model, algorithm="implicit_gemm", precision="fp32")
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
        for _ in range(2):
            assert relative_error(fused(x.clone()).double(), exact) < 1e-5
    rows = [row for row in fused.report.rows for _ in row.names if row.last_input_shape is not None]
    if name == "dense" and k == 6:  # no ranges, which would be no whole accesses: one that others read with zeros
        expected = ["bn+relu+conv+cat", "conv", "conv", "conv"]
    assert sorted(backend.parts) == sorted(expected)
    assert sorted("+".join(kernels_parts(row.fused.split("+"))) for row in rows) == sorted(expected)
    assert sorted(row.last_input_shape for row in rows) == sorted(taken.input_shape for taken in backend.found)


# Each pattern with both numbers of channels and in both classes, and each number in both.
CALLS = [(name, k) for name in PLANNED for k in ((64, 36) if name not in PASSES_BEFORE else (64, 64))]
CLASSES = [(torch.float16, None), (torch.float32, "tf32")]


@pytest.mark.parametrize(
    ("name", "k", "dtype", "precision"), [(*call, *CLASSES[(i + i // 2) % 2]) for i, call in enumerate(CALLS)]
)
def test_planned_for_a_gpu(
    name: str, k: int, dtype: torch.dtype, precision: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "device_info", lambda device: golden_plans.devices()["h100"])
    model, shape = Network(PLANNED[name], k).eval(), (64, k, 28, 28)
    asked = Asked(precision=precision, packed=True, scatters=True)
    found = [
        collections.Counter(
            (taken.shape, *kernels_parts(taken.parts), algorithm_of(taken), taken.input_shape)
            for taken in compare_front_ends.convolutions(graph)
        )
        for graph in (
            compare_front_ends.compiled_graph(model, shape, dtype, asked),
            compare_front_ends.fused_graph(model, shape, dtype, precision=precision),
        )
    ]
    assert found[0] == found[1]
    if name == "skip" and k == 64:
        assert sum(count for taken, count in found[1].items() if "cat" in taken) == 1
