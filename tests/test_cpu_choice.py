"""The planner's choice on a CPU, held to rows that were measured with each instruction set."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.harness import results
from benchmarks.regret.problems import from_row
from fastconv import _C, ops

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "cpu"
FILES = sorted(RESULTS.glob("regret_*.json"))
LIMIT = 1.1  # times the better of PyTorch and our best algorithm


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


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_measured_layer_is_slower_than_the_limit(path):
    document = results.read(path)
    device = _C.cpu_device(document["threads"], getattr(_C.InstructionSet, path.stem.removeprefix("regret_")))
    slow = []
    for row in document["rows"]:
        problem = from_row(row)
        choice = _C.choose("auto", problem.planned(torch.float32, "fp32", row["layout"]), device)["algorithm"]
        times = dict(row["algorithms"])
        times["torch"] = min(us for us in (row["torch_us"], times.get("torch")) if us)  # the same call, twice
        if not times.get(choice, float("inf")) <= LIMIT * row["best_us"]:
            slow.append(
                f"{problem.layer}, {row['layout']}: {choice} {times.get(choice)}, best {row['best']} {row['best_us']}"
            )
    assert not slow, f"{len(slow)} of {len(document['rows'])}:\n" + "\n".join(slow)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_rows_are_the_layers_of_the_demo(path):
    document = json.loads(path.read_text())
    networks = {name for row in document["rows"] for name in row["networks"]}
    assert networks == {"vgg16", "resnet50", "densenet161", "yolov3"}
    assert {row["layout"] for row in document["rows"]} == {"nchw", "nhwc"}
    assert {row["n"] for row in document["rows"]} == {2}
