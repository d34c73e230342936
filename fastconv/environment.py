"""What something ran on: GPU, driver, versions, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from fastconv import measured, ops

SCHEMA = 1


def _output(command: list[str], cwd: Path | None = None) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=cwd, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str:
    """FASTCONV_COMMIT, else git's commit of the checkout that this package is imported from ("-dirty" if the code
    differs from it), else "unknown"."""
    return os.environ.get("FASTCONV_COMMIT") or commit_of(Path(__file__).parents[1])


def commit_of(root: Path) -> str:
    """The same of another checkout, by git alone."""
    if not (root / "csrc").is_dir():  # installed, maybe below somebody else's repository
        return "unknown"
    head = _output(["git", "rev-parse", "HEAD"], root)
    # The code alone: a bench that rewrites a committed result file does not make itself dirty.
    code = ["csrc", "fastconv", "setup.py", "benchmarks", ":(exclude)benchmarks/results"]
    changed = _output(["git", "status", "--porcelain", "--", *code], root)
    return f"{head}-dirty" if head and changed else head or "unknown"


def describe(suite: str, device: torch.device | str = "cuda") -> dict[str, Any]:
    """The head of a file of results: schema, suite, gpu (on the CPU: the processor), driver, versions, commit, date."""
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    cudnn = torch.backends.cudnn.version() if on_gpu else None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]  # one driver for all cards
    head = {
        "schema": SCHEMA,
        "suite": suite,
        "gpu": torch.cuda.get_device_name(device) if on_gpu else _cpu_name(),
        "driver": (_output(query).partition("\n")[0] or "unknown") if on_gpu else "",
        "cuda": (torch.version.cuda or "") if on_gpu else "",
        "torch": torch.__version__,
        "cudnn": "" if cudnn is None else f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}",
        "commit": commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "python": platform.python_version(),
    }
    if not on_gpu:
        head["threads"] = torch.get_num_threads()
        head["instruction_set"] = ops.device_info(device).instruction_set.name
    # `auto` may then be what `fastconv tune` measured, not what the cost model says.
    tuned = sum(name == measured.device_name(device) for name, *_ in measured.choices())
    return head | ({"measured_choices": tuned} if tuned else {})
