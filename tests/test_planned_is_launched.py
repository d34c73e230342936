"""What was planned is what is launched: the profiler's kernels against the plan's words, for every problem of the
golden file, in all three passes, on the device that runs the tests.

A plan's configuration names the kernel that it is for (KERNELS). Nothing else of fastconv runs with it, but the
conversion of NCHW input where the plan reads NHWC, and the kernels around a product that are listed with it. An input
gradient is made of convolutions: each begins with the flip of its filter, and its plan is what runs then.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from itertools import compress
from pathlib import Path

import pytest
import torch
from harness import CLASSES, LAYOUTS

import fastconv
from fastconv import _C, ops

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import golden_plans  # noqa: E402

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MARKER = "spin_kernel"  # of torch.cuda._sleep(): between one algorithm's kernels and the next one's
LIBRARYS = r"^(?!.*fastconv)"  # any kernel that is not ours
# (algorithm, what its configuration says): the kernel that does the work, and those that may run around it.
KERNELS = [
    ("direct", r"", r"direct::.*convolve", None),
    ("direct_tiled", r"^depthwise.* of 2 channels", r"direct_tiled::depthwise::pairs::.*convolve", None),
    ("direct_tiled", r"^depthwise", r"direct_tiled::depthwise::(?!pairs)", None),
    ("direct_tiled", r"filters that stay", r"direct_tiled::resident::convolve", None),
    ("direct_tiled", r"^few filters", r"direct_tiled::few_filters::convolve", None),
    ("direct_tiled", r"^1x1", r"direct_tiled::pointwise::convolve", None),
    ("direct_tiled", r"", r"direct_tiled::convolve", None),
    ("fused_unroll", r"^tile 16x", r"fused_unroll::.*convolve<.*, 16, 128>", None),
    ("fused_unroll", r"", r"fused_unroll::.*convolve<.*, 64, 64>", None),
    ("im2col_gemm", r"^in place", LIBRARYS, r"im2col_gemm::.*finish_chunk"),
    ("im2col_gemm", r"", r"im2col_gemm::.*unroll", r"im2col_gemm::.*finish_chunk"),
    ("two_stage", r"", r"two_stage::scalar_products", r"two_stage::sum_planes"),
    ("implicit_gemm", r"^wgmma, single tile", r"implicit_gemm::single_tile::convolve", None),
    (
        "implicit_gemm",
        r"^wgmma.*beforehand",
        r"implicit_gemm::persistent::convolve",
        r"persistent::(convert|reduce)",
    ),
    ("implicit_gemm", r"^wgmma", r"implicit_gemm::persistent::convolve", r"implicit_gemm::persistent::reduce_split_k"),
    ("implicit_gemm", r"^few channels", r"implicit_gemm::few_channels::convolve", None),
    ("implicit_gemm", r"", r"implicit_gemm::portable::convolve", None),
    (r"winograd_f\d", r"by wgmma", r"winograd_staged::gemm::.*multiply", r"winograd_staged::(in|out)put_transform"),
    (r"winograd_f\d", r"", r"winograd_staged::input_transform", r"winograd_staged::output_transform"),
    ("winograd_megakernel", r"x float16", r"winograd_megakernel::wgmma::convolve", None),
    ("winograd_megakernel", r"", r"winograd_megakernel::ffma::convolve", None),
    ("winograd_fused", r"^3 x", r"winograd_fused::split::convolve", None),
    ("winograd_fused", r"^1 x", r"winograd_fused::single::convolve", None),
]
# The same of weight gradients.
GRADIENT_KERNELS = [
    (
        "direct_tiled",
        r"^depthwise",
        r"direct_tiled::wgrad::.*sum_n(chw|hwc)<",
        r"direct_tiled::wgrad::.*reduce_split_k",
    ),
    (
        "winograd_f4",
        r"^F\(4x4\)",
        r"winograd_staged::wgrad::.*multiply_tiles<",
        r"winograd_staged::wgrad::.*transform|guess_image_scales",
    ),
    ("im2col_gemm", r"^in place", LIBRARYS, None),
    (
        "implicit_gemm",
        r"^wgmma.*converted on chip",
        r"implicit_gemm::wgrad::pointwise::multiply_pointwise<",
        r"implicit_gemm::wgrad::pointwise::reduce_split_k|guess_image_scales",
    ),
    (
        "implicit_gemm",
        r"^wgmma",
        r"implicit_gemm::wgrad::multiply_pixels<",
        r"implicit_gemm::wgrad::(convert_|reduce_split_k)|guess_image_scales",
    ),
]
FLIP = r"fastconv::.*\bflip<"
# PyTorch's kernels of the activations that a plan has behind the convolution.
ACTIVATIONS = {"hardswish": r"hardswish", "gelu": r"Gelu", "gelu_tanh": r"Gelu", "sigmoid": r"sigmoid"}
BEHIND = ACTIVATIONS | {"shuffled": r"copy|elementwise"}
PACKING = r"pack_filters|filter_transform"
TRANSPOSITION = r"fastconv::transpose_(fours|any)"


def expected(algorithm: str, config: str, kernels: list[tuple[str, str, str, str | None]]) -> tuple[str, str | None]:
    return next((own, around) for name, words, own, around in kernels
                if re.fullmatch(name, algorithm) and re.search(words, config))  # fmt: skip


def tile_filters(kernel: str) -> int | None:
    """Filters of a block, for kernels that are compiled for their number."""
    if match := re.search(r"persistent::Shape<[^<>]*?, (?:\([^()]*\))?\d+, (\d+), ", kernel):
        return int(match[1])
    if match := re.search(r"single_tile::Shape<[^<>,]*, (\d+), ", kernel):
        return int(match[1])
    if match := re.search(r"few_channels::Shape<[^<>,]*, (?:\([^()]*\))?\d+, (?:\([^()]*\))?(\d+)", kernel):
        return 8 * int(match[1])
    return None


# What a template's arguments say, in the words of the configuration: a kernel's name, these words of its arguments, and
# where the configuration has them.
SELECTED: list[tuple[str, Callable[..., str], str]] = [
    (
        r"winograd_staged::gemm::.*StationaryOperand<\([^()]*\)(\d), (?:\([^()]*\))?(\d+)>",
        lambda stationary, n: ("U stays", f"V stays, {n} filters", "U in stages")[int(stationary)],
        r"U stays|V stays, \d+ filters|U in stages",
    ),
    (
        r"winograd_staged::.*input_transform_groups<\d, (\w+)>",
        lambda vectors: f"channels by {4 if vectors == 'true' else 1}",
        r"channels by \d",
    ),
    (r"winograd_staged::.*input_transform_nhwc<.*, (\d)>", "channels by {}".format, r"channels by \d"),
    (
        r"winograd_staged::.*output_transform_nhwc<\w+, \d, (\d), \w+, (\w+), \w+, (\w+), (\w+)>",
        lambda n, *flags: ", ".join(
            [f"filters by {n}", *compress(("plain end", "M cached", "overlapped"), (flag == "true" for flag in flags))]
        ),
        r"filters by \d(?:, plain end)?(?:, M cached)?(?:, overlapped)?",
    ),
    (
        r"winograd_fused::.*convolve<.*StoreMode\)0(?:, \d)*(?:, \([^()]*End\)(\d))?[>}]",
        lambda end: f"{('any', 'residual', 'leaky', 'plain')[int(end or 0)]} end",
        r"\w+ end\b",
    ),
    (
        r"direct_tiled::pointwise::.*convolve<\w+, (\w+), (\w+)>",
        lambda x, weight: "vectors" if x == "true" else "vectors of weights" if weight == "true" else "elements",
        r"vectors of weights|vectors|elements",
    ),
    (
        r"portable::.*Shape<\w+, (?:\([^()]*\))?\d+, (?:\([^()]*\))?(\d+), (\w+)>",
        lambda tiles, vector: f"{8 * int(tiles)} filters, {'vectors' if vector == 'true' else 'elements'}",
        r"\d+ filters(?=, \d+ steps)|vectors|elements",
    ),
]


def differing(config: str, kernel: str) -> str | None:
    """What the kernel is compiled for, where the configuration says something else."""
    for name, words, place in SELECTED:
        if match := re.search(name, kernel):
            found = words(*match.groups())
            return None if found == ", ".join(re.findall(place, config)) else found
    return None


def check(algorithm: str, config: str, reads_nhwc: bool, kernels: list[str]) -> str | None:
    """What is wrong with the kernels that ran for a plan; None if nothing is."""
    if algorithm == "torch":
        return next((f"runs {name}" for name in kernels if "fastconv" in name), None)
    own, around = expected(algorithm, config, KERNELS)
    known = "|".join(filter(None, (own, around, PACKING)))
    mine = [name for name in kernels if not re.search(PACKING, name)]
    if not any(re.search(own, name) for name in mine):
        return f"no kernel {own}"
    transposed = sum(bool(re.search(TRANSPOSITION, name)) for name in mine)
    if transposed != reads_nhwc:
        return f"{transposed} transpositions, planned {int(reads_nhwc)}"
    behind = re.search(r", then (\w+)$", config)
    if behind and not any("at::native" in name and re.search(BEHIND[behind[1]], name) for name in mine):
        return f"no {behind[1]}"
    for name in mine:
        if "fastconv" in name and not re.search(f"{known}|{TRANSPOSITION}", name):
            return f"runs {name}"
        filters = tile_filters(name)
        if filters is not None and "beforehand" not in config and f"{filters} filters" not in config:
            return f"runs a tile of {filters} filters"
        if found := differing(config, name):
            return f"runs a kernel of {found}"
    return None


def check_gradient(algorithm: str, config: str, transpositions: int, kernels: list[str]) -> str | None:
    """The same of a weight gradient's plan."""
    own, around = expected(algorithm, config, GRADIENT_KERNELS)
    if not any(re.search(own, name) for name in kernels):
        return f"no kernel {own}"
    transposed = sum(bool(re.search(TRANSPOSITION, name)) for name in kernels)
    if transposed != transpositions:
        return f"{transposed} transpositions, planned {transpositions}"
    for name in kernels:
        if "fastconv" in name and not re.search(f"{own}|{around}|{TRANSPOSITION}", name):
            return f"runs {name}"
        columns = re.search(r"wgrad::Shape<[^<>,]*, (?:\([^()]*\))?\d+, (?:\([^()]*\))?(\d+), ", name)
        if columns and f"filters, {columns[1]} x " not in config:
            return f"runs a tile of {columns[1]} blocks of columns"
    return None


