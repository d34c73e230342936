"""The CPU as the planner sees it: its instruction set, and the rates that go with it."""

import json
import statistics
from pathlib import Path

import pytest
import torch

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


def test_the_choice_with_avx512_is_near_the_best_of_what_was_measured():
    """Of every layer of four networks in both layouts, two threads: docs/log/71-cpu-avx512.md."""
    device = _C.cpu_device(2, _C.InstructionSet.avx512)
    ratios = []
    for row in json.loads((MEASURED / "regret_avx512.json").read_text())["rows"]:
        geometry = {name: (row[name],) * 2 for name in ("stride", "padding", "dilation")}
        sizes = {name: row[name] for name in ("n", "c", "h", "w", "k", "r", "s", "groups", "layout")}
        choice = _C.choose("auto", _C.ConvProblem(**sizes, **geometry), device)["algorithm"]
        took = {name: us for name, us in row["algorithms"].items() if us} | {"torch": row["torch_us"]}
        ratios.append(took[choice] / min(took.values()))
    assert len(ratios) == 282
    assert statistics.geometric_mean(ratios) < 1.02
    assert statistics.quantiles(ratios, n=20)[-1] < 1.1
    assert max(ratios) < 1.5
