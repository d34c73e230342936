"""What the tasks of `winograd_megakernel` do over time: a trace for Perfetto, and a figure.

A run is recorded on a GPU, by the kernel itself, or played through in simulated time: workers take tasks in the order
of the map and wait for counters, exactly as the threads and blocks do; how long a task takes is given. A played run
shows what the map does (who waits, what runs beside what), not how fast a machine is: tasks do not slow one another
down.
"""

from __future__ import annotations

import functools
import heapq
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastconv import _C, timing
from fastconv.figures import new_figure
from fastconv.instrumented import RECORD, Megakernel, Options

KINDS = ("filter", "input", "gemm", "output")
COLOURS = ("#8d99ae", "#2a6f97", "#c44536", "#e9c46a")


@dataclass(frozen=True)
class Tasks:
    """What the workers go through, in this order. Arrays over tasks; counters are numbered from 0."""

    kind: npt.NDArray[np.int32]
    group: npt.NDArray[np.int32]
    index: npt.NDArray[np.int32]
    waits: npt.NDArray[np.int32]  # [tasks, waits, (counter or -1, value)]
    raises: npt.NDArray[np.int32]  # the counter that a task raises by one
    work: npt.NDArray[np.float64]  # share of the largest task of its kind


@dataclass(frozen=True)
class Run:
    """A run of tasks: microseconds from the start, and the worker, for each task. Arrays over tasks.

    A worker does one task at a time. Worker w is of pool w % len(pools), in block w // len(pools).
    """

    tasks: Tasks
    workers: int
    worker: npt.NDArray[np.int32]
    taken: npt.NDArray[np.float64]  # the worker is free and turns to the task
    start: npt.NDArray[np.float64]  # its waits are over
    end: npt.NDArray[np.float64]
    pools: tuple[str, ...] = ("workers",)
    clock: str = "simulated"  # or recorded
    processor: npt.NDArray[np.int32] | None = None  # of each worker, the multiprocessor; -1: it had no task

    @property
    def us(self) -> float:
        """When the last task ends."""
        return float(self.end.max())

    @property
    def busy(self) -> float:
        """The share of all workers' time that is spent in tasks."""
        return float((self.end - self.start).sum()) / (self.workers * self.us)

    @property
    def waiting(self) -> float:
        """The share of all workers' time that is spent waiting for counters."""
        return float((self.start - self.taken).sum()) / (self.workers * self.us)

    def of_pool(self, pool: int) -> dict[str, float]:
        """The shares busy and waiting of one pool's workers."""
        own, of_all = self.worker % len(self.pools) == pool, self.workers // len(self.pools) * self.us
        times = {"busy": self.end - self.start, "waiting": self.start - self.taken}
        return {name: float(time[own].sum()) / of_all for name, time in times.items()}

    @property
    def overlap(self) -> float | None:
        """The share of the transforms' time during which a worker of the same processor is in a GEMM task: what hides
        behind what. None where processors are not known."""
        if self.processor is None:
            return None
        gemm = self.tasks.kind == KINDS.index("gemm")
        processor = self.processor[self.worker]
        beside = total = 0.0
        for number in np.unique(processor):
            gemms, others = (np.flatnonzero((processor == number) & chosen) for chosen in (gemm, ~gemm))
            gemms = gemms[np.argsort(self.start[gemms])]
            total += float((self.end[others] - self.start[others]).sum())
            if not len(gemms):
                continue
            # The time up to a point during which GEMM tasks run: what each adds, they begin in this order, to its end.
            reached = np.maximum.accumulate(self.end[gemms])
            begin = np.maximum(self.start[gemms], np.concatenate([[0.0], reached[:-1]]))
            end = np.maximum(begin, reached)
            done = np.cumsum(end - begin)
            points, sums = np.stack([begin, end], 1).ravel(), np.stack([done - (end - begin), done], 1).ravel()
            beside += float((np.interp(self.end[others], points, sums)).sum())
            beside -= float((np.interp(self.start[others], points, sums)).sum())
        return beside / total if total else 0.0

    def summary(self) -> dict[str, Any]:
        """us, busy, waiting; by kind the shares of all workers' time, and the median microseconds of a task; overlap,
        and each pool's shares, where known."""
        found: dict[str, Any] = {"us": self.us, "busy": self.busy, "waiting": self.waiting}
        times = np.bincount(self.tasks.kind, self.end - self.start, len(KINDS)) / (self.workers * self.us)
        found["kinds"] = dict(zip(KINDS, times.tolist(), strict=True))
        of_kind = [(self.end - self.start)[self.tasks.kind == kind] for kind in range(len(KINDS))]
        found["task_us"] = {
            name: float(np.median(each)) for name, each in zip(KINDS, of_kind, strict=True) if len(each)
        }
        if self.overlap is not None:
            found["overlap"] = self.overlap
        if len(self.pools) > 1:
            found |= {name: self.of_pool(pool) for pool, name in enumerate(self.pools)}
        return found