def check_convolutions(plans: list[tuple[str, str, bool]], count: int, kernels: list[str]) -> str | None:
    """The same of an input gradient that is made of `count` convolutions. plans: of those that differ, what `check`
    takes."""
    launched: list[list[str]] = []
    for name in kernels:
        if re.search(FLIP, name):
            launched.append([])
        elif launched:
            launched[-1].append(name)
    if len(launched) != count:
        return f"{len(launched)} filters are flipped, planned {count}"
    missing = list(plans)
    for its in launched:
        faults = [check(*plan, its) for plan in plans]
        if None not in faults:
            return faults[0]
        missing = [plan for plan in missing if faults[plans.index(plan)]]
    return f"{missing[0][1]} is not launched" if missing else None


def golden_cases(pass_: str = "forward") -> list[tuple[list[object], dict[str, str]]]:
    """Problems that the golden file plans for an H200, and its configurations."""
    found = []
    for row, device, of_pass, answers in golden_plans.read():
        configs = {name: value[0] for name, value in answers.items() if isinstance(value, tuple) and name != "torch"}
        if device == "h200" and of_pass == pass_ and row[0] > 0:  # an empty batch launches nothing
            found.append((row, configs))
    return found


def demangled(names: list[str]) -> list[str]:
    tool = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    return tool.stdout.splitlines()


