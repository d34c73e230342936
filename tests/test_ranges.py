"""Inputs and outputs that are ranges of channels of larger tensors in NHWC, over the registry: kernels that take them,
and passes around those that do not."""

import math
from dataclasses import replace

import pytest
import torch
from embedded import OUTSIDE, channels_of, fresh, into
from harness import (
    ALGORITHMS,
    CLASSES,
    DEVICES,
    OWN,
    Case,
    Epilogue,
    conv2d,
    make_case,
    pack_weight,
    shared,
    supported,
    yardstick,
)
from shapes import SMALL, Shape

from fastconv import _C, ops
from fastconv.testing import poisoned_memory

pytestmark = pytest.mark.usefixtures("full_precision")
EPILOGUES = [Epilogue(), Epilogue(bias=True, activation="relu"), Epilogue(bias=True, activation="silu")]
# Whole vectors of channels and none; several tiles, a last one that is not whole; filters that two blocks share.
WIDE = [
    Shape(2, 16, 17, 9, 24, 3, 3, padding=(1, 1)),
    Shape(3, 24, 9, 14, 40, 1, 1),
    Shape(2, 32, 15, 13, 48, 1, 1, stride=(2, 2)),
    Shape(5, 64, 7, 6, 32, 3, 3, padding=(1, 1)),
    Shape(3, 40, 14, 11, 16, 3, 3, padding=(2, 2), dilation=(2, 2)),
    Shape(2, 32, 9, 10, 64, 5, 5, stride=(2, 2), padding=(2, 2)),
    Shape(3, 3, 33, 30, 72, 7, 7, stride=(2, 2), padding=(3, 3)),
    Shape(2, 24, 8, 11, 24, 3, 3, padding=(1, 1), groups=3),
    Shape(2, 32, 12, 11, 32, 3, 3, padding=(1, 1), groups=32),
    Shape(2, 32, 12, 11, 32, 1, 1, groups=32),
]
# Where a GPU has work enough: whole waves, reductions in parts, and x converted beforehand.
LARGE = [
    Shape(33, 128, 29, 27, 48, 3, 3, padding=(1, 1)),
    Shape(3, 512, 14, 14, 192, 1, 1),
    Shape(64, 192, 28, 28, 256, 1, 1),
    Shape(9, 64, 56, 56, 64, 3, 3, padding=(1, 1)),
    Shape(2, 1024, 7, 7, 64, 3, 3, padding=(1, 1)),
    Shape(17, 96, 28, 28, 32, 3, 3, stride=(2, 2), padding=(1, 1)),
]


