"""Affine inputs, x read as input_activation(x * scale + shift), over the registry: kernels that take them, and a pass
before those that do not."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from embedded import OUTSIDE, channels_of, config, fresh, into
from harness import (
    ALGORITHMS,
    CLASSES,
    DEVICES,
    LAYOUTS,
    OWN,
    Case,
    Epilogue,
    make_case,
    pack_weight,
    reference,
    shared,
    supported,
    yardstick,
)
from metrics import UNIT_ROUNDOFF, Bound
from shapes import SMALL, Shape

import fastconv
from fastconv import _C, ops
from fastconv.testing import poisoned_memory

pytestmark = pytest.mark.usefixtures("full_precision")
ACTIVATIONS = {"none": lambda x: x, "relu": F.relu, "relu6": F.relu6, "silu": F.silu}
EPILOGUES = [Epilogue(), Epilogue(bias=True, activation="relu"), Epilogue(bias=True, activation="silu")]
# Filter tiles of each width, whole and not; channels that end within a block; strides; few pixels, several tiles.
POINTWISE = [
    Shape(3, 40, 9, 14, 72, 1, 1),
    Shape(2, 136, 13, 11, 192, 1, 1),
    Shape(1, 64, 7, 7, 128, 1, 1),
    Shape(5, 72, 15, 13, 100, 1, 1),
    Shape(2, 32, 15, 13, 80, 1, 1, stride=(2, 2)),
    Shape(3, 104, 14, 9, 192, 1, 1, stride=(3, 1)),
    Shape(2, 24, 9, 8, 16, 1, 1),
    Shape(2, 5, 9, 8, 7, 1, 1),
]
# What is padded is zero, not shift.
PADDED = [
    Shape(2, 16, 9, 7, 24, 3, 3, padding=(1, 1)),
    Shape(1, 72, 8, 7, 72, 1, 1, padding=(1, 2)),
    Shape(2, 8, 9, 8, 8, 3, 3, padding=(1, 1), groups=8),
    Shape(2, 8, 9, 8, 8, 1, 1, groups=8),
]
LARGE = [
    Shape(48, 240, 28, 28, 192, 1, 1),
    Shape(9, 1056, 14, 14, 192, 1, 1),
    Shape(5, 2160, 7, 7, 192, 1, 1),
    Shape(48, 384, 14, 14, 768, 1, 1),
    Shape(64, 256, 28, 28, 128, 1, 1),
    Shape(3, 2112, 14, 14, 1056, 1, 1),
    Shape(16, 96, 56, 56, 192, 1, 1),
    Shape(8, 256, 56, 56, 512, 1, 1, stride=(2, 2)),
]


def norm_of(shape: Shape, device: str, size: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and shift of each channel: of both signs, one of them zero."""
    generator = torch.Generator().manual_seed(shape.c + 7 * shape.k)
    scale, shift = (torch.randn(shape.c, generator=generator) * size for _ in range(2))
    scale[shape.c // 2] = 0.0
    return scale.to(device), shift.to(device)


def normed(case: Case, scale: torch.Tensor, shift: torch.Tensor, activation: str) -> torch.Tensor:
    """What the convolution reads, in float64."""
    x = case.input.double() * scale.double()[:, None, None] + shift.double()[:, None, None]
    return ACTIVATIONS[activation](x)


def violations(
    output: torch.Tensor,
    case: Case,
    scale: torch.Tensor,
    shift: torch.Tensor,
    activation: str,
    algorithm: str,
    cls: str,
) -> list[str]:
    """Against float64. The input that the convolution reads is rounded to its type, or its affine function in float32:
    independent errors of each product, which join those of the convolution."""
    s = case.shape
    exact = normed(case, scale, shift, activation)
    dtype = CLASSES[cls][0]
    measure = yardstick(replace(case, input=exact.to(dtype)), cls)

    def convolve(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, weight, None, s.stride, s.padding, s.dilation, s.groups)

    measure.expected = reference(replace(case, input=exact))
    terms = (case.input.double() * scale.double()[:, None, None]).abs() + shift.double().abs()[:, None, None]
    error = 2 * UNIT_ROUNDOFF[torch.float32] * terms + UNIT_ROUNDOFF[dtype] * exact.abs()
    noise = convolve(error.square(), case.weight.double().square()).sqrt()
    rms = float(measure.expected.square().mean().sqrt())
    if rms == 0.0:
        return []
    of_noise = float(noise.square().mean().sqrt())
    bias = of_noise / float(measure.expected.abs().mean())
    more = Bound(of_noise / rms, 6.0 * float(noise.max()) / rms, bias)
    return measure.violations(output, algorithm, cls, more)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("algorithm", OWN)
def test_many_shapes(algorithm, cls, device):
    if cls not in ALGORITHMS[algorithm]["accuracy"]:
        pytest.skip(f"{algorithm} does not offer class {cls}")
    step = 3 if device == "cuda" else 9
    shapes = POINTWISE + PADDED + [shape for shape in SMALL[::step] if shape.n > 0]
    if device == "cuda" and algorithm == "implicit_gemm":
        shapes += LARGE
    wrong = []
    with poisoned_memory():
        for i, shape in enumerate(shared(algorithm, shapes, cls, "nhwc", device)):
            for layout in ("nhwc", "nchw")[: 2 if i % 3 == 0 else 1]:
                activation = list(ACTIVATIONS)[i % len(ACTIVATIONS)]
                case = make_case(shape, cls, layout, device, EPILOGUES[i % len(EPILOGUES)])
                scale, shift = norm_of(shape, device)
                out = fresh(case, layout)
                into(out, case, algorithm, cls, scale, shift, activation)
                assert ops.last_call()["algorithm"] == algorithm
                found = violations(out, case, scale, shift, activation, algorithm, cls)
                wrong += [f"{shape} {layout} {case.epilogue} {activation} ({config()}): {text}" for text in found]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("activation", ["none", "relu", "relu6"])
@pytest.mark.parametrize("cls", ["fp32", "tf32", "fp16", "bf16"])
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_that_norm(cls, activation):
    """Every filter tile and every way through the kernel, with each activation; in both layouts of y."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    met = set()
    for i, shape in enumerate([*POINTWISE[:6], *LARGE]):
        for layout in LAYOUTS:
            case = make_case(shape, cls, layout, "cuda", EPILOGUES[i % len(EPILOGUES)])
            scale, shift = norm_of(shape, "cuda")
            out = fresh(case, layout)
            into(out, case, "implicit_gemm", cls, scale, shift, activation)
            assert not violations(out, case, scale, shift, activation, "implicit_gemm", cls), (shape, config())
            met.add("of an affine input" in config())
    assert True in met


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cls", ["fp32", "tf32", "fp16", "bf16"])
def test_not_finite(cls, device, activation):
    """An output is finite, and right, if all that it reads is so behind the norm: a ReLU makes zero of -infinity."""
    tolerance = {"fp32": 1e-5, "tf32": 2e-3, "fp16": 4e-3, "bf16": 3e-2}[cls]
    for algorithm in ("implicit_gemm", "im2col_gemm"):
        for shape in supported(algorithm, [POINTWISE[1], POINTWISE[4], POINTWISE[7]], cls, "nhwc", device):
            case = make_case(shape, cls, "nhwc", device)
            scale, shift = norm_of(shape, device)
            last = shape.c - 1
            scale[0], scale[1], scale[last] = 1.0, -0.5, 2.0
            for n, channel, h, w, value in [
                (0, 0, 0, 0, math.nan), (0, 0, 0, 6, math.inf), (0, 1, 0, 3, math.inf), (0, 1, 6, 0, -math.inf),
                (1, last, 6, 3, math.nan), (1, last, 6, 6, math.inf), (1, last, 0, 0, -math.inf),
                (1, shape.c // 2, 3, 3, math.inf),
            ]:  # fmt: skip
                case.input[n, channel, h, w] = value
            out = fresh(case)
            into(out, case, algorithm, cls, scale, shift, activation)
            exact = normed(case, scale, shift, activation)[:, :, :: shape.stride[0], :: shape.stride[1]]
            finite = exact.isfinite().all(1, keepdim=True).expand_as(out)
            assert torch.equal(out.isfinite(), finite), (algorithm, shape)
            weight = case.weight.double()
            clean = exact.nan_to_num(0.0, 0.0, 0.0)
            error = (out.double() - F.conv2d(clean, weight)).abs()
            limit = tolerance * F.conv2d(clean.abs(), weight.abs()) + 1e-6
            assert bool((error <= limit)[finite].all()), (algorithm, shape)
            assert 0 < int(finite.sum()) < finite.numel()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cls", ["fp32", "tf32"])
def test_scales(cls, device):
    """What a kernel splits into halves is what the norm makes of x: tiny at first and large behind, or the other way
    round, whatever x was, beside zeros, and beyond what float16 holds."""
    shape = POINTWISE[1]
    case = make_case(shape, cls, "nhwc", device)
    for low, high in [(1e-6, 1e6), (1e20, 1e-20), (1e-30, 1e-30), (1e30, 1e4), (0.0, 1e-3)]:
        for order in (1, -1):
            scale, shift = norm_of(shape, device)
            sizes = torch.where(torch.arange(shape.c, device=device)[::order] < 40, low, high) if order == 1 else (
                torch.where(torch.arange(shape.c, device=device) < 40, high, low)
            )  # fmt: skip
            scale, shift = scale * sizes, shift * sizes
            out = fresh(case)
            into(out, case, "implicit_gemm", cls, scale, shift, "relu")
            exact, weight = normed(case, scale, shift, "relu"), case.weight.double()
            limit = {"fp32": 2e-6, "tf32": 2e-3}[cls] * F.conv2d(exact.abs(), weight.abs())
            assert bool(((out.double() - F.conv2d(exact, weight)).abs() <= limit).all()), (low, high, order, config())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cls", ["fp32", "tf32", "fp16", "bf16"])
def test_a_dense_block(cls, device):
    """Norm, activation, 1x1, then 3x3 into the channels behind, in one tensor without any other pass."""
    dtype = CLASSES[cls][0]
    torch.manual_seed(1)
    whole, _ = channels_of(torch.full((3, 96, 14, 13), math.nan, dtype=dtype, device=device), 96, 0, math.nan)
    whole[:, :32] = torch.randn(3, 32, 14, 13).to(device, dtype)
    exact = whole[:, :32].double()
    for channels in (32, 64):
        bottleneck = Shape(3, channels, 14, 13, 128, 1, 1)
        wide = Shape(3, 128, 14, 13, 32, 3, 3, padding=(1, 1))
        first = torch.randn(128, channels, 1, 1).to(device, dtype) / channels**0.5
        second = torch.randn(32, 128, 3, 3).to(device, dtype) / (9 * 128) ** 0.5
        scale, shift = (torch.rand(channels) + 0.5).to(device), torch.randn(channels).to(device)
        middle = fresh(Case(bottleneck, whole, first, None, None, Epilogue()))
        case = Case(bottleneck, whole[:, :channels], first, None, None, Epilogue(activation="relu"))
        into(middle, case, "implicit_gemm", cls, scale, shift, "relu")
        assert not middle.isnan().any()
        case = Case(wide, middle, second, None, None, Epilogue())
        into(whole[:, channels : channels + 32], case, "implicit_gemm", cls)
        before = (exact * scale.double()[:, None, None] + shift.double()[:, None, None]).relu()
        behind = F.conv2d(F.conv2d(before, first.double()).relu(), second.double(), padding=1)
        exact = torch.cat([exact, behind], 1)
    tolerance = {"fp32": 1e-5, "tf32": 5e-3, "fp16": 1e-2, "bf16": 6e-2}[cls]
    torch.testing.assert_close(whole.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
def test_scale_and_shift_anywhere(device):
    """Within a larger tensor, at any element, between NaN; and of x within one."""
    shape = POINTWISE[1]
    case = make_case(shape, "fp16", "nhwc", device)
    scale, shift = norm_of(shape, device)
    expected = fresh(case)
    into(expected, case, "implicit_gemm", "fp16", scale, shift, "relu")
    for offset in (1, 2, 3):
        around = torch.full((2 * shape.c + 8,), math.nan, device=device)
        parts = [around[first : first + shape.c] for first in (offset, offset + shape.c + 1)]
        parts[0].copy_(scale)
        parts[1].copy_(shift)
        x, _ = channels_of(case.input, shape.c + 24, 8 * (offset - 1), math.nan)
        out, whole = channels_of(fresh(case), shape.k + 16, 8, OUTSIDE)
        into(out, replace(case, input=x), "implicit_gemm", "fp16", *parts, "relu")
        assert torch.equal(out, expected)
        assert bool((whole[:, :8] == OUTSIDE).all())
        assert bool((whole[:, 8 + shape.k :] == OUTSIDE).all())


@pytest.mark.parametrize("algorithm", OWN)
def test_one_channel_and_an_empty_batch(algorithm):
    shapes = [Shape(n, 1, 4, 5, 1, r, r) for n in (2, 0) for r in (1, 3)]
    for shape in supported(algorithm, shapes, "fp32", "nchw", "cpu"):
        case = make_case(shape, "fp32", "nchw")
        scale, shift = torch.tensor([2.0]), torch.tensor([-1.0])
        out = fresh(case, "nchw")
        into(out, case, algorithm, "fp32", scale, shift, "relu")
        if shape.n > 0:
            exact = F.conv2d((case.input.double() * 2 - 1).relu(), case.weight.double())
            torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


# --- The planner


def candidate(device, algorithm="implicit_gemm", **sizes):
    rows = _C.candidates(_C.ConvProblem(**sizes), device)
    return next(row for row in rows if row["algorithm"] == algorithm)


def test_what_is_normed_apart():
    device = _C.h200_device()
    sizes = {"n": 48, "c": 240, "h": 28, "w": 28, "k": 192, "r": 1, "s": 1, "layout": "nhwc"}
    for dtype in ("float32", "float16", "bfloat16"):
        for activation in ("none", "relu", "relu6"):
            row = candidate(device, **sizes, dtype=dtype, input_activation=activation)
            assert row["ok"]
            assert not row["norms_apart"]
            assert "of an affine input" in row["config"]
    for changed in (
        {"r": 3, "s": 3},
        {"padding": (1, 1)},
        {"input_activation": "silu"},
        {"k": 32},
        {"c": 242},
        {"groups": 2},
    ):
        row = candidate(device, **sizes | {"input_activation": "relu"} | changed)
        assert row["ok"]
        assert row["norms_apart"]
        assert row["config"].endswith(", input normed before")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("precision"), ["fp32", "tf32"])
def test_costs(dtype, precision):
    """An affine input costs something, and less than a pass over x."""
    device = _C.h200_device()
    for c, hw in [(96, 56), (384, 28), (2112, 14)]:
        sizes = {"n": 48, "c": c, "h": hw, "w": hw, "k": 192, "r": 1, "s": 1, "layout": "nhwc", "dtype": dtype,
                 "precision": precision}  # fmt: skip
        plain, affine = candidate(device, **sizes), candidate(device, **sizes, input_activation="relu")
        assert affine["packed_bytes"] == plain["packed_bytes"]
        moved = 2 * 48 * c * hw * hw * (4 if dtype == "float32" else 2)
        assert plain["cost_us"] <= affine["cost_us"] < plain["cost_us"] + 1e6 * moved / device.bandwidth_bytes_per_s


# --- The operator


def test_errors_name_the_argument():
    case = make_case(Shape(2, 8, 5, 6, 4, 3, 3), "fp32", "nhwc")
    out, scale = fresh(case), torch.ones(8)
    layer = fastconv.Conv2d(8, 4, 3, algorithm="direct").requires_grad_(False)
    for arguments, text in [
        ((scale, None), "one of scale and shift is None; expected both or neither"),
        ((None, scale), "one of scale and shift is None; expected both or neither"),
        ((scale[:7], scale), r"scale has shape \[7\]; expected contiguous float32 \[8\]"),
        ((scale, scale.double()), r"shift has shape \[8\]; expected contiguous float32 \[8\]"),
        ((scale, torch.ones(16)[::2]), r"shift has shape \[8\]; expected contiguous float32 \[8\]"),
        ((scale, scale, "leaky_relu"), "input_activation is 'leaky_relu'"),
        ((scale, scale, "tanh"), "input_activation is 'tanh'"),
        ((None, None, "relu"), "input_activation is 'relu'; expected none"),
    ]:
        with pytest.raises((RuntimeError, ValueError), match=text):
            into(out, case, "direct", "fp32", *arguments)
        # A layer's call goes another way: by modules, which say what is wrong.
        assert layer._convolve_around(case.input, None, out, *(*arguments, "none")[:3]) is None
    for wrong, text in [
        (out[:, :3], r"out has shape \[2, 3, 3, 4\]; expected \[2, 4, 3, 4\]"),
        (out.double(), "out is float64; expected input's float32"),
    ]:
        with pytest.raises(RuntimeError, match=text):
            into(wrong, case, "direct", "fp32")
        assert layer._convolve_around(case.input, None, wrong, None, None, "none") is None
    with pytest.raises(RuntimeError, match="expected a residual or the other two"):
        into(out, case, "direct", "fp32", scale, scale, residual=fresh(case))
    packed = pack_weight(case.weight, 1, "direct", "fp32")
    with pytest.raises(RuntimeError, match="expected 11 integers"):
        torch.ops.fastconv.conv2d_packed_into(
            out, case.input, packed, None, None, None, None, [1] * 10, True, "direct", "fp32", "none", 0.0, "none",
            False,
        )  # fmt: skip