def recorded(task_map: _C.TaskMap, records: npt.NDArray[np.int64]) -> Run:
    """The run that a launch has recorded (fastconv.instrumented): [tasks, fields of RECORD], in any order.

    A block may have several workers. One may take a task while it is still at the one before; the task then starts when
    that one ends.
    Raises ValueError if a task has no record, or two.
    """
    tasks = mapped(task_map)
    field = dict(zip(RECORD, records.T, strict=True))
    keys = tuple(field[name] for name in ("index", "group", "kind"))
    found, wanted = np.lexsort(keys), np.lexsort((tasks.index, tasks.group, tasks.kind))
    order = np.empty_like(found)
    order[wanted] = found
    field = {name: values[order] for name, values in field.items()}
    same = [(field[name] == getattr(tasks, name)).all() for name in ("kind", "group", "index")]
    if not all(same) or (field["end"] < field["begin"]).any() or (field["begin"] < field["taken"]).any():
        raise ValueError("the records are not those of one launch with this map")
    pools: tuple[str, ...] = ("workers",)
    if count := int(field["worker"].max()):
        roles = (field["worker"] == 0) == (field["kind"] == KINDS.index("gemm"))
        pools = tuple(f"team {team}" for team in range(count + 1))
        if count == 1 and roles.all():
            pools = ("products", "transforms")
    worker = len(pools) * field["block"] + field["worker"]
    first = field["taken"].min()
    taken, start, end = ((field[name] - first) / 1e3 for name in ("taken", "begin", "end"))
    for number in np.unique(worker):
        own = np.flatnonzero(worker == number)
        own = own[np.argsort(field["ticket"][own])]
        # Two tasks of one worker may end in either order; in a row, each ends when all before it have.
        end[own] = np.maximum.accumulate(end[own])
        before = np.concatenate([[0.0], end[own[:-1]]])
        taken[own], start[own] = np.maximum(taken[own], before), np.maximum(start[own], before)
    workers = len(pools) * (int(field["block"].max()) + 1)
    processor = np.full(workers, -1, np.int32)
    processor[worker] = field["processor"]
    return Run(tasks, workers, worker.astype(np.int32), taken, start, end, pools, "recorded", processor)


def resolution_ns(records: npt.NDArray[np.int64]) -> int:
    """The step of the clock that the records were made with, as far as they show it; 0 if they show none."""
    steps = np.diff(np.unique(records[:, :3]))
    return int(np.gcd.reduce(steps)) if len(steps) else 0


@dataclass(frozen=True)
class Recording:
    """A launch in the order of the map, the same tasks kind by kind, and what is known beside them."""

    runs: dict[str, Run]  # series, mapped; without series where the kernel of the class has none: detail says so
    detail: dict[str, Any]


