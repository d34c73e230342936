"""The fastest of the forms that one rival has: plans of a library, tiles of a kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from fastconv import timing

NEAR = 1.3  # forms within this of the fastest, by single calls, are compared from cold caches
MAX_NEAR = 4
ROUNDS = 7

Call = Callable[[], torch.Tensor]


class NoneRuns(RuntimeError):
    """No form of a rival runs in the class; the message has the reason of the first."""


@dataclass
class Fastest:
    """The name of the fastest form, microseconds of a single call of each that ran, why others did not or were
    refused."""

    name: str
    times: dict[str, float]
    failures: list[str] = field(default_factory=list)


def fastest(
    forms: Mapping[str, Call],
    device: torch.device,
    refuse: Callable[[torch.Tensor], str],
    announce: Callable[[str], None] = lambda name: None,
) -> Fastest:
    """Runs each form up to three times, then those near the fastest interleaved from cold caches.

    refuse: why a result is not of the class, or "". announce: called with a form's name before it runs. Raises
    NoneRuns.
    """
    failures: list[str] = []
    times: dict[str, float] = {}
    for name, call in forms.items():
        best = min(times.values(), default=float("inf"))
        announce(name)
        try:
            y, us = timing.once(call, device)
            if us < 3 * best or not times:  # the first call loads the code
                us = min(us, *(timing.once(call, device)[1] for _ in range(2)))
            why = refuse(y) if us < NEAR * best else ""
        except Exception as error:
            failures.append(f"{name}: {timing.message_of(error)}")
            timing.recover()
            continue
        if why:
            failures.append(f"{name}: {why} ({us:.0f} us)")
        else:
            times[name] = us
    if not times:
        raise NoneRuns(f"none of {len(forms)} runs in the class" + (f"; {failures[0]}" if failures else ""))
    ranked = sorted(times, key=lambda name: times[name])
    near = [name for name in ranked if times[name] <= NEAR * times[ranked[0]]][:MAX_NEAR]
    if len(near) > 1:
        cold = timing.measure({name: forms[name] for name in near}, device=device, rounds=ROUNDS).timings
        near = sorted(cold, key=lambda name: cold[name].us) or near
    announce(near[0])
    return Fastest(near[0], times, failures)
