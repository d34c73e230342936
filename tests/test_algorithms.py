"""Every algorithm of the registry x the one table of shapes x layouts x classes, against float64.

A failure names the shape and what was violated. Nothing here has to be told that an algorithm exists.
"""

from __future__ import annotations

import re
import threading
from dataclasses import replace

import pytest
import torch
from harness import (
    ALGORITHMS,
    CLASSES,
    DEVICES,
    LAYOUTS,
    OWN,
    Epilogue,
    check,
    conv2d,
    conv2d_packed,
    differs,
    magnitude,
    make_case,
    pack_weight,
    problem,
    reference,
    refresh_packed,
    refusal,
    share,
    shared,
    supported,
    yardstick,
)
from layers import packed_algorithms
from shapes import (
    CROWDED,
    FEW_FILTERS,
    FIRST_LAYERS,
    LARGER,
    NARROW,
    SANITIZE,
    SHAPES,
    SMALL,
    WEIGHT_BOUND,
    Shape,
)

from fastconv import _C, ops, testing
from fastconv.testing import poisoned_memory

EPILOGUES = [
    Epilogue(bias=True),
    Epilogue(residual=True),
    Epilogue(activation="relu"),
    Epilogue(bias=True, activation="relu6"),
    Epilogue(bias=True, residual=True, activation="silu"),
    Epilogue(residual=True, activation="leaky_relu", negative_slope=0.2),
    Epilogue(bias=True, residual=True, activation="leaky_relu", negative_slope=0.1, residual_after=True),
    Epilogue(residual=True, activation="silu", residual_after=True),
    Epilogue(bias=True, activation="gelu"),
    Epilogue(residual=True, activation="gelu_tanh"),
    Epilogue(bias=True, activation="hardswish"),
    Epilogue(bias=True, residual=True, activation="sigmoid", residual_after=True),
]
# Sizes that matter to tiles and splits of a GPU's kernels: once each, for `direct` takes long.
LARGE_FOR_A_CPU = {*LARGER, *WEIGHT_BOUND, FEW_FILTERS[-1]}
# What each algorithm must be exercised by, so that a supports() that says no too often cannot pass by skipping.
MIN_SHAPES = {"null": 4}

classes = pytest.mark.parametrize("cls", CLASSES)
layouts = pytest.mark.parametrize("layout", LAYOUTS)
devices = pytest.mark.parametrize("device", DEVICES)
own = pytest.mark.parametrize("algorithm", OWN)  # on top: all on the same values, whose reference is remembered


@pytest.fixture(autouse=True)
def _poisoned():
    with poisoned_memory():
        yield


def offers(algorithm: str, cls: str) -> None:
    if cls not in ALGORITHMS[algorithm]["accuracy"]:
        pytest.skip(f"{algorithm} does not offer class {cls}")


@own
@devices
@classes
@layouts
def test_every_shape(algorithm, layout, cls, device):
    """Direct call within the bound; packed weights and tensors aligned to one element give the same bits."""
    offers(algorithm, cls)
    wrong = []
    for shape in shared(algorithm, SHAPES, cls, layout, device):
        case = make_case(shape, cls, layout, device)
        output = conv2d(case, algorithm, cls)
        whole = yardstick(case, cls)
        wrong += [f"{shape}: {text}" for text in whole.violations(output, algorithm, cls)]
        if device == "cpu" and shape in LARGE_FOR_A_CPU:
            continue
        packed = pack_weight(case.weight, shape.groups, algorithm, cls)
        # Of one channel, which is dense in both orders, the direct call takes NCHW.
        taken = "nhwc" if ops.format_of(case.input, case.weight) == torch.channels_last else "nchw"
        if differs(output, conv2d_packed(case, packed, algorithm, cls, taken), case, algorithm, cls, whole):
            wrong.append(f"{shape}: conv2d_packed differs from conv2d")
        if differs(
            output, conv2d(make_case(shape, cls, layout, device, offset=1), algorithm, cls), case, algorithm, cls, whole
        ):
            wrong.append(f"{shape}: tensors aligned to one element give another result")
    assert not wrong, "\n".join(wrong)


