"""What a measurement ran on: GPU, driver, versions, commit; and the clocks while it ran."""

from __future__ import annotations

import ctypes
import os
import platform
import statistics
import subprocess
import threading
from collections.abc import Callable
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
    # `auto` may then be what `fastconv tune` measured, not what the cost model says.
    tuned = sum(name == measured.device_name(device) for name, _ in measured.choices())
    return head | ({"measured_choices": tuned} if tuned else {})


def slug(gpu: str) -> str:
    """The folder of a device's results: "NVIDIA H200" -> "h200"."""
    words = "".join(letter.lower() if letter.isalnum() else " " for letter in gpu).split()
    return "-".join(word for word in words if word not in ("nvidia", "r", "tm")) or "unknown"


class _Nvml:
    """One GPU through the driver's management library, found by its UUID: indices are not those of CUDA where
    CUDA_VISIBLE_DEVICES or another machine's cards are between. Raises OSError where it cannot be read."""

    _SM_CLOCK = 1  # nvmlClockType_t

    def __init__(self, device: torch.device) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._device = ctypes.c_void_p()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByUUID", ctypes.c_char_p(uuid), ctypes.byref(self._device))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise OSError(f"{name}: nvmlReturn_t {status}")

    def sample(self) -> tuple[float, float]:
        """SM clock in MHz, board power in W."""
        clock, power = ctypes.c_uint(), ctypes.c_uint()
        self._call("nvmlDeviceGetClockInfo", self._device, self._SM_CLOCK, ctypes.byref(clock))
        self._call("nvmlDeviceGetPowerUsage", self._device, ctypes.byref(power))
        return float(clock.value), power.value / 1e3


class ClockMonitor:
    """SM clock (MHz) and board power (W) of the device while something is measured, where the driver gives them.

    with ClockMonitor("cuda:0") as clocks: ...kernels...
    clocks.found -> {"sm_mhz", "sm_mhz_min", "power_w", "clock_samples"}: medians, the lowest clock, how many samples;
    {"clock_error"} where nothing could be read, {} on the CPU.
    """

    def __init__(self, device: torch.device | str, period_s: float = 0.005) -> None:
        self.found: dict[str, Any] = {}
        self._period_s = period_s
        self._samples: list[tuple[float, float]] = []
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._source = self._open(torch.device(device))

    def _open(self, device: torch.device) -> Callable[[], tuple[float, float]] | None:
        if device.type != "cuda":
            return None
        try:
            return _Nvml(device).sample
        except (OSError, AttributeError) as error:
            self.found = {"clock_error": str(error)}
            return None

    def __enter__(self) -> ClockMonitor:
        if self._source is not None:
            self._thread = threading.Thread(target=self._read, args=(self._source,), daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        if self._samples:
            clocks, powers = zip(*self._samples, strict=True)
            self.found = {"sm_mhz": statistics.median(clocks), "sm_mhz_min": min(clocks)}
            self.found |= {"power_w": statistics.median(powers), "clock_samples": len(clocks)}

    def _read(self, source: Callable[[], tuple[float, float]]) -> None:
        while not self._done.wait(self._period_s):
            try:
                self._samples.append(source())
            except OSError as error:
                self.found = {"clock_error": str(error)}
                return