def of_ranges(case: Case, i: int) -> tuple[Case, torch.Tensor, torch.Tensor]:
    """The case with its input within NaN, an output within a larger tensor, and that tensor. Ranges begin at the first
    channel or behind, at whole vectors of 16 bytes or not."""
    s = case.shape
    unit = 1 if i % 4 == 3 else 16 // case.input.element_size()
    first_x, first_y = (0, unit, 3 * unit)[i % 3], (2 * unit, 0, unit)[i % 3]

    def around(first: int, channels: int) -> int:
        return -(-(first + channels + unit) // unit) * unit

    x, _ = channels_of(case.input, around(first_x, s.c), first_x, math.nan)
    empty = torch.full((s.n, s.k, s.p, s.q), math.nan, dtype=x.dtype, device=x.device)
    out, whole = channels_of(empty, around(first_y, s.k), first_y, OUTSIDE)
    return replace(case, input=x), out, whole


def untouched(whole: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether all that is not in the range is what it was."""
    outside = whole.clone()
    first = out.storage_offset() - whole.storage_offset()
    outside[:, first : first + out.shape[1]] = OUTSIDE
    return bool((outside == OUTSIDE).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("algorithm", OWN)
def test_many_shapes(algorithm, cls, device):
    if cls not in ALGORITHMS[algorithm]["accuracy"]:
        pytest.skip(f"{algorithm} does not offer class {cls}")
    shapes = WIDE + SMALL + LARGE if device == "cuda" else WIDE + SMALL[::7]
    wrong = []
    with poisoned_memory():
        for i, shape in enumerate(shared(algorithm, shapes, cls, "nhwc", device)):
            plain = make_case(shape, cls, "nhwc", device, EPILOGUES[i % len(EPILOGUES)])
            case, out, whole = of_ranges(plain, i)
            what = f"{shape} {case.epilogue}"
            into(out, case, algorithm, cls)
            assert ops.last_call()["algorithm"] == algorithm, what
            assert untouched(whole, out), what
            measure = yardstick(plain, cls)
            wrong += [f"{what} of a range: {text}" for text in measure.violations(out, algorithm, cls)]
            # Every call sees that its input is a range; and each alone.
            y = conv2d(case, algorithm, cls)
            wrong += [f"{what} input alone: {text}" for text in measure.violations(y, algorithm, cls)]
            whole.fill_(OUTSIDE)
            out.fill_(math.nan)
            into(out, plain, algorithm, cls)
            assert untouched(whole, out), what
            wrong += [f"{what} output alone: {text}" for text in measure.violations(out, algorithm, cls)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("algorithm", OWN)
def test_not_finite(algorithm, device):
    """Infinities and NaN within a range reach what they reach in a tensor of its own; what is beside it, nothing."""
    for cls in set(ALGORITHMS[algorithm]["accuracy"]) & {"fp32", "fp16"}:
        shapes = [WIDE[0], WIDE[1], WIDE[2], WIDE[8], Shape(2, 5, 11, 14, 11, 3, 3, padding=(1, 1)), WIDE[9]]
        for i, shape in enumerate(supported(algorithm, shapes, cls, "nhwc", device)):
            plain = make_case(shape, cls, "nhwc", device, EPILOGUES[1])
            plain.input[0, 0, 2, 4], plain.input[0, 1, 6, 2], plain.input[1, 2, 4, 6] = math.nan, math.inf, -math.inf
            case, out, whole = of_ranges(plain, i)
            into(out, case, algorithm, cls)
            expected = conv2d(plain, algorithm, cls)
            assert torch.equal(out.isfinite(), expected.isfinite()), shape
            assert not out.isfinite().all(), shape
            assert out.isfinite().any(), shape
            assert untouched(whole, out), shape


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("algorithm", OWN)
def test_one_channel(algorithm, device):
    shapes = [Shape(2, 1, 9, 8, 1, 3, 3), Shape(2, 1, 7, 5, 1, 1, 1)]
    for i, shape in enumerate(supported(algorithm, shapes, "fp32", "nhwc", device)):
        plain = make_case(shape, "fp32", "nhwc", device)
        case, out, whole = of_ranges(plain, i + 1)
        into(out, case, algorithm, "fp32")
        assert not yardstick(plain, "fp32").violations(out, algorithm, "fp32")
        assert untouched(whole, out)


@pytest.mark.parametrize("algorithm", OWN)
def test_an_empty_batch(algorithm):
    shape = WIDE[9] if algorithm == "null" else WIDE[1]
    plain = make_case(replace(shape, n=0), "fp32", "nhwc")
    if supported(algorithm, [shape], "fp32", "nhwc", "cpu"):
        into(fresh(plain), plain, algorithm, "fp32")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("algorithm", OWN)
def test_residuals(algorithm, cls, device):
    """A residual that is a range beside one of y: of a tensor as wide, another range of the same, of a narrower one and
    of its own."""
    if cls not in ALGORITHMS[algorithm]["accuracy"]:
        pytest.skip(f"{algorithm} does not offer class {cls}")
    epilogues = [
        Epilogue(residual=True), Epilogue(residual=True, bias=True, activation="relu"),
        Epilogue(residual=True, activation="leaky_relu", residual_after=True),
        Epilogue(residual=True, bias=True, activation="silu"),
    ]  # fmt: skip
    shapes = WIDE + SMALL[::3] + LARGE if device == "cuda" else WIDE + SMALL[::9]
    wrong = []
    with poisoned_memory():
        for i, shape in enumerate(shared(algorithm, shapes, cls, "nhwc", device)):
            plain = make_case(shape, cls, "nhwc", device, epilogues[i % len(epilogues)])
            k, unit = shape.k, 16 // plain.input.element_size()
            wide = -(-k // unit) * unit + unit
            assert plain.residual is not None
            both, whole_of_both = channels_of(plain.residual, 2 * wide, unit, OUTSIDE)
            measure = yardstick(plain, cls)
            for residual, out, whole in [
                (
                    channels_of(plain.residual, wide, 0, math.nan)[0],
                    *channels_of(both, wide, unit * (k % unit == 0), OUTSIDE),
                ),
                (both, whole_of_both[:, wide : wide + k], whole_of_both),
                (channels_of(plain.residual, wide, 0, math.nan)[0], *channels_of(both, wide + unit, unit, OUTSIDE)),
                (plain.residual, *channels_of(both, wide, 0, OUTSIDE)),
                (both, fresh(plain), None),
            ]:
                out.fill_(math.nan)
                into(out, plain, algorithm, cls, residual=residual)
                what = f"{shape} {plain.epilogue}, residual of {residual.stride(3)}, y of {out.stride(3)} channels"
                assert ops.last_call()["algorithm"] == algorithm, what
                wrong += [f"{what}: {text}" for text in measure.violations(out, algorithm, cls)]
                assert torch.equal(both, plain.residual), what
                if whole is whole_of_both:
                    both.fill_(OUTSIDE)
                assert whole is None or untouched(whole, out), what
                both.copy_(plain.residual)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("algorithm", OWN)
def test_a_residual_where_the_output_goes(algorithm, device):
    shape = Shape(2, 16, 9, 11, 16, 3, 3, padding=(1, 1))
    if not list(supported(algorithm, [shape], "fp32", "nhwc", device)):
        pytest.skip(f"{algorithm} does not take the shape")
    case = make_case(shape, "fp32", "nhwc", device, Epilogue(bias=True, residual=True, activation="relu"))
    out = case.residual.clone(memory_format=torch.preserve_format)
    into(out, case, algorithm, "fp32", residual=out)
    assert not yardstick(case, "fp32").violations(out, algorithm, "fp32")
    # Or a row of pixels further on.
    apart = shape.q * shape.k
    memory = torch.zeros(case.residual.numel() + apart, device=device)
    out, residual = (memory.as_strided(out.shape, out.stride(), first) for first in (0, apart))
    residual.copy_(case.residual)
    into(out, case, algorithm, "fp32", residual=residual)
    assert not yardstick(case, "fp32").violations(out, algorithm, "fp32")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("algorithm", OWN)
def test_a_residual_in_the_range_that_is_written(algorithm, cls, device):
    """The very range, and one that begins a vector further. One value of an image is far larger than the others: what
    a kernel then computes a second time reads the residual again."""
    if cls not in ALGORITHMS[algorithm]["accuracy"]:
        pytest.skip(f"{algorithm} does not offer class {cls}")
    small, large = (2.0**-8, 2.0**6) if cls == "fp16" else (2.0**-12, 2.0**16)
    shapes = [
        Shape(2, 16, 9, 11, 16, 3, 3, padding=(1, 1)),
        Shape(3, 128, *((14, 14) if device == "cuda" else (6, 8)), 128, 3, 3, padding=(1, 1)),
        Shape(2, 3, 33, 30, 72, 7, 7, stride=(2, 2), padding=(3, 3)),
        Shape(2, 32, 9, 10, 48, 1, 1),
    ]
    for shape in supported(algorithm, shapes, cls, "nhwc", device):
        case = make_case(shape, cls, "nhwc", device, Epilogue(bias=True, residual=True), scale=small)
        case.input[:, -1, 5, 7] = large
        expected, unit = conv2d(case, algorithm, cls), 16 // case.input.element_size()
        for apart in (0, unit):
            wide = shape.k + 3 * unit
            residual, whole = channels_of(case.residual, wide, unit + apart, OUTSIDE)
            out = whole[:, unit : unit + shape.k]
            into(out, case, algorithm, cls, residual=residual)
            torch.testing.assert_close(out, expected)
            assert apart != 0 or untouched(whole, out), shape


def test_ranges_that_overlap_nothing_else():
    """A dense block: each convolution reads the channels before and writes those behind, in one tensor."""
    torch.manual_seed(0)
    whole = torch.full((2, 9, 7, 48), math.nan).permute(0, 3, 1, 2)
    whole[:, :16] = torch.randn(2, 16, 9, 7)
    exact = whole[:, :16].double()
    for channels in (16, 32):
        weight = torch.randn(16, channels, 3, 3) / (9 * channels) ** 0.5
        shape = Shape(2, channels, 9, 7, 16, 3, 3, padding=(1, 1))
        case = Case(shape, whole[:, :channels], weight, None, None, Epilogue(activation="relu"))
        into(whole[:, channels : channels + 16], case, "implicit_gemm", "fp32")
        new = torch.nn.functional.conv2d(exact, weight.double(), padding=1).relu()
        exact = torch.cat([exact, new], 1)
    torch.testing.assert_close(whole.double(), exact, rtol=1e-5, atol=1e-5)


# --- The planner


def candidates(device, **sizes):
    return {row["algorithm"]: row for row in _C.candidates(_C.ConvProblem(**sizes), device)}


@pytest.mark.parametrize("device", [_C.h200_device(), _C.cpu_device(4)], ids=["h200", "cpu"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_costs(device, dtype):
    """Kernels that take ranges cost what they cost of tensors of their own; others a pass for each range."""
    device.has_kernels = True
    sizes = {"n": 8, "c": 64, "h": 28, "w": 28, "k": 64, "r": 3, "s": 3, "padding": (1, 1), "layout": "nhwc",
             "dtype": dtype}  # fmt: skip
    plain = candidates(device, **sizes)
    both = candidates(device, **sizes, x_channels=96, y_channels=128)
    for name, row in both.items():
        assert row["ok"] == plain[name]["ok"]
        if not row["ok"] or name == "torch":
            continue
        assert row["packed_bytes"] == plain[name]["packed_bytes"]
        passes = row["copies_x"] + row["copies_y"]
        assert passes in (0, 2)
        added = row["cost_us"] - plain[name]["cost_us"]
        bytes_of_pass = 2 * 8 * 64 * 28 * 28 * (4 if dtype == "float32" else 2)
        assert added >= passes * 1e6 * bytes_of_pass / device.bandwidth_bytes_per_s - 1e-9
    assert not both["implicit_gemm"]["copies_x"]
    assert both["implicit_gemm"]["cost_us"] == plain["implicit_gemm"]["cost_us"]


def test_residuals_of_ranges_go_to_kernels_that_read_them():
    """On the GPU the persistent kernel of implicit_gemm reads a residual as a tensor of its own: y is copied."""
    device, many = _C.h200_device(), {"n": 64, "c": 192, "h": 56, "w": 56, "k": 256, "r": 1, "s": 1}
    few = {"n": 1, "c": 192, "h": 128, "w": 128, "k": 64, "r": 3, "s": 3, "padding": (1, 1)}
    for sizes, copies in ((many, True), (few, False)):
        row = candidates(device, **sizes, layout="nhwc", dtype="float16", residual=True, y_channels=512)[
            "implicit_gemm"
        ]
        assert row["ok"]
        assert row["copies_y"] == copies
        assert row["config"].startswith("wgmma, single tile") != copies


def test_few_channels_are_copied_or_read_by_another_kernel():
    """The kernel for first layers takes no range of x; it may still be what runs."""
    device = _C.h200_device()
    sizes = {"n": 64, "c": 3, "h": 224, "w": 224, "k": 64, "r": 7, "s": 7, "stride": (2, 2), "padding": (3, 3),
             "layout": "nhwc"}  # fmt: skip
    written = candidates(device, **sizes, y_channels=96)["implicit_gemm"]
    assert written["config"].startswith("few channels")
    assert not written["copies_y"]
    read = candidates(device, **sizes, x_channels=8)["implicit_gemm"]
    assert read["copies_x"] == read["config"].startswith("few channels")


# --- The operator


def test_errors_name_the_argument():
    case = make_case(Shape(2, 8, 5, 6, 4, 3, 3), "fp32", "nhwc")
    good = fresh(case)
    into(good, case, "direct", "fp32")
    for out, text in [
        (good[:, :3], r"out has shape \[2, 3, 3, 4\]; expected \[2, 4, 3, 4\]"),
        (good.half(), "out is float16; expected input's float32"),
        (good[0], "out has shape"),
    ]:
        with pytest.raises(RuntimeError, match=text):
            into(out, case, "direct", "fp32")
    residual, scale = torch.zeros_like(good), torch.ones(8)
    with pytest.raises(RuntimeError, match=r"residual has shape \[2, 3, 3, 4\]; expected the output's \[2, 4, 3, 4\]"):
        into(good, case, "direct", "fp32", residual=residual[:, :3])
    with pytest.raises(RuntimeError, match="expected a residual or the other two"):
        into(good, case, "direct", "fp32", scale, scale, residual=residual)
    with pytest.raises(RuntimeError, match="packed weight has"):
        into(good, case, "direct", "fp32", packed=pack_weight(case.weight, 1, "direct", "fp32")[:-16])
