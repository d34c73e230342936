"""Gated activations (GELU in both forms, hardswish, sigmoid): what the planner leaves to a pass behind the kernels, and
what the rewrites therefore leave to Inductor. `test_activations`, `test_algorithms`, `test_ops` and `test_fuse` have
them among the others, `test_native` the GPU's formulas."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from harness import ACTIVATIONS, GATED
from rewriting import OURS, on_a_gpu
from torch import Tensor, nn

import fastconv
from fastconv import _C, ops, settings

H200, CPU = _C.h200_device(), _C.cpu_device(2)
POINTWISE = {"n": 64, "c": 96, "h": 28, "w": 28, "k": 96, "r": 1, "s": 1, "padding": (0, 0)}
DEPTHWISE = {"n": 64, "c": 144, "h": 28, "w": 28, "k": 144, "r": 3, "s": 3, "padding": (1, 1), "groups": 144}
DENSE = {"n": 64, "c": 96, "h": 28, "w": 28, "k": 96, "r": 3, "s": 3, "padding": (1, 1)}


def problem(sizes, cls="fp16", layout="nhwc", **epilogue):
    dtype = {"fp16": "float16", "bf16": "bfloat16"}.get(cls, "float32")
    precision = cls if dtype == "float32" else "fp32"
    return _C.ConvProblem(
        **sizes, dtype=dtype, precision=precision, layout=layout, **{"bias": True, "activation": "hardswish"} | epilogue
    )


def plan(algorithm, *args, device=H200, **epilogue):
    asked = problem(*args, **epilogue)
    return next(row for row in _C.candidates(asked, device) if row["algorithm"] == algorithm)


# --- The planner


def test_they_are_known_by_name():
    assert [name for name in settings.ACTIVATIONS if _C.is_gated(name)] == list(GATED)
    assert not _C.is_gated("none")
    x, w = torch.randn(1, 2, 3, 3), torch.randn(2, 2, 1, 1)
    with pytest.raises(ValueError, match=r"activation is 'swish'; expected None or one of relu, .*hardswish, sigmoid"):
        fastconv.conv2d(x, w, activation="swish")


def test_a_plain_end_is_one_of_comparisons():
    for name in ("none", *settings.ACTIVATIONS):
        plain = name not in ("silu", *GATED)
        assert problem(DENSE, activation=name).has_plain_epilogue == plain
        assert not problem(DENSE, activation=name, residual=True).has_plain_epilogue
        # Of a gated activation the kernels see nothing: it is a pass behind a plain end.
        assert ("plain end" in plan("winograd_f4", DENSE, "fp32", activation=name)["config"]) == (name != "silu")


@pytest.mark.parametrize("activation", GATED)
def test_kernels_of_half_types_end_with_them(activation):
    """1x1 and depthwise layers, and dense ones, as they do with ReLU; a ReLU's plan costs the same."""
    for cls in ("fp16", "bf16"):
        for sizes, algorithm in ((POINTWISE, "implicit_gemm"), (DENSE, "implicit_gemm"), (DEPTHWISE, "direct_tiled")):
            row = plan(algorithm, sizes, cls, activation=activation)
            relu = plan(algorithm, sizes, cls, activation="relu")
            assert not row["activates_apart"], (cls, algorithm)
            assert (row["config"], row["cost_us"]) == (relu["config"], relu["cost_us"])
        for sizes in (POINTWISE, DEPTHWISE):
            chosen = _C.choose("auto", problem(sizes, cls, activation=activation), H200)
            assert chosen["algorithm"] != "torch"
            assert not chosen["activates_apart"]
    assert not plan("implicit_gemm", POINTWISE, "tf32", activation=activation)["activates_apart"]
    # One tile, for a small grid.
    small = plan("implicit_gemm", POINTWISE | {"n": 1, "h": 14, "w": 14}, activation=activation)
    assert "single tile" in small["config"]
    assert not small["activates_apart"]


