"""What a call launches on the GPU: kernels with their threads, registers, shared memory and occupancy."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch

BLOCK_RESERVED = 1024  # bytes of shared memory that a block takes for itself (compute capability 8.0 and later)
WARP, REGISTER_UNIT, WARP_UNIT, SHARED_UNIT = 32, 256, 4, 128  # granularities: registers of a warp, warps, bytes


@dataclass(frozen=True)
class Multiprocessor:
    """The limits of one, Hopper's unless others are given."""

    threads: int = 2048
    registers: int = 65536
    shared_bytes: int = 233472
    blocks: int = 32

    @classmethod
    def of(cls, device: torch.device) -> Multiprocessor:
        """Of a CUDA device, as far as this torch tells."""
        found = torch.cuda.get_device_properties(device)
        names = "max_threads_per_multi_processor", "regs_per_multiprocessor", "shared_memory_per_multiprocessor"
        limits = cls()
        known = (limits.threads, limits.registers, limits.shared_bytes)
        return cls(*(int(getattr(found, name, usual)) for name, usual in zip(names, known, strict=True)))


@dataclass(frozen=True)
class Launch:
    """One kernel: its blocks and threads per block, registers per thread, shared memory per block (static and dynamic),
    microseconds."""

    kernel: str
    blocks: int
    threads: int
    registers: int
    shared_bytes: int
    us: float

    def occupancy(self, limits: Multiprocessor) -> float:
        """Of the multiprocessor's threads, the share that resident blocks of this kernel can have: what threads,
        registers, shared memory and the number of blocks allow."""
        warps = ceil(self.threads / WARP)
        of_warp = ceil(max(self.registers, 1) * WARP / REGISTER_UNIT) * REGISTER_UNIT
        by_registers = limits.registers // of_warp // WARP_UNIT * WARP_UNIT // warps
        shared = ceil(self.shared_bytes / SHARED_UNIT) * SHARED_UNIT + BLOCK_RESERVED
        resident = min(limits.threads // WARP // warps, by_registers, limits.shared_bytes // shared, limits.blocks)
        return resident * warps * WARP / limits.threads

    def fields(self, limits: Multiprocessor) -> dict[str, Any]:
        """As a part of a result row."""
        return asdict(self) | {"occupancy": self.occupancy(limits)}


def distinct(launched: list[Launch], limits: Multiprocessor) -> list[dict[str, Any]]:
    """Result fields of each kernel that was launched, the largest of its launches, `launches`: how many, and `us` of
    all of them; the longest kernel first."""
    found: dict[tuple[str, int], list[Launch]] = {}
    for launch in launched:
        found.setdefault((launch.kernel, launch.threads), []).append(launch)
    rows = [
        max(its, key=lambda launch: launch.blocks).fields(limits)
        | {"launches": len(its), "us": sum(launch.us for launch in its)}
        for its in found.values()
    ]
    return sorted(rows, key=lambda row: -row["us"])


def parse(trace: Mapping[str, Any]) -> list[Launch]:
    """The kernels of a trace in Chrome's format as torch.profiler writes it, in the order of their starts."""
    events = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    return [
        Launch(
            event["name"],
            _product(event["args"]["grid"]),
            _product(event["args"]["block"]),
            int(event["args"]["registers per thread"]),
            int(event["args"]["shared memory"]),
            float(event["dur"]),
        )
        for event in sorted(events, key=lambda event: float(event["ts"]))
    ]


def _product(sizes: list[int]) -> int:
    x, y, z = sizes
    return x * y * z


def of_call(call: Callable[[], object]) -> list[Launch]:
    """What one call launches. Raises RuntimeError where the profiler sees no kernel."""
    call()  # lazy loading
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        found = parse(json.loads(path.read_text()))
    if not found:
        raise RuntimeError("the profiler recorded no kernel")
    return found
