"""What a measurement ran on: GPU, driver, versions, commit; and the clocks while it ran."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import threading
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from fastconv import measured

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
    """FASTCONV_COMMIT, else git's commit of this source tree ("-dirty" if the code differs from it), else "unknown"."""
    known = os.environ.get("FASTCONV_COMMIT")
    if known:
        return known
    root = Path(__file__).parents[2]
    head = _output(["git", "rev-parse", "HEAD"], root)
    # The code alone: a bench that rewrites a committed result file does not make itself dirty.
    changed = _output(["git", "status", "--porcelain", "--", "csrc", "fastconv", "setup.py"], root)
    return f"{head}-dirty" if head and changed else head or "unknown"


def describe(suite: str, device: torch.device | str = "cuda") -> dict[str, Any]:
    """The head of a result file: schema, suite, gpu (on the CPU: the processor), driver, versions, commit, date."""
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    cudnn = torch.backends.cudnn.version() if on_gpu else None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", f"--id={device.index or 0}"]
    head = {
        "schema": SCHEMA,
        "suite": suite,
        "gpu": torch.cuda.get_device_name(device) if on_gpu else _cpu_name(),
        "driver": (_output(query) or "unknown") if on_gpu else "",
        "cuda": (torch.version.cuda or "") if on_gpu else "",
        "torch": torch.__version__,
        "cudnn": "" if cudnn is None else f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}",
        "commit": commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "python": platform.python_version(),
    }
    if not on_gpu:
        head["threads"] = torch.get_num_threads()
    # `auto` may then be what `fastconv tune` measured, not what the cost model says.
    tuned = sum(name == measured.device_name(device) for name, _ in measured.choices())
    return head | ({"measured_choices": tuned} if tuned else {})


def slug(gpu: str) -> str:
    """The folder of a device's results: "NVIDIA H200" -> "h200"."""
    words = "".join(letter.lower() if letter.isalnum() else " " for letter in gpu).split()
    return "-".join(word for word in words if word not in ("nvidia", "r", "tm")) or "unknown"


class ClockMonitor:
    """SM clock (MHz) and board power (W) in the background, where nvidia-smi gives them.

    with ClockMonitor("cuda:0") as clocks: ...; clocks.take() -> {"sm_mhz": ..., "power_w": ...}, medians since the
    last take(), {} where nothing could be read.
    """

    def __init__(self, device: torch.device | str, period_ms: int = 200) -> None:
        device = torch.device(device)
        self._command: list[str] = []
        if device.type == "cuda":
            self._command = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
            self._command += [f"--id={device.index or 0}", f"--loop-ms={period_ms}"]
        self._process: subprocess.Popen[str] | None = None
        self._samples: list[tuple[float, float]] = []

    def __enter__(self) -> ClockMonitor:
        if self._command:
            try:
                self._process = subprocess.Popen(
                    self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
                )
                threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
            except OSError:
                pass
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                clock, power = line.split(",")
                self._samples.append((float(clock), float(power)))
            except ValueError:
                continue

    def take(self) -> dict[str, float]:
        samples, self._samples = self._samples, []
        if not samples:
            return {}
        return {
            "sm_mhz": statistics.median(clock for clock, _ in samples),
            "power_w": statistics.median(power for _, power in samples),
        }
