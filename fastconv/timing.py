"""Interleaved timing: every contender once per round, in a shuffled order, from cold caches.

Interleaving gives all contenders the same clocks and temperature; on CUDA each is one graph replay between two events,
so that the host's launch gaps count for nobody.
"""

from __future__ import annotations

import math
import random
import time
import warnings
from collections.abc import Callable, Container, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy
import torch

Contender = Callable[[], object]
Output = TypeVar("Output")
_BATCH = 20  # rounds between two synchronisations
_CPU_CACHES = 64 << 20  # bytes: more than the caches of a CPU hold, written before each call
_AHEAD = 8  # flushes of the caches, some 80 us each, in which a host launches all of a call

# Which candidates are timed at all, and how often.
HOPELESS = 20.0  # times the best so far: not timed
SLOW = 5.0  # times the best so far: 3 rounds only
SHORT_US = 100.0  # a single call's time below this is mostly the launch, and hopeless for nobody
SLOW_US = 20e3  # a candidate is only given up unseen if the planner expects more than this


class DeviceLost(RuntimeError):
    """The device no longer answers (an illegal access, say): nothing more can be measured in this process."""


@dataclass(frozen=True)
class Timing:
    """Microseconds: median and quartiles over `rounds`. `graph`: a CUDA graph was replayed; else an eager call."""

    us: float
    q25: float
    q75: float
    rounds: int
    graph: bool


@dataclass
class Measurement:
    """`timings` of the contenders that ran; `failures`: first line of the message of those that did not."""

    timings: dict[str, Timing] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    eager: dict[str, str] = field(default_factory=dict)  # why a contender is not a graph, where a graph was asked for


def message_of(error: BaseException) -> str:
    """The first line of an exception's message, for a result file."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def once(call: Callable[[], Output], device: torch.device) -> tuple[Output, float]:
    """The output and the microseconds of one call, caches as they are."""
    if device.type != "cuda":
        begin = time.perf_counter()
        y = call()
        return y, (time.perf_counter() - begin) * 1e6
    begin_event, end_event = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin_event.record()
    y = call()
    end_event.record()
    torch.cuda.synchronize(device)
    return y, begin_event.elapsed_time(end_event) * 1e3


class _Clock(Protocol):
    def prepare(self, name: str, call: Contender, result: Measurement) -> Contender: ...
    def sample(self, run: Contender) -> None: ...
    def collect(self) -> list[float]: ...


class _CpuClock:
    def __init__(self, flush: bool) -> None:
        self._cache = numpy.zeros(_CPU_CACHES, dtype=numpy.uint8) if flush else None
        self._samples: list[float] = []

    def prepare(self, name: str, call: Contender, result: Measurement) -> Contender:
        call()
        return call

    def sample(self, run: Contender) -> None:
        if self._cache is not None:
            self._cache += 1
        begin = time.perf_counter()
        run()
        self._samples.append((time.perf_counter() - begin) * 1e6)

    def collect(self) -> list[float]:
        samples, self._samples = self._samples, []
        return samples


class L2Flush:
    """Leaves nothing of the contenders' data in L2: writes a buffer of more than twice its size, then reads another.

    The second pass matters: a cache full of dirty lines would charge its write-back to whoever is timed next.
    """

    def __init__(self, device: torch.device) -> None:
        size = max(2 * torch.cuda.get_device_properties(device).L2_cache_size, 64 << 20) + (16 << 20)
        self._written = torch.zeros(size // 4, dtype=torch.int32, device=device)
        self._read = torch.zeros(size // 4, dtype=torch.float32, device=device)
        self._sink = torch.zeros((), dtype=torch.float32, device=device)

    def __call__(self) -> None:
        self._written.zero_()
        torch.amax(self._read, dim=0, out=self._sink)


def estimate(contenders: Mapping[str, Contender], device: torch.device, samples: int = 3) -> Measurement:
    """What a call of each takes: on CUDA the least of some from cold caches, each put behind other work of the GPU, so
    that no gap between the host's launches is in it; one call where that is long. Its quartiles are the same number."""
    result = Measurement()
    flush = L2Flush(device) if device.type == "cuda" else lambda: None
    for name, call in contenders.items():
        us: list[float] = []
        try:
            while len(us) < samples and (not us or us[0] < SLOW_US):
                for _ in range(_AHEAD):
                    flush()
                us.append(once(call, device)[1])
        except Exception as error:
            result.failures[name] = message_of(error)
            recover()
        else:
            result.timings[name] = Timing(min(us), min(us), min(us), len(us), graph=False)
    return result


