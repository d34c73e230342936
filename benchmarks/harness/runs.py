"""What the suites of whole networks share: names, limits on time, and the device between two contenders."""

from __future__ import annotations

import contextlib
import gc
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

LAYOUTS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
SHORTEST_S = 20.0  # with less time left no process is started that measures
OVERTIME_S = 30.0  # how far behind a deadline a compilation may go on that began before it
DISTURBED = 1.5  # the upper quartile of a kernel's time over the lower
TF32 = "tf32_"  # before the name of a form of PyTorch in TF32, beside class fp32
SPENT, BESIDE_OTHERS = "the time is spent", "beside other processes"  # end a reason that the next run may not have


def short_of(row: Mapping[str, Any]) -> list[str]:
    """The parts of a row that another run may have: for these time or memory was short."""
    why_not = row.get("failures")
    if not isinstance(why_not, Mapping):  # a soak's are counted
        return []
    return [name for name, why in why_not.items() if why.endswith((SPENT, BESIDE_OTHERS))]


def is_final(row: Mapping[str, Any]) -> bool:
    """Whether another run would find nothing more than the row has."""
    return not short_of(row)


def has_all_rivals(row: Mapping[str, Any]) -> bool:
    """Whether only what is no rival is short: the energy, and PyTorch in TF32 beside class fp32."""
    return all(name == "energy" or name.startswith(TF32) for name in short_of(row))


def is_disturbed(row: Mapping[str, Any]) -> bool:
    """Whether somebody else had the GPU meanwhile: quartiles of a kernel's time are within a few per cent of each
    other, but for one row in a hundred. Times that have the host in them, or are a CPU's, scatter by themselves."""
    spread = (row.get("us_q75") or 0.0) / (row.get("us_q25") or math.inf)
    return {"algorithms", "sm_mhz"} <= row.keys() and spread > DISTURBED


class TimeIsUp(BaseException):
    """Not an Exception: nothing that a compiler tries on the way may swallow it."""


class _Switches:
    """PyTorch's compilers' switches as they are now: whoever is interrupted may not turn back what he turned."""

    def __init__(self) -> None:
        import torch._dynamo.config
        import torch._functorch.config
        import torch._inductor.config

        modules: tuple[Any, ...] = torch._dynamo.config, torch._functorch.config, torch._inductor.config
        self.values = [(module, module.get_config_copy()) for module in modules]

    def restore(self) -> None:
        for module, before in self.values:
            now = module.get_config_copy()
            for name in before:
                if now[name] != before[name]:
                    setattr(module, name, before[name])


@contextlib.contextmanager
def time_limit(seconds: float | None, deadline: float | None = None) -> Iterator[None]:
    """Raises TimeoutError in the block after `seconds` (None: never), or OVERTIME_S behind `deadline` if that is
    earlier. In the main thread of a POSIX system; elsewhere there is no limit."""
    limit = until(seconds, deadline)
    if limit is None or threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(number: int, frame: Any) -> None:
        if running:
            raise TimeIsUp

    running = True
    switches, before = _Switches(), signal.signal(signal.SIGALRM, stop)
    # Again and again: an exception in the middle of a garbage collection, say, is lost.
    signal.setitimer(signal.ITIMER_REAL, max(limit, 1e-3), 0.25)
    try:
        yield
    except TimeIsUp:
        running = False
        switches.restore()
        why = f"not ready within {limit:.0f} s" if limit == seconds else f"not ready: {SPENT}"
        raise TimeoutError(why) from None
    finally:
        running = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def deadline_of(budget_s: float | None) -> float | None:
    """A time of time.perf_counter(), `budget_s` seconds from now; None: never."""
    return None if budget_s is None else time.perf_counter() + budget_s


def seconds_to(deadline: float | None) -> float | None:
    """What is left until a deadline of `deadline_of`; negative after it; None: no end."""
    return None if deadline is None else deadline - time.perf_counter()


def until(seconds: float | None, deadline: float | None) -> float | None:
    """What may take `seconds` (None: for ever), but goes on for OVERTIME_S behind `deadline` at most: so long."""
    left = seconds_to(deadline)
    return seconds if left is None else min(left + OVERTIME_S, math.inf if seconds is None else seconds)


def is_past(deadline: float | None) -> bool:
    """deadline: of `deadline_of`."""
    return deadline is not None and time.perf_counter() > deadline


def check_names(kind: str, values: Any, known: Mapping[str, Any]) -> None:
    """Raises ValueError naming the first of `values` that is not among `known`."""
    for value in values:
        if value not in known:
            raise ValueError(f"{kind} is {value!r}; expected one of {', '.join(known)}")


def free(device: torch.device) -> None:
    """Gives compiled code and cached memory back."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def synchronised(call: Callable[[], Any], device: torch.device) -> Callable[[], None]:
    """`call` on a device that has nothing left to do."""

    def run() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        call()

    return run


def fastest_of(times: Mapping[str, float | None]) -> str | None:
    """The name of the shortest time; None where there is none."""
    timed = {name: us for name, us in times.items() if us is not None}
    return min(timed, key=lambda name: timed[name], default=None)


def tf32_fields(times: Mapping[str, float | None]) -> dict[str, Any]:
    """Of a row: PyTorch's forms in TF32, and the fastest of them; none, if there are none."""
    best = fastest_of(times)
    fields = {"tf32_peers": dict(times), "best_tf32_peer": best, "best_tf32_peer_us": times[best] if best else None}
    return fields if times else {}