class Tensors:
    """Random tensors of a problem of the golden file, and what its operators are told of it."""

    def __init__(self, row: list[object], generator: torch.Generator) -> None:
        n, c, h, w, k, r, s, *geometry, self.cls, self.layout, self.epilogue = row
        self.dtype, self.precision = CLASSES[self.cls]
        self.problem, self.generator, self.geometry = golden_plans.problem_of(row), generator, geometry
        words = self.epilogue.split()
        self.activation = next((word for word in words if word in {"relu", *ACTIVATIONS}), None)
        self.x_size, self.weight_size = (n, c, h, w), (k, c // geometry[-1], r, s)
        self.y_size = (n, k, self.problem.p, self.problem.q)

    def random(self, *shape: int) -> torch.Tensor:
        values = torch.randn(shape, device="cuda", generator=self.generator).to(self.dtype)
        return values.to(memory_format=LAYOUTS[self.layout]) if shape in (self.x_size, self.y_size) else values


def run_forward(row: list[object], names: list[str], generator: torch.Generator) -> tuple[list[tuple[str, str]], str]:
    """Runs the problem with each algorithm, a marker before each; (name, configuration that ran), and the layout, which
    for a tensor that is dense in both is that of its strides."""
    tensors = Tensors(row, generator)
    x, weight = tensors.random(*tensors.x_size), tensors.random(*tensors.weight_size)
    bias = tensors.random(tensors.y_size[1]) if "bias" in tensors.epilogue else None
    residual = tensors.random(*tensors.y_size) if "residual" in tensors.epilogue else None
    ran = []
    for name in names:
        torch.cuda._sleep(1)
        fastconv.conv2d(x, weight, bias, *tensors.geometry, algorithm=name, residual=residual,
                        precision=tensors.precision if tensors.dtype is torch.float32 else None,
                        activation=tensors.activation)  # fmt: skip
        ran.append((name, fastconv.last_call()["config"]))
    return ran, "nhwc" if ops.format_of(x, weight) == torch.channels_last else "nchw"


def launches(run: Callable[[], None]) -> list[list[str]]:
    """The kernels that ran after each of the markers."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    found: list[list[str]] = []
    for name in demangled([event.name for event in events]):
        if MARKER in name:
            found.append([])
        elif found and not name.startswith(("Memcpy", "Memset")):
            found[-1].append(name)
    return found[:-1]


def transposes(plan: dict[str, object], problem: _C.ConvProblem, layout: str) -> bool:
    is_both = problem.c == 1 or problem.h == problem.w == 1  # dense in either order
    return bool(plan["reads_nhwc"]) and layout == "nchw" and not is_both


def assert_none(wrong: list[str]) -> None:
    assert not wrong, f"{len(wrong)} plans are not what was launched:\n" + "\n".join(wrong[:10])


@needs_cuda
def test_what_was_planned_is_launched():
    generator = torch.Generator("cuda").manual_seed(2026)
    device = ops.device_info(torch.device("cuda"))
    wrong = []
    for row, configs in golden_cases():
        ran: list[tuple[str, str]] = []

        def run(row=row, configs=configs, ran=ran):
            found, row[12] = run_forward(row, [name for name in configs if name != "null"], generator)
            ran.extend(found)

        kernels_of = launches(run)
        assert len(kernels_of) == len(ran), "a marker is missing"
        problem = golden_plans.problem_of(row)
        plans = {plan["algorithm"]: plan for plan in _C.candidates(problem, device)}
        for (name, config), kernels in zip(ran, kernels_of, strict=True):
            fault = check(name, config, transposes(plans[name], problem, row[12]), kernels)
            if plans[name]["config"] != config:
                fault = f"was planned as {plans[name]['config']}"
            if fault:
                wrong.append(f"{name} {row}: {config}: {fault}; launched {kernels}")
    assert_none(wrong)


@needs_cuda
def test_what_was_planned_of_weight_gradients_is_launched():
    generator = torch.Generator("cuda").manual_seed(2027)
    device = ops.device_info(torch.device("cuda"))
    wrong = []
    for row, configs in golden_cases("backward_weight"):
        tensors = Tensors(row, generator)
        plans = {name: _C.choose_weight_gradient(name, tensors.problem, device) for name in configs}
        x, grad = tensors.random(*tensors.x_size), tensors.random(*tensors.y_size)

        def run(tensors=tensors, plans=plans, x=x, grad=grad):
            for name in plans:
                torch.cuda._sleep(1)
                ops.weight_gradient_kernel_op(x, grad, tensors.weight_size, *tensors.geometry,
                                              tensors.layout == "nhwc", name, tensors.precision)  # fmt: skip

        kernels_of = launches(run)
        assert len(kernels_of) == len(plans), "a marker is missing"
        for (name, plan), kernels in zip(plans.items(), kernels_of, strict=True):
            copies = 2 if plan["reads_nhwc"] and tensors.layout == "nchw" else 0
            if fault := check_gradient(name, plan["config"], copies, kernels):
                wrong.append(f"{name} {row}: {plan['config']}: {fault}; launched {kernels}")
    assert_none(wrong)


@needs_cuda
def test_what_was_planned_of_input_gradients_is_launched():
    generator = torch.Generator("cuda").manual_seed(2028)
    device = ops.device_info(torch.device("cuda"))
    wrong = []
    for row, _ in golden_cases("backward_input"):
        tensors = Tensors(row, generator)
        grad, weight = tensors.random(*tensors.y_size), tensors.random(*tensors.weight_size)
        row[12] = "nhwc" if ops.format_of(grad, weight) == torch.channels_last else "nchw"
        made = _C.choose_input_gradient("auto", golden_plans.problem_of(row), device)
        if made["method"] == "torch":
            continue
        plans, last = [_C.choose(made["algorithm"], one, device) for one in made["different"]], {}

        def run(tensors=tensors, made=made, grad=grad, weight=weight, last=last):
            torch.cuda._sleep(1)
            ops.input_gradient_by_convolutions(grad, weight, None, tensors.x_size, *tensors.geometry,
                                               made["method"] == "together", made["algorithm"],
                                               tensors.precision)  # fmt: skip
            last.update(fastconv.last_call())

        (kernels,) = launches(run)
        planned = [
            (plan["algorithm"], plan["config"], transposes(plan, one, row[12]))
            for plan, one in zip(plans, made["different"], strict=True)
        ]
        if made["flips"]:
            fault = check_convolutions(planned, made["convolutions"], kernels)
        else:
            fault = next((f"runs {name}" for name in kernels if "fastconv" in name), check(*planned[0], kernels))
        if (last["algorithm"], last["config"]) not in [plan[:2] for plan in planned]:
            fault = f"ran {last['algorithm']}: {last['config']}"
        if fault:
            wrong.append(f"{made['name']} {row}: {planned}: {fault}; launched {kernels}")
    assert_none(wrong)


SINGLE_TILE = "implicit_gemm::single_tile::convolve<single_tile::Shape<__half, 32, false> >"


@pytest.mark.parametrize(
    ("algorithm", "config", "reads_nhwc", "kernel", "fault"),
    [
        ("winograd_fused", "3 x float16", False, "winograd_fused::split::convolve<>", None),
        ("winograd_fused", "3 x float16", False, "winograd_fused::single::convolve<>", "no kernel"),
        ("winograd_fused", "3 x float16", True, "winograd_fused::split::convolve<>", "0 transpositions"),
        ("implicit_gemm", "wgmma, single tile, 64 filters", False, SINGLE_TILE, "tile of 32"),
        ("implicit_gemm", "wgmma, single tile, 32 filters", False, SINGLE_TILE, None),
    ],
)
def test_the_check_sees_another_kernel(algorithm, config, reads_nhwc, kernel, fault):
    found = check(algorithm, config, reads_nhwc, [f"fastconv::algos::{kernel}"])
    assert found is None if fault is None else fault in found


STAGED = "winograd_staged::output_transform_nhwc<float, 2, 2, false, true, false, {}, {}>"
PRODUCT = (
    "winograd_staged::gemm::multiply<winograd_staged::gemm::StationaryOperand<(winograd_staged::Stationary){}, {}> >"
)
POINTWISE = "direct_tiled::pointwise::convolve<true, {}, {}>"
FUSED = "winograd_fused::split::convolve<winograd_fused::Variant{{2, true, (StoreMode)0, 2, 1, 1{}}}>"
FUSED_SINGLE = "winograd_fused::single::convolve<__half, 0, true, (StoreMode){}, (winograd_fused::End){}>"
PORTABLE = "implicit_gemm::portable::convolve<implicit_gemm::portable::Shape<float, 3, {}, {}> >"
F2 = "F(2x2) 3 x float16 GEMM 16 x 98x128x64 by wgmma, {}, channels by 4, filters by 2, plain end{}, chunks 1"


@pytest.mark.parametrize(
    ("config", "kernel", "found"),
    [
        (F2.format("U stays", ", M cached"), STAGED.format("true", "false"), None),
        (F2.format("U stays", ", M cached, overlapped"), STAGED.format("true", "true"), None),
        (
            F2.format("U stays", ", M cached"),
            STAGED.format("true", "true"),
            "filters by 2, plain end, M cached, overlapped",
        ),
        (F2.format("U stays", ""), STAGED.format("true", "false"), "filters by 2, plain end, M cached"),
        (F2.format("V stays, 48 filters", ""), PRODUCT.format(1, 48), None),
        (F2.format("V stays, 64 filters", ""), PRODUCT.format(1, 48), "V stays, 48 filters"),
        (F2.format("U in stages", ""), PRODUCT.format(0, 64), "U stays"),
        (F2.format("U stays", ""), "winograd_staged::input_transform_groups<2, false>", "channels by 1"),
        ("1x1, tile 32 outputs, 9 bytes shared, vectors", POINTWISE.format("true", "true"), None),
        ("1x1, tile 32 outputs, 9 bytes shared, elements", POINTWISE.format("false", "true"), "vectors of weights"),
        ("tensor copies, plain end", FUSED.format(", (winograd_fused::End)3"), None),
        ("tensor copies, any end", FUSED.format(""), None),
        ("tensor copies, leaky end", FUSED.format(", (winograd_fused::End)1"), "residual end"),
        ("tensor copies, plain end", FUSED_SINGLE.format(0, 3), None),
        ("tensor copies, plain end", FUSED_SINGLE.format(0, 0), "any end"),
        ("tensor copies", FUSED_SINGLE.format(1, 0), None),
        ("tile 128 outputs, 48 filters, 9 steps of 32, vectors", PORTABLE.format(6, "true"), None),
        ("tile 128 outputs, 48 filters, 9 steps of 32, vectors", PORTABLE.format(8, "true"), "64 filters, vectors"),
        ("tile 128 outputs, 48 filters, 9 steps of 32, vectors", PORTABLE.format(6, "false"), "48 filters, elements"),
    ],
)
def test_the_check_sees_another_template(config, kernel, found):
    assert differing(config, f"void fastconv::algos::{kernel}(int)") == found


WGRAD = "void fastconv::algos::implicit_gemm::wgrad"
PIXELS = f"{WGRAD}::multiply_pixels<fastconv::algos::implicit_gemm::wgrad::Shape<__half, 3, 2, true, false> >()"
CONVERTED = "wgmma, 3 x float16, chunk 1x8x8 pixels, 128 filters, 2 x 64 channels, 4 splits"


@pytest.mark.parametrize(
    ("config", "kernels", "fault"),
    [
        (CONVERTED, [PIXELS, f"{WGRAD}::reduce_split_k<float>()", "at::native::copy()"], None),
        (CONVERTED, [f"{WGRAD}::reduce_split_k<float>()"], "no kernel"),
        (CONVERTED, [PIXELS, f"{WGRAD}::pointwise::reduce_split_k()"], "runs"),
        (CONVERTED, [PIXELS, "void fastconv::transpose_fours<float>()"], "1 transpositions, planned 0"),
        (CONVERTED.replace("2 x 64", "3 x 64"), [PIXELS], "tile of 2 blocks"),
        ("wgmma, 3 x float16, converted on chip, chunk 32 pixels", [PIXELS], "no kernel"),
    ],
)
def test_the_check_of_gradients_sees_another_kernel(config, kernels, fault):
    found = check_gradient("implicit_gemm", config, 0, kernels)
    assert found is None if fault is None else fault in found


FLIPPED, DIRECT = "void fastconv::flip<float>()", "void fastconv::algos::direct::convolve<float>()"
PLANS = [("direct", "", False), ("implicit_gemm", "wgmma, single tile, 32 filters", False)]


@pytest.mark.parametrize(
    ("kernels", "fault"),
    [
        ([FLIPPED, DIRECT, "at::native::copy()", FLIPPED, f"fastconv::algos::{SINGLE_TILE}"], None),
        ([FLIPPED, DIRECT, FLIPPED, DIRECT], "32 filters is not launched"),
        ([FLIPPED, DIRECT, FLIPPED, "at::native::copy()"], "no kernel"),
        ([FLIPPED, DIRECT], "1 filters are flipped, planned 2"),
    ],
)
def test_the_check_of_several_convolutions_sees_another_kernel(kernels, fault):
    found = check_convolutions(PLANS, 2, kernels)
    assert found is None if fault is None else fault in found


@pytest.mark.parametrize(
    ("pass_", "kernels"), [("forward", KERNELS), ("backward_weight", GRADIENT_KERNELS), ("backward_input", KERNELS)]
)
def test_every_plan_of_the_golden_file_names_its_kernel(pass_, kernels):
    cases = golden_cases(pass_)
    assert any(configs for _, configs in cases)
    for row, configs in cases:
        for name, config in configs.items():
            assert name == "null" or expected(name, config, kernels), row
