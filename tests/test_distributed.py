"""Swapped models in each way of torch.distributed: two processes, on the CPU and on two GPUs (tests/distributed.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import distributed
import processes
import pytest
import torch


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def findings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of each process."""
    if request.param == "cuda" and torch.cuda.device_count() < distributed.PROCESSES:
        pytest.skip(f"test_distributed on CUDA: {torch.cuda.device_count()} GPUs on this machine, two are needed")
    folder = Path(__file__).resolve().parent
    result = tmp_path_factory.mktemp("distributed") / "result.json"
    path = os.pathsep.join([str(folder.parent), os.environ.get("PYTHONPATH", "")])
    if request.param == "cpu":
        code = f"import runpy; runpy.run_path({str(folder / 'distributed.py')!r}, run_name='__main__')"
        run = processes.run(code, request.param, str(result))
    else:  # of several processes that are not forked each runs the file
        command = [sys.executable, str(folder / "distributed.py"), request.param, str(result)]
        environment = {**os.environ, "PYTHONPATH": path}
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(result.read_text())


@pytest.mark.parametrize("scenario", distributed.SCENARIOS)
def test_computes_and_trains_as_one_process(findings: list[dict[str, Any]], scenario: str) -> None:
    assert len(findings) == distributed.PROCESSES
    for process in findings:
        found = process[scenario]
        assert "exception" not in found, found["exception"]
        assert len(found["errors"]) >= 9  # the output, and every parameter's gradient
        assert max(found["errors"].values()) < 1e-5, found["errors"]
        assert found.get("ours", True)
        assert found.get("undone", True)


def test_a_part_of_the_batch_stays_a_part(findings: list[dict[str, Any]]) -> None:
    batches = ("batch", "uneven batch", "batch, distributed before the swap", "views, batch")
    for scenario in batches:
        assert findings[0][scenario]["placements"] == "(Shard(dim=0),)"


@pytest.mark.parametrize("scenario", distributed.TRAINED)
def test_training_keeps_channels_last(findings: list[dict[str, Any]], scenario: str) -> None:
    """Inputs, outputs and gradients of every layer; a parameter's gradient lies as the parameter."""
    assert all(process[scenario]["channels_last"] for process in findings)
