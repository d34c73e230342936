"""The CPU as the planner sees it: its instruction set, and the rates that go with it."""

import statistics
from pathlib import Path

import pytest
import torch

from benchmarks.harness import results
from benchmarks.regret import fit, problems
from fastconv import _C, ops


def test_the_device_names_the_instruction_set_of_this_machine():
    info = Path("/proc/cpuinfo")
    if not info.exists():
        pytest.skip("no /proc/cpuinfo on this machine")
    flags = set(next(line for line in info.read_text().splitlines() if line.startswith("flags")).split())
    expected = "avx2" if {"avx2", "fma", "bmi2"} <= flags else "generic"
    if expected == "avx2" and {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"} <= flags:
        expected = "avx512"
    assert ops.device_info(torch.device("cpu")).instruction_set == getattr(_C.InstructionSet, expected)


def test_rates_are_those_of_the_instruction_set_and_grow_with_the_threads():
    sets = [_C.InstructionSet.generic, _C.InstructionSet.avx2, _C.InstructionSet.avx512]
    rates = [_C.cpu_device(1, each).fp32_flops_per_s for each in sets]
    assert rates == sorted(set(rates))
    for each, rate in zip(sets, rates, strict=True):
        device = _C.cpu_device(3, each)
        assert (device.instruction_set, device.processors, device.fp32_flops_per_s) == (each, 3, 3 * rate)


MEASURED = Path(__file__).parent.parent / "benchmarks" / "results" / "cpu"


# AVX2 (docs/log/86-cpu-bar.md): the bar itself. AVX-512 (71, 132): one set of constants for two makers' processors,
# whose times differ by more than the bar; the worst is a first layer.
@pytest.mark.parametrize(
    ("file", "worst", "beyond", "most"),
    [("avx2", 1.1, 0, 1.06), ("avx512", 1.5, 12, 1.08), ("avx512_epyc", 1.2, 11, 1.09)],
)
def test_the_choice_is_near_the_best_of_what_was_measured(file, worst, beyond, most):
    """Of every layer of four networks in both layouts, two threads. most: all but a twentieth."""
    document = results.read(MEASURED / f"regret_{file}.json")
    assert fit.kind_of(document) == file.partition("_")[0]
    device, ratios = fit.device_of(document), []
    for row in document["rows"]:
        problem = problems.from_row(row).planned(torch.float32, "fp32", row["layout"])
        took = fit.times_of(row)
        ratios.append(took[_C.choose("auto", problem, device)["algorithm"]] / min(took.values()))
    assert len(ratios) == 282
    assert statistics.geometric_mean(ratios) < 1.01
    assert statistics.quantiles(ratios, n=20)[-1] < most
    assert sum(ratio > 1.1 for ratio in ratios) <= beyond
    assert max(ratios) < worst


@pytest.mark.parametrize(
    ("filters", "layout", "ragged"), [(255, "nhwc", True), (256, "nhwc", False), (255, "nchw", False)]
)
def test_filters_that_are_no_whole_vectors_cost_the_library_more(filters, layout, ragged):
    """Each pixel's filters are a row of the product in NHWC."""
    device = _C.cpu_device(2, _C.InstructionSet.avx2)
    us, wider = (
        _C.costs_us("im2col_gemm", [_C.ConvProblem(2, 256, 52, 52, k, 1, 1, layout=layout)], device, "forward")[0]
        for k in (filters, 256)
    )
    assert (us > 1.2 * wider) == ragged