def record(kernel: Megakernel, options: Options) -> Recording:
    """Records two launches on the current device. The times of a launch with and without recording are medians."""
    task_map, room = kernel.task_map(options), kernel.new_records()
    times = timing.measure(
        {
            "unrecorded_us": functools.partial(kernel, options),
            "recorded_us": functools.partial(kernel, options, records=room),
        }
    ).timings
    records = kernel.record(options).numpy()
    mapped = recorded(task_map, records)
    detail: dict[str, Any] = {"clock": "recorded", "blocks": mapped.workers // len(mapped.pools)}
    detail |= {"resolution_ns": resolution_ns(records)} | {name: each.us for name, each in times.items()}
    try:
        records = kernel.record(replace(options, series=True)).numpy()
    except (RuntimeError, ValueError) as error:
        timing.recover()
        return Recording({"mapped": mapped}, detail | {"no_series": timing.message_of(error)})
    return Recording({"series": recorded(task_map, records), "mapped": mapped}, detail)


def mapped(task_map: _C.TaskMap) -> Tasks:
    """The tasks in the order of the map."""
    kind, group, index = task_map.tasks().T
    extents = task_map.extents()
    volume = extents[:, 1].astype(float) * extents[:, 3] * extents[:, 5]
    largest = np.array([volume[kind == k].max(initial=1.0) for k in range(len(KINDS))])
    return Tasks(kind, group, index, task_map.waits(), task_map.raises(), volume / largest[kind])


def staged(task_map: _C.TaskMap) -> Tasks:
    """The same tasks kind by kind, each kind waiting for all of the one before: kernels in series."""
    tasks = mapped(task_map)
    order = np.lexsort((tasks.index, tasks.group, tasks.kind))
    kind = tasks.kind[order]
    waits = np.full((len(order), 1, 2), (-1, 0), np.int32)
    for k in range(1, len(KINDS)):
        before = kind[kind < k]
        if len(before):
            waits[kind == k] = (before.max(), (kind == before.max()).sum())
    return Tasks(kind, tasks.group[order], tasks.index[order], waits, kind, tasks.work[order])


def play(tasks: Tasks, workers: int, costs: tuple[float, float, float, float]) -> Run:
    """Runs the tasks on `workers` workers; `costs`: microseconds of a whole task of each kind, in the order of KINDS.

    Raises ValueError if a task waits for a counter that no earlier task brings to its value.
    """
    if workers < 1:
        raise ValueError(f"workers is {workers}; expected at least 1")
    if len(costs) != len(KINDS) or not all(cost > 0 for cost in costs):
        raise ValueError(f"costs is {costs}; expected four positive numbers of microseconds: {', '.join(KINDS)}")
    count = len(tasks.kind)
    raised = np.zeros(int(max(tasks.raises.max(), tasks.waits[..., 0].max())) + 1, int)
    reached = np.zeros(len(raised))  # when the last of the tasks that raised it ended
    worker, times = np.zeros(count, np.int32), np.zeros((3, count))
    duration = np.asarray(costs)[tasks.kind] * tasks.work
    free = [(0.0, number) for number in range(workers)]
    # Tickets are taken in order and waits are for lower ones alone: whoever is free first has the next task.
    for position, (waits, raises) in enumerate(zip(tasks.waits.tolist(), tasks.raises.tolist(), strict=True)):
        taken, worker[position] = heapq.heappop(free)
        start = taken
        for counter, value in waits:
            if counter < 0:
                continue
            if raised[counter] < value:
                raise ValueError(f"task {position} waits for counter {counter}, which later tasks raise")
            start = max(start, reached[counter])
        end = start + duration[position]
        times[:, position] = taken, start, end
        raised[raises] += 1
        reached[raises] = max(reached[raises], end)
        heapq.heappush(free, (end, int(worker[position])))
    return Run(tasks, workers, worker, *times)


def to_chrome(runs: dict[str, Run]) -> dict[str, Any]:
    """Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing open: a process per run, a thread per
    worker, a slice per task and per wait."""
    events: list[dict[str, Any]] = []
    for process, (name, run) in enumerate(runs.items()):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
        for number in range(run.workers):
            block, pool = divmod(number, len(run.pools))
            label = {"name": f"worker {number}"}
            if run.processor is not None:
                label = {"name": f"SM {run.processor[number]}, block {block}, {run.pools[pool]}"}
            events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": number, "args": label})
        tasks = run.tasks
        for position in range(len(tasks.kind)):
            kind, group, index = KINDS[tasks.kind[position]], int(tasks.group[position]), int(tasks.index[position])
            at = {"ph": "X", "pid": process, "tid": int(run.worker[position])}
            taken, start, end = (round(float(times[position]), 3) for times in (run.taken, run.start, run.end))
            if start > taken:
                wait = {"for": f"{kind} {group}.{index}"}
                events.append({**at, "name": "wait", "cat": "wait", "ts": taken, "dur": start - taken, "args": wait})
            detail = {"position": position, "group": group, "index": index}
            events.append(
                {**at, "name": f"{kind} {group}", "cat": kind, "ts": start, "dur": end - start, "args": detail}
            )
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def write_chrome(path: Path, runs: dict[str, Run]) -> None:
    """Writes the trace of to_chrome()."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(to_chrome(runs), separators=(",", ":")) + "\n")


def distribution(run: Run, samples: int = 400) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """(times [samples] in microseconds, tasks of each kind that run at that time [kinds, samples])."""
    times = np.linspace(0.0, run.us, samples)
    counts = np.zeros((len(KINDS), samples), np.int64)
    for kind in range(len(KINDS)):
        of_kind = run.tasks.kind == kind
        started = np.searchsorted(np.sort(run.start[of_kind]), times, side="right")
        counts[kind] = started - np.searchsorted(np.sort(run.end[of_kind]), times, side="right")
    return times, counts


@dataclass(frozen=True)
class Panel:
    """What the figure shows of a run: title, clock, microseconds [samples], and tasks that run [kinds, samples]. Panels
    of one group have one scale of time."""

    title: str
    clock: str
    times: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]
    group: str = ""


def panel(name: str, run: Run) -> Panel:
    """The panel of a run."""
    return Panel(f"{name}: {run.us:.0f} us, workers busy {run.busy:.0%}", run.clock, *distribution(run))


def draw(panels: Sequence[Panel]) -> Any:
    """A figure of the distribution of tasks over time, the panels above one another. Needs matplotlib."""
    figure, first = new_figure(7.0, 1.8 * len(panels))
    first.remove()
    all_axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    shown = [kind for kind in range(len(KINDS)) if any(item.counts[kind].any() for item in panels)]
    for axes, item in zip(all_axes, panels, strict=True):
        colours = [COLOURS[kind] for kind in shown]
        axes.stackplot(
            item.times, item.counts[shown], labels=[KINDS[kind] for kind in shown], colors=colours, step="post"
        )
        axes.set_title(item.title, loc="left", fontsize=9)
        axes.set_ylabel("tasks running")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(0.0, max(other.times[-1] for other in panels if other.group == item.group))
    all_axes[-1].set_xlabel(f"{panels[0].clock} time, us")
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=8)
    return figure


def default_costs(task_map: _C.TaskMap, workers: int) -> tuple[float, float, float, float]:
    """Microseconds of a whole task of each kind if `workers` workers share an H200 evenly: transforms by the bytes
    that they move, GEMM tasks by three half-precision products of split FP32."""
    kinds, extents = task_map.tasks()[:, 0], task_map.extents().astype(float)
    volume = extents[:, 1] * extents[:, 3] * extents[:, 5]  # of tiles, channels or filters, and points
    filters, inputs, gemms, outputs = (float(volume[kinds == k].max(initial=1.0)) for k in range(len(KINDS)))
    gpu = _C.h200_device()
    per_us = gpu.bandwidth_bytes_per_s / workers / 1e6
    flops_per_us = gpu.fp16_tensor_flops_per_s / 3 / workers / 1e6
    return (
        4 * filters * (36 + 9) / 36 / per_us,
        4 * inputs * (36 + 16) / 36 / per_us,  # 16 new pixels of a tile; its halo is in the cache
        2 * gemms * task_map.c / flops_per_us,
        4 * outputs * (36 + 16) / 36 / per_us,
    )