def test_elsewhere_on_a_gpu_it_is_a_pass_with_its_time():
    for sizes, args, epilogue in (
        (POINTWISE, ("fp32",), {}),
        (POINTWISE, ("ieee",), {}),
        (DENSE, ("tf32",), {}),
        (POINTWISE | {"c": 3}, ("fp16",), {}),  # pixels that are no whole 16 bytes
        (POINTWISE, ("fp16",), {"residual": True}),
    ):
        for row in _C.candidates(problem(sizes, *args, **epilogue), H200):
            if row["ok"] and row["algorithm"] != "torch":
                assert row["activates_apart"], row
                assert row["config"].endswith(", then hardswish")
    for algorithm in ("winograd_f4", "winograd_fused", "im2col_gemm", "direct"):
        row, bare = (plan(algorithm, DENSE, activation=activation) for activation in ("gelu", "none"))
        assert row["activates_apart"]
        assert row["config"] == bare["config"] + ", then gelu"
        assert row["cost_us"] > bare["cost_us"] + 2 * 2 * 64 * 96 * 28 * 28 / 5e6
        assert row["workspace_bytes"] == bare["workspace_bytes"]
    assert plan("implicit_gemm", DEPTHWISE)["activates_apart"]
    assert not plan("direct_tiled", DEPTHWISE, residual=True)["activates_apart"]
    assert plan("direct_tiled", DEPTHWISE, "fp32")["activates_apart"]
    assert plan("direct_tiled", DEPTHWISE, layout="nchw")["activates_apart"]


def test_what_stands_behind_the_activation_is_apart_with_it():
    before, after = (plan("implicit_gemm", POINTWISE, residual=True, residual_after=flag) for flag in (False, True))
    assert before["activates_apart"]
    assert after["activates_apart"]
    assert after["config"].endswith(", then hardswish, sum")
    assert plan("winograd_f4", DENSE, "fp32", max_pool=True)["pools_apart"]
    assert not plan("winograd_f4", DENSE, "fp32", max_pool=True, activation="relu")["pools_apart"]
    ranged = plan("direct", POINTWISE, y_channels=192)
    assert ranged["copies_y"]
    assert not plan("implicit_gemm", POINTWISE, y_channels=192)["copies_y"]


def test_on_a_cpu_they_are_a_pass():
    for activation in GATED:
        for cls in ("fp32", "fp16"):
            rows = _C.candidates(problem(DENSE, cls, activation=activation), CPU)
            assert [row["activates_apart"] for row in rows if row["ok"]].count(False) == 1  # PyTorch's own


# --- The rewrites: what is no end of the kernels stays Inductor's


class Layer(nn.Module):
    def __init__(self, end, groups: int = 1, size: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 16, size, padding=size // 2, groups=groups)
        self.end = end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.conv(x), x)


def taken_in(graph) -> list[str]:
    """The activations of the convolutions of ours."""
    return [str(node.args[10]) for node in graph.find_nodes(op="call_function", target=ops.conv2d_op)]


@pytest.mark.parametrize("activation", GATED)
def test_a_gpus_graph(activation):
    def alone(y, x):
        return ACTIVATIONS[activation](y)

    def added(y, x):
        return ACTIVATIONS[activation](y + x)

    def before(y, x):
        return ACTIVATIONS[activation](y) + x

    shape = (64, 16, 28, 28)
    for dtype in (torch.float16, torch.bfloat16):
        assert taken_in(on_a_gpu(Layer(alone), shape, dtype)) == [activation]
        assert taken_in(on_a_gpu(Layer(before), shape, dtype)) == [activation]
        assert taken_in(on_a_gpu(Layer(added), shape, dtype)) == ["none"]
    for precision, expected in (("fp32", "none"), ("tf32", activation)):
        asked = dataclasses.replace(OURS, precision=precision)
        assert taken_in(on_a_gpu(Layer(alone), shape, torch.float32, asked=asked)) == [expected]
    # A sum behind it is Inductor's.
    (node,) = on_a_gpu(Layer(before), shape).find_nodes(op="call_function", target=ops.conv2d_op)
    assert node.args[3] is None


def test_what_is_left_is_decomposed_as_ever():
    graph = on_a_gpu(Layer(lambda y, x: F.gelu(F.hardswish(y)), size=3), (64, 16, 28, 28), torch.float32)
    assert taken_in(graph) == ["none"]
    targets = {node.target for node in graph.nodes}
    assert not targets & {torch.ops.aten.gelu.default, torch.ops.aten.hardswish.default}
