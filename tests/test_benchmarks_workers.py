"""Networks by several processes."""

import json
import subprocess
import sys
import threading
import types

from test_networks import bench_one

from benchmarks.harness import results
from benchmarks.networks import workers


def test_what_had_no_memory_beside_others_is_measured_alone(tmp_path, monkeypatch):
    (row,) = bench_one(["eager"], ["torch_eager"], network="lenet5", image=28)
    begun, lock, really_run = [], threading.Lock(), subprocess.run

    def run(command, **options):
        if command[0] != sys.executable:
            return really_run(command, **options)
        job = json.loads(command[-1])
        pair = *job["networks"], *job["classes"]
        with lock:
            again = pair in begun
            begun.append(pair)
        if pair == ("lenet5", "tf32") and not again:
            return types.SimpleNamespace(returncode=1)
        no_memory = pair == ("lenet5", "fp32") and not again
        failures = {"torch_eager_nchw": "OutOfMemoryError: CUDA out of memory."} if no_memory else {}
        its = {**row, "network": pair[0], "class": pair[1], "failures": failures}
        results.write(job["out"], {**results.read(job["out"]), "rows": [its]})
        return types.SimpleNamespace(returncode=0)

    monkeypatch.setattr(workers.subprocess, "run", run)
    classes, out = ["fp32", "tf32", "fp16"], tmp_path / "networks.json"
    document = workers.run(["lenet5"], classes, 2, out=out, report=lambda _: None, device="cpu")
    assert sorted(begun[:3]) == [("lenet5", "fp16"), ("lenet5", "fp32"), ("lenet5", "tf32")]
    assert begun[3:] == [("lenet5", "fp32"), ("lenet5", "tf32")]
    assert [each["failures"] for each in document["rows"]] == [{}] * 3
    assert document["failed"] == []
