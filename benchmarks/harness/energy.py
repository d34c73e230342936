"""Energy of calls on a GPU, by the board's own counter (NVML): contenders in turns, for seconds each.

The counter is of the whole board, idle power included, and moves a few times in a tenth of a second: a turn lasts a
second or more, and begins and ends with the device idle.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.harness.clocks import Nvml
from fastconv import timing

TURNS = 2  # of each contender
WARM_S = 0.3  # of the first contender, before anything counts


@dataclass
class Energy:
    """What so many calls took: joules of the board and seconds."""

    calls: int = 0
    joules: float = 0.0
    seconds: float = 0.0

    def fields(self, images: int) -> dict[str, Any]:
        """As a part of a result row, of calls with so many images each: joules per image, mean watts, and of what."""
        per_image, watts = self.joules / (self.calls * images), self.joules / self.seconds
        return {"image_j": per_image, "watts": watts, **asdict(self)}


def meter(device: torch.device) -> Callable[[], float]:
    """What reads the board's joules so far. Raises OSError where they cannot be read."""
    if device.type != "cuda":
        raise OSError(f"device is {device}; energy is read of a GPU")
    try:
        read = Nvml(device).joules
        read()
    except AttributeError as error:  # a driver without the function
        raise OSError(str(error)) from error
    return read


def measure(
    calls: Mapping[str, Callable[[], Any]], device: torch.device, seconds: float, read: Callable[[], float]
) -> dict[str, Energy]:
    """Each contender for `seconds` in TURNS turns, which alternate. read: of `meter`. Raises what a call raises."""
    found = {name: Energy() for name in calls}
    turn_s, lengths = seconds / TURNS, {}
    for name, call in calls.items():
        call()
        lengths[name] = max(_run(call, device, 3) / 3, 1e-6)
    first = next(iter(calls))
    _run(calls[first], device, math.ceil(WARM_S / lengths[first]))
    for turn in range(TURNS):
        for name in list(calls)[:: 1 if turn % 2 == 0 else -1]:
            count = math.ceil(turn_s / lengths[name])
            begin = read()
            its = _run(calls[name], device, count)
            energy = found[name]
            energy.joules += read() - begin
            energy.calls, energy.seconds = energy.calls + count, energy.seconds + its
    return found


def _run(call: Callable[[], Any], device: torch.device, count: int) -> float:
    """Seconds of so many calls on a device that has nothing else to do."""
    timing.recover()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    timing.recover()
    return time.perf_counter() - begin
