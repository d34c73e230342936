"""What was planned is what is launched: the profiler's kernels against the plan's words, for every problem of the
golden file on the device that runs the tests.

A plan's configuration names the kernel that it is for (KERNELS). Nothing else of fastconv runs with it, but the
conversion of NCHW input where the plan reads NHWC, and the kernels around a product that are listed with it.
"""

from __future__ import annotations

import re
import subprocess
import sys
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
# (algorithm, what its configuration says): the kernel that does the work, and those that may run around it.
KERNELS = [
    ("direct", r"", r"direct::.*convolve", None),
    ("direct_tiled", r"^depthwise", r"direct_tiled::depthwise::", None),
    ("direct_tiled", r"filters that stay", r"direct_tiled::resident::convolve", None),
    ("direct_tiled", r"^few filters", r"direct_tiled::few_filters::convolve", None),
    ("direct_tiled", r"^1x1", r"direct_tiled::pointwise::convolve", None),
    ("direct_tiled", r"", r"direct_tiled::convolve", None),
    ("fused_unroll", r"^tile 16x", r"fused_unroll::.*convolve<.*, 16, 128>", None),
    ("fused_unroll", r"", r"fused_unroll::.*convolve<.*, 64, 64>", None),
    ("im2col_gemm", r"^in place", r"(?!fastconv).*", r"im2col_gemm::.*finish_chunk"),
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
PACKING = r"pack_filters|filter_transform"
TRANSPOSITION = r"fastconv::transpose_(fours|any)"


def expected(algorithm: str, config: str) -> tuple[str, str | None]:
    return next((own, around) for name, words, own, around in KERNELS
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


def check(algorithm: str, config: str, reads_nhwc: bool, kernels: list[str]) -> str | None:
    """What is wrong with the kernels that ran for a plan; None if nothing is."""
    own, around = expected(algorithm, config)
    known = "|".join(filter(None, (own, around, PACKING)))
    mine = [name for name in kernels if not re.search(PACKING, name)]
    if not any(re.search(own, name) for name in mine):
        return f"no kernel {own}"
    turned = sum(bool(re.search(TRANSPOSITION, name)) for name in mine)
    if turned != reads_nhwc:
        return f"{turned} transpositions, planned {int(reads_nhwc)}"
    for name in mine:
        if "fastconv" in name and not re.search(f"{known}|{TRANSPOSITION}", name):
            return f"runs {name}"
        filters = tile_filters(name)
        if filters is not None and "beforehand" not in config and f"{filters} filters" not in config:
            return f"runs a tile of {filters} filters"
    return None


def golden_cases() -> list[tuple[list[object], dict[str, str]]]:
    """Problems that the golden file plans for an H200, and its configurations."""
    found = []
    for row, device, pass_, answers in golden_plans.read():
        configs = {name: value[0] for name, value in answers.items() if isinstance(value, tuple) and name != "torch"}
        if device == "h200" and pass_ == "forward" and row[0] > 0:  # an empty batch launches nothing
            found.append((row, configs))
    return found


def demangled(names: list[str]) -> list[str]:
    tool = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    return tool.stdout.splitlines()


def run_all(
    row: list[object], configs: dict[str, str], generator: torch.Generator
) -> tuple[list[tuple[str, str]], str]:
    """Runs the problem with each algorithm that has a plan, a marker before each; (name, configuration that ran), and
    the layout, which for a tensor that is dense in both is that of its strides."""
    n, c, h, w, k, r, s, stride, padding, dilation, groups, cls, layout, epilogue = row
    dtype, precision = CLASSES[cls]
    p, q = golden_plans.problem_of(row).p, golden_plans.problem_of(row).q

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator).to(dtype)

    x, weight = random(n, c, h, w).to(memory_format=LAYOUTS[layout]), random(k, c // groups, r, s)
    bias = random(k) if "bias" in epilogue else None
    residual = random(n, k, p, q).to(memory_format=LAYOUTS[layout]) if "residual" in epilogue else None
    torch.cuda.synchronize()
    ran = []
    for name in configs:
        torch.cuda._sleep(1)
        fastconv.conv2d(x, weight, bias, stride, padding, dilation, groups, algorithm=name, residual=residual,
                        precision=precision if dtype is torch.float32 else None,
                        activation="relu" if "relu" in epilogue else None)  # fmt: skip
        ran.append((name, fastconv.last_call()["config"]))
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    return ran, "nhwc" if ops.format_of(x, weight) == torch.channels_last else "nchw"


@needs_cuda
def test_what_was_planned_is_launched():
    from torch.profiler import ProfilerActivity, profile

    generator = torch.Generator("cuda").manual_seed(2026)
    device = ops.device_info(torch.device("cuda"))
    wrong = []
    for row, configs in golden_cases():
        configs = {name: config for name, config in configs.items() if name != "null"}
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            ran, row[12] = run_all(row, configs, generator)
        events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        events.sort(key=lambda event: event.time_range.start)
        launches: list[list[str]] = []
        for name in demangled([event.name for event in events]):
            if MARKER in name:
                launches.append([])
            elif launches and not name.startswith(("Memcpy", "Memset")):
                launches[-1].append(name)
        assert len(launches) == len(ran) + 1, "a marker is missing"
        plans = {plan["algorithm"]: plan for plan in _C.candidates(golden_plans.problem_of(row), device)}
        for (name, config), kernels in zip(ran, launches, strict=False):
            planned = plans[name]
            is_both = row[1] == 1 or row[2] == row[3] == 1  # dense in either order
            fault = check(name, config, planned["reads_nhwc"] and row[12] == "nchw" and not is_both, kernels)
            if planned["config"] != config:
                fault = f"was planned as {planned['config']}"
            if fault:
                wrong.append(f"{name} {row}: {config}: {fault}; launched {kernels}")
    assert not wrong, f"{len(wrong)} plans are not what was launched:\n" + "\n".join(wrong[:10])


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


def test_every_plan_of_the_golden_file_names_its_kernel():
    for row, configs in golden_cases():
        for name, config in configs.items():
            assert name == "null" or expected(name, config), row
