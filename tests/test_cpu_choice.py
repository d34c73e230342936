"""The CPU as the planner sees it: its instruction set, and the rates that go with it."""

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
