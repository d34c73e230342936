"""`fastconv bench all`: the suites that README and docs draw from, on one GPU or several, resumed run by run.

A phase is some queues of steps. On one GPU its queues go on beside each other and share it in turns
(harness/turns.py): while one process times, others build plans and compile. Of several GPUs each takes the next step of
all phases, and has a folder of its own for files, which are joined behind every step. What a file holds of this
machine, versions and commit is not measured again, so that a run that was cut short is continued by the next; steps of
which it has all (`done`) are not even begun.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import merge
from benchmarks.harness import results, turns
from benchmarks.harness.runs import SHORTEST_S
from benchmarks.phases import CARD, PHASES, Phase, Queue, Step
from fastconv.cli.support import DeviceOption, device_named, fail, say

GRACE_S = 90.0  # how far behind its budget a step may end: what it has begun it finishes
WORKERS = 4  # processes of a step, at least: each phase has several steps on one GPU
UNTIMED = 3  # exit code of a step that has measured what there was, and rows without a time: that form cannot run
THREADS = ("TORCHINDUCTOR_COMPILE_THREADS", "OMP_NUM_THREADS")  # of which each process would take all cores

# A step imports the packages that this process has, wherever it found them.
_STEP = """
import json, sys
sys.path[:] = json.loads(sys.argv.pop(1))
from benchmarks.cli import app
app()
"""


def run(
    phases: Iterable[Phase],
    folder: Path,
    head: results.Document,
    budget_s: float,
    report: Callable[[str], None],
    gpus: Sequence[str] = (),
    plans: Sequence[Path] = (),
    memory: int = CARD,
) -> list[str]:
    """Runs the phases, with a log for each step beside its result file in `folder`.

    head: of any suite of this machine and commit. budget_s: no step begins in the last seconds of it, and those that
    run begin nothing new after it. gpus: what CUDA_VISIBLE_DEVICES is to be for each of several GPUs; their steps' logs
    lie in `folder`/gpu0 and so on. plans: folders of result files whose plans of cuDNN's are tried. memory: of a GPU,
    in bytes. Returns what is missing or went wrong, a line for each step.
    """
    folder.mkdir(parents=True, exist_ok=True)
    steps = _Steps(folder, head, time.monotonic() + budget_s, report, len(gpus) or 1, plans, memory)
    wrong = steps.gather()
    with _ends_together():
        for lanes, queues in _schedule(list(phases), gpus):
            waiting = deque(queues)

            def work(lane: _Lane, waiting: deque[Queue] = waiting) -> list[str]:
                lines: list[str] = []
                while True:
                    try:
                        queue = waiting.popleft()
                    except IndexError:
                        return lines
                    lines += filter(None, (steps.run(step, lane) for step in queue))

            # Of several GPUs each has the turns that its steps make.
            with contextlib.nullcontext() if gpus else turns.sharing(), ThreadPoolExecutor(len(lanes)) as pool:
                for lines in pool.map(work, lanes):
                    wrong += lines
    return wrong


_Lane = tuple[int, str] | None  # a GPU of several: its number here, and its name for CUDA_VISIBLE_DEVICES


def _schedule(phases: Sequence[Phase], gpus: Sequence[str]) -> Iterator[tuple[list[_Lane], list[Queue]]]:
    """What goes on beside each other: who works, and queues, of which each is one's."""
    if not gpus:
        for phase in phases:
            yield [None] * len(phase.queues), list(phase.queues)
        return
    lanes: list[_Lane] = list(enumerate(gpus))
    for _, group in itertools.groupby(phases, lambda phase: phase.quiet):
        yield lanes, [(step,) for phase in group for queue in phase.queues for step in queue]


_running: set[int] = set()  # process groups of steps


