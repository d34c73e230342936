"""Networks by several processes."""

import json
import subprocess
import sys
import threading
import time
import types

import pytest
from test_benchmarks import HEAD
from test_networks import bench_one

from benchmarks.harness import results
from benchmarks.networks import suite, workers

CLASSES = ["fp32", "tf32", "fp16"]
PAIRS = [("lenet5", cls) for cls in CLASSES]


@pytest.fixture(scope="module")
def row():
    (found,) = bench_one(["eager"], ["torch_eager"], network="lenet5", image=28)
    return found


class Machine:
    """In place of the processes: beside others class fp32 has no memory, and the process of tf32 ends early."""

    def __init__(self, row, seconds=0.0):
        self.row, self.seconds, self.begun, self.lock, self.really_run = (
            row,
            seconds,
            [],
            threading.Lock(),
            subprocess.run,
        )

    def run(self, command, **options):
        if command[0] != sys.executable:
            return self.really_run(command, **options)
        job = json.loads(command[-1])
        pair = *job["networks"], *job["classes"]
        with self.lock:
            again = pair in self.begun
            self.begun.append(pair)
        time.sleep(self.seconds)
        if pair == ("lenet5", "tf32") and not again:
            return types.SimpleNamespace(returncode=1)
        no_memory = pair == ("lenet5", "fp32") and not again
        failures = {"torch_eager_nchw": "OutOfMemoryError: CUDA out of memory."} if no_memory else {}
        rows = [
            {**self.row, "network": pair[0], "class": pair[1], "mode": mode, "failures": failures}
            for mode in ("eager", "fused")
        ]
        held = results.read(job["out"])
        results.write(job["out"], {**held, "rows": [*held["rows"], *rows]})
        return types.SimpleNamespace(returncode=0)


def run(out, machine, monkeypatch, budget_s=None):
    monkeypatch.setattr(workers.subprocess, "run", machine.run)
    monkeypatch.setattr(workers, "SHORTEST_S", 0.0)
    return workers.run(["lenet5"], CLASSES, 2, out=out, report=lambda _: None, budget_s=budget_s, device="cpu")


def test_what_had_no_memory_beside_others_is_measured_alone(row, tmp_path, monkeypatch):
    results.write(tmp_path / "layers.json", {**HEAD, "rows": []})  # which every process finds beside its file
    machine = Machine(row)
    document = run(tmp_path / "networks.json", machine, monkeypatch)
    assert sorted(machine.begun[:3]) == sorted(PAIRS)
    assert machine.begun[3:] == PAIRS[:2]
    assert [each["failures"] for each in document["rows"]] == [{}] * 6
    assert document["failed"] == []


def test_what_was_not_measured_alone_is_measured_by_the_next_run(row, tmp_path, monkeypatch):
    out = tmp_path / "networks.json"
    document = run(out, Machine(row, seconds=1.0), monkeypatch, budget_s=0.5)
    assert len(document["missing"]) == 3  # a class that was not begun, and both that were not begun alone
    held = suite.held_of(results.read(out))
    assert {key[2] for key in held}.isdisjoint({"fp32", "tf32"})
    final = {**row, "class": "fp32", "mode": "graph", "failures": {"torch_eager_nchw": "OutOfMemoryError: alone."}}
    results.write(out, {**results.read(out), "rows": [final]})
    machine = Machine(row)
    again = run(out, machine, monkeypatch)
    assert final["failures"] in [each["failures"] for each in again["rows"]]  # as it was: nobody was beside it
    assert {key[2] for key in suite.held_of(again)} == {*CLASSES}