def capture(call: Callable[[], Any], pool: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of one call on the current stream, which is not the default one, and the output that it writes.

    PyTorch keeps a cuBLAS workspace for each stream and gives it to whatever is captured there; a compiled model in
    mode "reduce-overhead" frees them all, and a graph would write into memory that is somebody else's by then. So the
    graph gets a workspace of its own, in its pool.
    """
    graph = torch.cuda.CUDAGraph()
    torch._C._cuda_clearCublasWorkspaces()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        output = call()
    finally:
        graph.capture_end()
        torch._C._cuda_clearCublasWorkspaces()
    return graph, output


class _CudaClock:
    def __init__(self, device: torch.device, flush: bool, graph: bool) -> None:
        self._flush = L2Flush(device) if flush else None
        self._graph = graph
        # One memory pool for all graphs: they never run at the same time and nobody reads their outputs.
        self._pool = torch.cuda.graph_pool_handle() if graph else None
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def prepare(self, name: str, call: Contender, result: Measurement) -> Contender:
        call()  # lazy loading, searches and library workspaces of this very stream happen here, not in the capture
        torch.cuda.synchronize()
        if not self._graph:
            return call
        try:
            return self._capture(call)
        except Exception as error:
            result.eager[name] = message_of(error)
            self._pool = torch.cuda.graph_pool_handle()  # the allocator may still count the old one as in use
            recover()
            return call

    def _capture(self, call: Contender) -> Contender:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # the timer's is
            graph, _ = capture(call, self._pool)
        graph.replay()
        torch.cuda.synchronize()
        return graph.replay

    def sample(self, run: Contender) -> None:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if self._flush is not None:
            self._flush()
        begin.record()
        run()
        end.record()
        self._events.append((begin, end))

    def collect(self) -> list[float]:
        torch.cuda.synchronize()
        samples = [begin.elapsed_time(end) * 1e3 for begin, end in self._events]
        self._events.clear()
        return samples


class _HostClock:
    """The host's time of a call: blocks of calls on a device with nothing else to do, which is waited for between them.

    A block must be short enough for the device's queue (about a thousand launches): a full one makes the host wait.
    """

    def __init__(self, calls: int) -> None:
        self._calls = calls
        self._samples: list[float] = []

    def prepare(self, name: str, call: Contender, result: Measurement) -> Contender:
        for _ in range(3):
            call()
        return call

    def sample(self, run: Contender) -> None:
        recover()
        begin = time.perf_counter()
        for _ in range(self._calls):
            run()
        self._samples.append((time.perf_counter() - begin) * 1e6 / self._calls)

    def collect(self) -> list[float]:
        recover()
        samples, self._samples = self._samples, []
        return samples


def recover() -> None:
    """After an exception: returns if the device still works, else raises DeviceLost."""
    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except Exception as error:
        raise DeviceLost(message_of(error)) from error


def drop_hopeless(
    rows: Sequence[Mapping[str, Any]],
    calls: MutableMapping[str, Callable[[], Output]],
    device: torch.device,
    failures: dict[str, str],
    kept: Container[str] = (),
    announce: Callable[[str], None] = lambda name: None,
) -> list[str]:
    """Runs each contender of `rows` (algorithm, cost_us) in this order; takes out of `calls` what raises or, unless it
    is among `kept`, has no chance. Returns those that are so slow that three rounds are enough.

    announce: called with a contender's name before it first runs.
    """
    estimates: dict[str, float] = {}
    for row in rows:
        name, best = row["algorithm"], max(min(estimates.values(), default=math.inf), SHORT_US)
        if name not in calls:
            continue
        if name not in kept and row["cost_us"] > max(SLOW_US, HOPELESS * best):
            failures[name] = f"the cost model expects {row['cost_us']:.0f} us, over {HOPELESS:g} times the best"
        else:
            announce(name)
            try:
                us = once(calls[name], device)[1]
                # Else no start-up explains it, but PyTorch's, which may search.
                if name == "torch" or us <= max(SLOW_US, HOPELESS * best):
                    us = min(us, once(calls[name], device)[1])
                if name in kept or us <= HOPELESS * best:
                    estimates[name] = us
                    continue
                failures[name] = f"one call took {us:.0f} us, over {HOPELESS:g} times the best"
            except Exception as error:
                failures[name] = message_of(error)
                recover()
        del calls[name]
    best = max(min(estimates.values(), default=math.inf), SHORT_US)
    return [name for name, us in estimates.items() if us > SLOW * best]


def measure(
    contenders: Mapping[str, Contender],
    *,
    device: torch.device | str = "cuda",
    rounds: int = 20,
    few_rounds: Sequence[str] = (),
    flush: bool = True,
    graph: bool = True,
    seed: int = 0,
    monitor: AbstractContextManager[object] | None = None,
    host_calls: int | None = None,
) -> Measurement:
    """Times `contenders` (name -> callable that puts its work on the current stream), interleaved.

    few_rounds: contenders that leave after 3 rounds (known to be hopeless).
    graph: replay each as a CUDA graph; what cannot be captured runs eagerly and is listed in `Measurement.eager`.
    monitor: entered while the rounds run, and not while contenders are prepared.
    host_calls: the host's time instead, of a call in a block of so many: what it takes to put the work on the stream.
    A contender that raises is left out and listed in `failures`. Raises DeviceLost if the device stops working.
    """
    device = torch.device(device)
    if host_calls is not None:
        return _measure(_HostClock(host_calls), contenders, rounds, few_rounds, seed, monitor)
    if device.type != "cuda":
        return _measure(_CpuClock(flush), contenders, rounds, few_rounds, seed, monitor)
    stream = torch.cuda.Stream(device)  # capturing is not allowed on the default stream
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.device(device), torch.cuda.stream(stream):
        clock = _CudaClock(device, flush, graph)
        result = _measure(clock, contenders, rounds, few_rounds, seed, monitor)
    torch.cuda.current_stream(device).wait_stream(stream)
    return result


def _measure(
    clock: _Clock,
    contenders: Mapping[str, Contender],
    rounds: int,
    few_rounds: Sequence[str],
    seed: int,
    monitor: AbstractContextManager[object] | None = None,
) -> Measurement:
    result = Measurement()
    runs: dict[str, Contender] = {}
    for name, call in contenders.items():
        try:
            runs[name] = clock.prepare(name, call, result)
        except DeviceLost:
            raise
        except Exception as error:
            result.failures[name] = message_of(error)
            recover()
    samples: dict[str, list[float]] = {name: [] for name in runs}
    shuffle = random.Random(seed).shuffle
    with monitor or nullcontext():
        for begin in range(0, rounds, _BATCH):
            order = []
            for step in range(begin, min(begin + _BATCH, rounds)):
                names = [name for name in runs if step < 3 or name not in few_rounds]
                shuffle(names)
                for name in names:
                    clock.sample(runs[name])
                order += names
            for name, value in zip(order, clock.collect(), strict=True):
                samples[name].append(value)
    for name, values in samples.items():
        q25, median, q75 = (float(value) for value in numpy.quantile(values, [0.25, 0.5, 0.75]))
        was_graph = getattr(runs[name], "__self__", None).__class__.__name__ == "CUDAGraph"
        result.timings[name] = Timing(median, q25, q75, len(values), was_graph)
    return result