@devices
@classes
@layouts
def test_torch_passes_the_same_test(layout, cls, device):
    """PyTorch's own convolution through the operator: the operator's plumbing, and the bounds themselves."""
    wrong = []
    for shape in share(cls, device, SHAPES):
        case = make_case(shape, cls, layout, device)
        wrong += check(conv2d(case, "torch", cls), case, "torch", cls)
    for epilogue in share(cls, device, EPILOGUES):
        case = make_case(LARGER[0], cls, layout, device, epilogue)
        wrong += check(conv2d(case, "torch", cls), case, "torch", cls)
    assert not wrong, "\n".join(wrong)


@own
@devices
@classes
def test_epilogues(algorithm, cls, device):
    offers(algorithm, cls)
    wrong = []
    shapes = [shape for shape in supported(algorithm, SMALL, cls, "nchw", device) if shape.n * shape.p * shape.q > 20]
    for layout in LAYOUTS:
        for shape in (shapes[0], shapes[len(shapes) // 2]):
            for epilogue in share(cls, device, EPILOGUES):
                case = make_case(shape, cls, layout, device, epilogue)
                output = conv2d(case, algorithm, cls)
                whole = yardstick(case, cls)
                wrong += [f"{layout} {shape} {epilogue}: {text}" for text in whole.violations(output, algorithm, cls)]
                packed = pack_weight(case.weight, shape.groups, algorithm, cls)
                # One channel is dense in both layouts, and the strides say which conv2d takes.
                taken = "nhwc" if ops.format_of(case.input, case.weight) == torch.channels_last else "nchw"
                if differs(output, conv2d_packed(case, packed, algorithm, cls, taken), case, algorithm, cls, whole):
                    wrong.append(f"{layout} {shape} {epilogue}: conv2d_packed differs from conv2d")
    assert not wrong, "\n".join(wrong)


@own
def test_is_exercised(algorithm):
    """Nothing is skipped in silence: every algorithm meets shapes in every class that it declares, in both layouts."""
    for device in ALGORITHMS[algorithm]["devices"]:
        if device == "cuda" and not torch.cuda.is_available():
            continue  # the planner's answer for a CUDA device is the subject of test_planner
        for cls in ALGORITHMS[algorithm]["accuracy"]:
            for layout in LAYOUTS:
                taken = [shape for shape in SHAPES if not refusal(algorithm, shape, cls, layout, device)]
                assert len(taken) >= MIN_SHAPES.get(algorithm, 6), f"{device} {cls} {layout}: {len(taken)} shapes"
                assert any(shape.n == 0 for shape in taken) or algorithm == "null"


def test_every_shape_is_served():
    """Each shape of the table is taken by an algorithm of ours."""
    for shape in SHAPES:
        assert any(not refusal(name, shape, "fp32", "nchw", "cpu") for name in OWN), str(shape)


@own
def test_refusals_name_code_and_value(algorithm):
    for shape in SHAPES:
        text = refusal(algorithm, shape, "fp32", "nchw", "cpu")
        if text:
            code, _, reason = text.partition(": ")
            assert code.isidentifier(), text
            assert len(reason.split()) >= 3, text
            if shape.n == 0:
                continue  # an empty batch asks nothing of an algorithm
            case = make_case(shape, "fp32", "nchw")
            with pytest.raises(ops.UnsupportedError, match=re.escape(reason)):
                conv2d(case, algorithm, "fp32")


@own
@devices
@classes
@layouts
def test_integers_are_exact(algorithm, layout, cls, device):
    """Where all intermediate values are small integers or dyadic fractions, nothing may be rounded at all."""
    offers(algorithm, cls)
    if not ALGORITHMS[algorithm]["exact"] and cls == "bf16" and device == "cuda":
        pytest.skip(
            f"{algorithm} multiplies operands of 8 bits here, with irrational constants: integers do not survive"
        )
    wrong = []
    for shape in shared(algorithm, SHAPES[::-2], cls, layout, device):
        case = make_case(shape, cls, layout, device, Epilogue(bias=True), integers=True)
        output, expected = conv2d(case, algorithm, cls).double(), reference(case)
        if not ALGORITHMS[algorithm]["exact"]:
            # Rounding recovers the integer; docs/concepts/numerics.md, "Integers", derives how near it must be.
            output, before = output.round(), output
            half_product = cls == "fp16" or (algorithm == "winograd_fused" and cls == "tf32" and device == "cuda")
            limit = 2.0**-2 if half_product else 2.0**-10
            if shape.n and float((before - expected).abs().max()) > limit:
                wrong.append(f"{shape}: off by {float((before - expected).abs().max()):.3g} > {limit:.3g}")
        if not torch.equal(output, expected):
            wrong.append(f"{shape}: largest difference {float((output - expected).abs().max()):.3g}")
    assert not wrong, "\n".join(wrong)


@own
@devices
@pytest.mark.parametrize("cls", ["ieee", "fp32", "tf32"])
@pytest.mark.parametrize("scale", [1e30, 1e-30, 1e-40], ids=str)
def test_range(algorithm, scale, cls, device):
    """Any finite float32 input: large, small and subnormal ones come out finite and within the same bound."""
    offers(algorithm, cls)
    wrong = []
    for index, shape in enumerate(shared(algorithm, SMALL[::2], cls, "nchw", device)):
        case = make_case(shape, cls, list(LAYOUTS)[index % 2], device, scale=scale)
        wrong += check(conv2d(case, algorithm, cls), case, algorithm, cls)
    assert not wrong, "\n".join(wrong)


@own
@devices
@pytest.mark.parametrize("cls", ["ieee", "fp32", "tf32"])
def test_images_of_different_magnitude(algorithm, cls, device):
    """Each image of a batch is as accurate as it is alone, whatever its neighbours hold; so is each filter."""
    offers(algorithm, cls)
    wrong = []
    scales = torch.tensor([1e-30, 0.0, 1.0, 1e25], device=device)
    for layout in LAYOUTS:
        for shape in shared(algorithm, SMALL[::4], cls, layout, device):
            case = make_case(shape.with_batch(len(scales)), cls, layout, device)
            case.input.mul_(scales[:, None, None, None])
            filters = 10.0 ** torch.arange(0, shape.k, device=device).remainder(9).sub(4)
            case.weight.mul_(filters[:, None, None, None])
            output = conv2d(case, algorithm, cls)
            whole = yardstick(case, cls)
            for i in range(len(scales)):
                for k in {0, shape.k - 1}:
                    found = whole.part(i, k).violations(output[i : i + 1, k : k + 1], algorithm, cls)
                    wrong += [f"{shape} image {i} filter {k}: {text}" for text in found]
    assert not wrong, "\n".join(wrong)


@own
@devices
@classes
def test_many_images_of_a_narrow_map(algorithm, cls, device):
    """Where several images may share a piece of work: each is as accurate as it is alone, whatever the others hold."""
    offers(algorithm, cls)
    wrong = []
    large, small = (1e3, 1e-3) if cls in ("fp16", "bf16") else (1e25, 1e-30)
    # Images share work by the number of multiprocessors: ten are as good on a CPU, and faster.
    shapes = [shape.with_batch(10) for shape in NARROW] if device == "cpu" else NARROW + CROWDED
    for shape in shared(algorithm, shapes, cls, "nhwc", device):
        case = make_case(shape, cls, "nhwc", device)
        scales = torch.tensor([small, large, 1.0, 0.0, small, 1.0, 1.0, large], device=device)
        case.input.mul_(scales[torch.arange(shape.n, device=device) % len(scales), None, None, None])
        output = conv2d(case, algorithm, cls)
        whole = yardstick(case, cls)
        for i in (*range(8), shape.n - 2, shape.n - 1):
            found = whole.part(i, shape.k - 1).violations(output[i : i + 1, -1:], algorithm, cls)
            wrong += [f"{shape} image {i}: {text}" for text in found]
        case.input[1, 0, 0, 0], case.input[6, 0, 0, 0] = float("nan"), float("inf")
        finite = conv2d(case, algorithm, cls).isfinite().flatten(1).all(1)
        if finite.logical_not().nonzero().flatten().tolist() != [1, 6]:
            wrong.append(f"{shape}: NaN in image 1 and infinity in image 6, finite are {finite.tolist()}")
    assert not wrong, "\n".join(wrong)


@devices
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algorithm", [name for name in OWN if re.fullmatch(r"winograd_f\d", name)])
def test_channels_that_a_filter_ignores_cost_no_precision(algorithm, layout, device):
    """A scale belongs to 64 channels of a tile: next to values 10^12 times as large, others keep their precision."""
    if device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("other GPUs than Hopper have one scale for all channels of a tile")
    case = make_case(Shape(2, 200, 13, 9, 24, 3, 3, padding=(1, 1)), "fp32", layout, device)
    case.input[:, :50].mul_(1e12)
    case.input[:, 50:100] = 0.0
    case.weight[:, :50] = 0.0
    assert check(conv2d(case, algorithm, "fp32"), case, algorithm, "fp32") == []


@devices
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cls", ["fp32", "tf32"])
def test_small_windows_beside_large_values(cls, layout, device):
    """Where a scale belongs to the input under many outputs, those that see a millionth of it are as accurate."""
    wrong = []
    for shape in supported("implicit_gemm", FIRST_LAYERS, cls, layout, device):
        case = make_case(shape, cls, layout, device)
        case.input[..., : shape.w // 2].mul_(1e-6)
        case.input[..., : shape.h // 3, : shape.w // 3] = 0.0
        case.input[-1:, -1, shape.h // 2, shape.w // 4] = 1e7
        error = (conv2d(case, "implicit_gemm", cls).double() - reference(case)).abs()
        limit = 2.0**-10 if cls == "tf32" else 32 * 2.0**-24
        if bool((error > limit * magnitude(case)).any()):
            wrong.append(f"{shape}: {float((error / magnitude(case).clamp_min(1e-300)).max())}")
    assert not wrong, "\n".join(wrong)


@own
@devices
@pytest.mark.parametrize("cls", ["fp32", "fp16"])
def test_not_a_number_and_infinity_arrive(algorithm, cls, device):
    """A NaN or an infinity in the input is never swallowed: the outputs that depend on it are not finite."""
    offers(algorithm, cls)
    for shape in supported(algorithm, SMALL, cls, "nchw", device):
        if shape.n == 0 or shape.h < shape.r or min(shape.stride) > 1:
            continue
        for value in (float("nan"), float("inf")):
            case = make_case(shape, cls, "nchw", device)
            case.input[-1, 0, shape.h // 2, shape.w // 2] = value
            # On the CPU: PyTorch's CUDA convolutions may spread what is not finite beyond its windows.
            expected = reference(replace(case, input=case.input.cpu(), weight=case.weight.cpu())).to(device)
            output = conv2d(case, algorithm, cls)
            lost = torch.isfinite(output) & ~torch.isfinite(expected)
            assert not bool(lost.any()), f"{shape}: {value} was lost in {int(lost.sum())} outputs"
            if shape.n > 1:
                assert bool(torch.isfinite(output[:-1]).all()), f"{shape}: {value} reached another image"


@devices
@classes
@own
def test_zero_input(algorithm, cls, device):
    offers(algorithm, cls)
    for layout in LAYOUTS:
        for shape in supported(algorithm, SMALL[::3], cls, layout, device):
            case = make_case(shape, cls, layout, device, Epilogue(bias=True), scale=0.0)
            expected = case.bias[None, :, None, None].expand(shape.n, shape.k, shape.p, shape.q)
            assert torch.equal(conv2d(case, algorithm, cls), expected), str(shape)


@devices
@classes
@own
def test_refresh_packed(algorithm, cls, device):
    """Refreshing after a change equals packing afresh; without a change it alters nothing."""
    offers(algorithm, cls)
    for shape in supported(algorithm, SMALL[1::3], cls, "nchw", device):
        case = make_case(shape, cls, "nchw", device)
        packed = pack_weight(case.weight, shape.groups, algorithm, cls)
        snapshot = case.weight.clone()
        before = packed.clone()
        refresh_packed(packed, snapshot, case.weight, shape.groups, algorithm, cls)
        assert torch.equal(packed, before), f"{shape}: an unchanged weight was packed differently"
        output = conv2d_packed(case, packed, algorithm, cls, "nchw")

        for filters in ([0], [shape.k - 1], range(shape.k)):
            case.weight[list(filters)] *= -3.0
            refresh_packed(packed, snapshot, case.weight, shape.groups, algorithm, cls)
            fresh = pack_weight(case.weight, shape.groups, algorithm, cls)
            refreshed = conv2d_packed(case, packed, algorithm, cls, "nchw")
            assert torch.equal(refreshed, conv2d_packed(case, fresh, algorithm, cls, "nchw")), f"{shape} {filters}"
            if shape.n and bool(output.any()):
                assert not torch.equal(refreshed, output), f"{shape} {filters}: the change went unnoticed"
            output = refreshed


@pytest.mark.parametrize("offset", [0, 1])
@devices
@classes
@layouts
@pytest.mark.parametrize("algorithm", packed_algorithms())
def test_refresh_packed_sees_every_bit(algorithm, layout, cls, device, offset):
    """One changed bit, in filters of odd sizes that begin anywhere in memory: snapshot and packing follow."""
    offers(algorithm, cls)
    shapes = [Shape(1, c, 5, 6, 70, 3, 3, padding=(1, 1)) for c in (36, 37, 40)]
    shapes += [Shape(1, 129, 3, 3, 33, 1, 1), Shape(1, 5, 6, 6, 3, 5, 5)]
    for shape in supported(algorithm, shapes, cls, layout, device):
        case = make_case(shape, cls, layout, device, offset=offset)
        bits = torch.int32 if case.weight.element_size() == 4 else torch.int16
        packed = pack_weight(case.weight, shape.groups, algorithm, cls)
        snapshot = case.weight.clone()
        for filter in (0, shape.k // 2, shape.k - 1):
            for place in ((0, 0, 0), (-1, -1, -1), (shape.c // 2, 0, -1)):
                for bit in (1, torch.iinfo(bits).min):
                    index = (filter, *place)
                    case.weight.view(bits)[index] ^= bit
                    refresh_packed(packed, snapshot, case.weight, shape.groups, algorithm, cls)
                    assert torch.equal(snapshot.view(bits), case.weight.view(bits)), f"{shape} {index} {bit}"
        fresh = pack_weight(case.weight, shape.groups, algorithm, cls)
        refreshed = conv2d_packed(case, packed, algorithm, cls, layout)
        assert torch.equal(refreshed, conv2d_packed(case, fresh, algorithm, cls, layout)), str(shape)


@own
def test_last_call_names_what_ran(algorithm):
    shape = supported(algorithm, [shape for shape in SHAPES if shape.n], "fp32", "nchw", "cpu")[0]
    conv2d(make_case(shape, "fp32", "nchw"), algorithm, "fp32")
    call = ops.last_call()
    assert call["algorithm"] == algorithm
    assert call["class"] == "fp32"


def test_auto_never_takes_the_template():
    for shape in SHAPES:
        for device in (_C.cpu_device(2), _C.h200_device()):
            chosen = _C.choose("auto", problem(shape, "fp32"), device)["algorithm"]
            assert chosen != "null" or 0 in (shape.n, shape.k), str(shape)


@pytest.mark.sanitize
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("device", ["cuda"])
@classes
@layouts
@own
def test_for_sanitizer(algorithm, layout, cls, device):
    """Small shapes, every kernel: the subset for compute-sanitizer. The references are computed on the CPU: the tools
    find fault with cuDNN's kernels, too."""
    offers(algorithm, cls)
    wrong = []
    for shape in supported(algorithm, SANITIZE, cls, layout, device):
        epilogue = Epilogue(bias=True, residual=True, activation="relu")
        host, case = (make_case(shape, cls, layout, where, epilogue) for where in ("cpu", device))
        packed = pack_weight(case.weight, shape.groups, algorithm, cls)
        refresh_packed(
            packed, case.weight.clone(memory_format=torch.contiguous_format), case.weight, shape.groups, algorithm, cls
        )
        outputs = conv2d(case, algorithm, cls), conv2d_packed(case, packed, algorithm, cls, layout)
        if algorithm != "im2col_gemm" and not torch.equal(*outputs):  # the library's product may round by alignment
            wrong.append(f"{shape}: conv2d_packed differs from conv2d")
        limit = {"ieee": 1e-5, "fp32": 1e-5, "tf32": 5e-3, "fp16": 1e-2, "bf16": 8e-2}[cls]
        for errors in (testing.errors(y.cpu(), reference(host)) for y in outputs):
            if not errors.relative_l2 < limit:  # coarse: the precise bounds are test_every_shape's
                wrong.append(f"{shape}: {errors}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("algorithm", packed_algorithms())
def test_a_thread_without_a_context(algorithm):
    """A thread of autograd's may begin with our call: PyTorch has its memory, and nothing has asked for a context."""
    case = make_case(Shape(2, 16, 12, 12, 16, 3, 3, padding=(1, 1)), "fp16", "nhwc", "cuda")
    packed = pack_weight(case.weight, 1, algorithm, "fp16")
    results = [conv2d_packed(case, packed, algorithm, "fp16", "nhwc")]
    thread = threading.Thread(target=lambda: results.append(conv2d_packed(case, packed, algorithm, "fp16", "nhwc")))
    thread.start()
    thread.join()
    assert len(results) == 2
    assert torch.equal(*results)
