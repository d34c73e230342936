"""What the planner says of ranges of channels: which kernels take them as they lie, and which problems are copied."""

from __future__ import annotations

import pytest
from harness import CLASSES, planner_device
from shapes import UNIT_3X3, Shape

from fastconv import _C, ops

WINOGRAD = ["winograd_fused", "winograd_f2", "winograd_f4", "winograd_megakernel"]
OTHERS = ["direct", "direct_tiled", "fused_unroll", "two_stage"]
GPU, CPU = _C.h200_device(), planner_device("cpu")
SMALL = Shape(2, 16, 9, 9, 24, 3, 3, padding=(1, 1))


def plan(algorithm: str, shape: Shape, cls: str, device: _C.DeviceInfo, **ranges: int) -> dict[str, object]:
    dtype, precision = CLASSES[cls]
    problem = _C.ConvProblem(
        shape.n, shape.c, shape.h, shape.w, shape.k, shape.r, shape.s, shape.stride, shape.padding, shape.dilation,
        shape.groups, ops.dtype_name(dtype), precision, "nhwc", **ranges,
    )  # fmt: skip
    return next(row for row in _C.candidates(problem, device) if row["algorithm"] == algorithm)


@pytest.mark.parametrize("device", [GPU, CPU], ids=["h200", "cpu"])
@pytest.mark.parametrize("algorithm", WINOGRAD)
def test_winograd_takes_every_range(algorithm, device):
    for cls in CLASSES:
        for shape in UNIT_3X3:
            own = plan(algorithm, shape, cls, device)
            around = {"x_channels": shape.c // 8 * 8 + 16, "y_channels": shape.k // 8 * 8 + 8}
            ranged = plan(algorithm, shape, cls, device, **around)
            assert ranged["ok"] == own["ok"], (shape, cls)
            assert not ranged["copies_x"], (shape, cls)
            assert not ranged["copies_y"], (shape, cls)
            assert ranged["packed_bytes"] == own["packed_bytes"], (shape, cls)


@pytest.mark.parametrize("algorithm", ["winograd_fused", "winograd_megakernel"])
def test_odd_channels_in_whole_pixels_come_by_tensor_copies(algorithm):
    """Rows of 13 channels are no whole pieces of 16 bytes; pixels of 32 are."""
    odd = Shape(8, 13, 28, 28, 64, 3, 3, padding=(1, 1))
    assert plan(algorithm, odd, "fp32", GPU, x_channels=32)["cost_us"] < plan(algorithm, odd, "fp32", GPU)["cost_us"]


@pytest.mark.parametrize("device", [GPU, CPU], ids=["h200", "cpu"])
def test_planes_of_two_stage_are_like_a_tensor_of_its_own(device):
    both = plan("two_stage", SMALL, "fp32", device, x_channels=32, y_channels=64)
    assert both["ok"]
    assert both["copies_x"]
    assert both["copies_y"]
    assert not plan("two_stage", SMALL, "fp32", device, x_channels=32)["copies_x"]
    pointwise = Shape(2, 16, 9, 9, 24, 1, 1)  # one tap: no planes
    assert not plan("two_stage", pointwise, "fp32", device, y_channels=64)["copies_y"]


@pytest.mark.parametrize("algorithm", WINOGRAD + OTHERS)
def test_a_range_of_more_channels_than_kernels_count_is_copied(algorithm):
    row = plan(algorithm, SMALL, "fp32", GPU, x_channels=1 << 22)
    assert row["ok"]
    assert row["copies_x"]