@contextlib.contextmanager
def _ends_together() -> Iterator[None]:
    """Whoever ends this process (`timeout`, Ctrl-C) ends its steps, too, which would go on beside what comes next. In
    the main thread; elsewhere nobody hears of a signal."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        for group in list(_running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        os._exit(128 + number)  # threads wait for the steps, and would begin the next ones

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Steps:
    """Runs steps, by several threads."""

    def __init__(
        self, folder: Path, head: results.Document, deadline: float, report: Callable[[str], None], lanes: int,
        plans: Sequence[Path], memory: int,
    ) -> None:  # fmt: skip
        self._folder, self._head, self._deadline, self._report = folder, head, deadline, report
        self._plans, self._memory = plans, memory
        self._joining = threading.Lock()
        self._cores = max(1, (os.cpu_count() or 1) // lanes)

    def gather(self) -> list[str]:
        """Joins what a run of several GPUs left that was ended from outside; what went wrong."""
        wrong = []
        for folder in sorted(self._folder.glob("gpu*")):
            for suite in results.files(folder):
                try:
                    self._join(suite, [self._folder, folder])
                except ValueError as error:
                    wrong.append(str(error))
        return wrong

    def run(self, step: Step, lane: _Lane) -> str:
        """What is missing of a step; "" if nothing is."""
        try:
            return self._run(step, lane)
        except (OSError, ValueError) as error:  # a file that breaks the contract, say: the others go on
            return f"{step.suite}: {error}"

    def _run(self, step: Step, lane: _Lane) -> str:
        left = self._deadline - time.monotonic()
        if step.name in self._own(step.suite, self._folder).get("done", []):
            self._report(f"{step.suite}: the file has it")
            return ""
        if left < SHORTEST_S:
            return f"{step.suite}: not begun, the time is spent"
        begin = time.monotonic()
        threads = max(1, self._cores // max(WORKERS, step.workers(self._memory)))
        environment = {**dict.fromkeys(THREADS, str(threads)), **os.environ}
        if lane is not None:
            environment["CUDA_VISIBLE_DEVICES"] = lane[1]
        folder = self._folder if lane is None else self._folder / f"gpu{lane[0]}"
        own = results.path_of(folder, step.suite)
        own.parent.mkdir(parents=True, exist_ok=True)
        for suite in (step.suite, *step.beside):
            self._join(suite, [folder, self._folder])
        log = results.path_of(folder, step.suite).with_suffix(".log")
        code = _process(step.arguments(folder, left, self._plans, self._memory), log, left, environment)
        for suite in (step.suite, *step.beside):
            self._join(suite, [self._folder, folder])
        self._report(f"{step.suite}: {self._rows(step.suite, folder)} rows, {time.monotonic() - begin:.0f} s")
        why = "" if code == 0 else f"{step.suite}: exit code {code}; {own.with_suffix('.log')} says why"
        if code not in (0, UNTIMED):
            return why
        if missing := len(results.read(own).get("missing", [])):
            return f"{step.suite}: {missing} not measured, the time was over"
        if time.monotonic() > self._deadline:
            return f"{step.suite}: ended behind the time; what it passed over is left to the next run"
        self._note(step)
        return why

    def _own(self, suite: str, folder: Path) -> results.Document:
        """What a suite's file has of this machine, versions and commit."""
        return results.merge(results.path_of(folder, suite), {**self._head, "suite": suite}, ())

    def _rows(self, suite: str, folder: Path) -> int:
        return len(results.own_rows(self._own(suite, folder)))

    def _join(self, suite: str, folders: Sequence[Path]) -> None:
        """The first folder's file gets what the files of all have of this machine and commit."""
        with self._joining:
            known = [results.path_of(folder, suite) for folder in dict.fromkeys(folders) if self._rows(suite, folder)]
            into = results.path_of(folders[0], suite)
            if known and known != [into]:
                results.write(into, merge.joined(known))

    def _note(self, step: Step) -> None:
        """The file of all has all of the step."""
        path = results.path_of(self._folder, step.suite)
        with self._joining:
            document = results.read(path)
            results.write(path, {**document, "done": [*document.get("done", []), step.name]})


def _process(arguments: list[str], path: Path, left: float, environment: dict[str, str]) -> int | str:
    """How a step ended that has so many seconds left; path: of its log."""
    command = [sys.executable, "-c", _STEP, json.dumps(sys.path), *arguments]
    with (
        open(path, "a") as log,
        subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        ) as process,
    ):
        _running.add(process.pid)
        try:
            return process.wait(left + GRACE_S)
        except subprocess.TimeoutExpired:
            return "none, it was ended long after its time"
        finally:
            with contextlib.suppress(ProcessLookupError):  # it and the processes that it has started
                os.killpg(process.pid, signal.SIGKILL)
            _running.discard(process.pid)


def _visible(gpus: str) -> list[str]:
    """What CUDA_VISIBLE_DEVICES is to be for each of the GPUs that are named by their numbers, or all. Raises
    ValueError for one that there is not, for one alone, and for several that are not of one kind."""
    import torch

    known = [str(number) for number in range(torch.cuda.device_count())]
    chosen = known if gpus == "all" else [name.strip() for name in gpus.split(",")]
    if len(chosen) < 2 or len(chosen) != len(set(chosen)) or not set(chosen) <= set(known):
        raise ValueError(f"gpus is {gpus!r}; expected several of {', '.join(known)}, each once, with commas between")
    kinds = {torch.cuda.get_device_name(int(number)) for number in chosen}
    if len(kinds) > 1:
        raise ValueError(f"gpus is {gpus!r}, which are {' and '.join(sorted(kinds))}; expected GPUs of one kind")
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [names.split(",")[int(number)] if names else number for number in chosen]


def command(
    phases: Annotated[str, typer.Option(help=f"Some of {', '.join(PHASES)}; default all, in this order.")] = "all",
    steps: Annotated[
        str, typer.Option(help="Only those steps of the phases that have one of these words: resnet50,pointwise,bf16.")
    ] = "all",
    folder: Annotated[Path | None, typer.Option(help="Where the files go; default benchmarks/results/<gpu>.")] = None,
    budget: Annotated[float, typer.Option(metavar="SECONDS", help="Begin nothing after.")] = 3600.0,
    gpus: Annotated[
        str, typer.Option(help="Numbers of GPUs of one kind that share the work, with commas between, or all.")
    ] = "",
    plans: Annotated[
        list[Path] | None, typer.Option(help="A folder of this cuDNN: its plans are tried, none is searched.")
    ] = None,
    device: DeviceOption = "auto",
) -> None:
    """Every suite of README and docs, on one GPU or several; run it again to go on where it ended (GPU)."""
    import torch

    from fastconv import environment
    from fastconv.cli.support import split

    names = list(PHASES) if phases == "all" else split(phases, "phases", list(PHASES))
    known = {word for name in names for queue in PHASES[name].queues for step in queue for word in step.words}
    words = split(steps, "steps", sorted(known))
    chosen = [phase for phase in (PHASES[name].only(words) for name in names) if phase.queues]
    where = device_named(device)
    if where.type != "cuda":
        raise fail("no CUDA GPU on this machine: nothing was measured")
    head: Any = environment.describe("layers", where)
    lanes = _visible(gpus) if gpus else []
    where_to = folder or results.default_path(head).parent
    memory = torch.cuda.get_device_properties(where).total_memory
    wrong = run(chosen, where_to, head, budget, say, lanes, plans or (), memory)
    if wrong:
        raise fail("; ".join(wrong))
