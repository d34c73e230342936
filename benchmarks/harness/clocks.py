"""Clock, power and energy of a GPU while something is measured."""

from __future__ import annotations

import ctypes
import statistics
import threading
from collections.abc import Callable
from typing import Any

import torch


class Nvml:
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

    def joules(self) -> float:
        """Of the board since the driver was loaded."""
        energy = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self._device, ctypes.byref(energy))
        return energy.value / 1e3


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
            return Nvml(device).sample
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
