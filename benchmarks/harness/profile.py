"""The time of kernels by group, from torch.profiler."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

OTHER = "other"


@dataclass(frozen=True)
class Groups:
    """operators: start of an operator's name -> group; of a kernel counts the outermost operator that is listed.
    kernels: a pattern of the kernel's own name -> group, before its operators are asked. Else: `other`."""

    operators: dict[str, str]
    kernels: dict[str, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return (*dict.fromkeys([*self.operators.values(), *self.kernels.values()]), OTHER)

    def of(self, event: Any, kernel: str = "") -> str:
        """The group of a kernel that was launched in `event`, which knows its parents."""
        for pattern, group in self.kernels.items():
            if re.search(pattern, kernel):
                return group
        group = OTHER
        while event is not None:
            group = next((name for prefix, name in self.operators.items() if event.name.startswith(prefix)), group)
            event = event.cpu_parent
        return group


def kernel_groups(
    call: Callable[[], object], device: torch.device, groups: Groups, passes: int = 3
) -> dict[str, float]:
    """Microseconds of kernels by group in one pass of `call`: means over `passes`.

    On the CPU: of operators. Raises RuntimeError where the profiler sees no kernel.
    """
    cuda = device.type == "cuda"
    activities: Sequence[Any] = [torch.profiler.ProfilerActivity.CPU]
    activities = [*activities, torch.profiler.ProfilerActivity.CUDA] if cuda else activities
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(passes):
            call()
        if cuda:
            torch.cuda.synchronize(device)
    found = dict.fromkeys(groups.names, 0.0)
    for event in profile.events():
        if cuda:
            for kernel, us in _kernels_of(event):
                found[groups.of(event, kernel)] += us / passes
        elif event.self_cpu_time_total:
            found[groups.of(event)] += event.self_cpu_time_total / passes
    if not any(found.values()):
        raise RuntimeError("the profiler recorded no kernel")
    return found


def _kernels_of(event: Any) -> list[tuple[str, float]]:
    """(name, microseconds) of the kernels that were launched in an operator."""
    # An annotation stands on the GPU's time line as well, under its own name; so does a kernel of Triton's, which
    # Inductor annotates by its name.
    own = [kernel.duration for kernel in event.kernels if kernel.name == event.name]
    found = [(kernel.name, float(kernel.duration)) for kernel in event.kernels if kernel.name != event.name]
    return found + ([(event.name, float(min(own)))] if own and event.name.startswith("triton_") else [])
