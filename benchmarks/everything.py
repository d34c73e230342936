"""`fastconv bench all`: the suites that README and docs draw from, on one GPU, resumed run by run.

A phase is some queues of steps. Queues go on beside each other and share the GPU in turns (harness/turns.py): while one
process times, others build plans and compile. What a file holds of this machine, versions and commit is not measured
again, so that a run that was cut short is continued by the next.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.harness import results, turns
from benchmarks.layers.sets import suite_of
from fastconv.cli.support import DeviceOption, device_named, fail, say

SHORTEST_S = 20.0  # with less time left no step is begun
GRACE_S = 90.0  # how far behind its budget a step may end: what it has begun it finishes

# A step imports the packages that this process has, wherever it found them.
_STEP = """
import json, sys
sys.path[:] = json.loads(sys.argv.pop(1))
from benchmarks.cli import app
app()
"""


@dataclass(frozen=True)
class Step:
    """One command of the benchmarks. suite: the name of its result file. resumes: it adds to what the file holds;
    without, it is passed over if the file has rows of this machine and commit. folder: it is told where its file goes,
    and not the file."""

    suite: str
    command: tuple[str, ...]
    resumes: bool = True
    folder: bool = False

    def arguments(self, path: Path, budget_s: float) -> list[str]:
        """All of the command line, for a result file."""
        where = ["--folder", str(path.parent)] if self.folder else ["--json", str(path)]
        return [*self.command, *where, "--budget", f"{budget_s:.0f}", *(["--resume"] if self.resumes else [])]


Phase = tuple[tuple[Step, ...], ...]  # its queues


def _layers(layer_set: str, workers: int, direction: str = "forward", *options: str) -> Step:
    command = ("layers", "--set", layer_set, "--pass", direction, "--workers", str(workers), *options)
    return Step(suite_of(layer_set, direction), command)


def _gradients(direction: str, classes: str) -> tuple[Step, ...]:
    # Layers with strides are the largest: one process, whose plans have the card's memory for themselves.
    sets = (("layers", 4), ("pointwise", 4), ("groups", 3), ("stems", 3), ("strided", 1))
    options = ("--batch", "64", "--classes", classes)
    return tuple(_layers(layer_set, workers, f"backward_{direction}", *options) for layer_set, workers in sets)


def _paper(source: str, part: str, suffix: str = "", *options: str) -> Step:
    """A part of a source's experiments; suffix: what its file has behind the source."""
    return Step(f"paper_{source}{suffix}", ("paper", source, "--parts", part, *options), folder=True)


def _networks(suite: str, peers: str, *options: str) -> Step:
    """Whole networks against other rivals, in a file of their own. Ours is timed again, in the forms that are its
    fastest: a speed is a ratio of times of one run."""
    command = ("networks", "--suite", suite, "--modes", "compile,fused_graph", "--peers", peers, *options)
    return Step(suite, command)


# The forms of PyTorch that were ever its fastest, and what its users have: each takes memory, and time to compile.
_FORMS = "torch_eager,torch_graph,folded_graph,compile_reduce_overhead,frozen_reduce_overhead"
_CLASSES, _OTHER_CLASSES = "fp32,tf32,fp16", "bf16,ieee"
PHASES: dict[str, Phase] = {
    "layers": (
        (_layers("layers", 4), _layers("strided", 1)),
        (_layers("pointwise", 3), _layers("stems", 3), _layers("groups", 3)),
    ),
    "networks": (
        (Step("networks", ("networks", "--workers", "3", "--peers", _FORMS, "--compile-limit", "150")),),
    ),
    # One queue: the plans of eight processes are more than a card of 80 GB.
    "gradients": ((*_gradients("weight", _CLASSES), *_gradients("input", _CLASSES)),),
    "alone": (
        (
            Step("host", ("host",), resumes=False),
            Step("training", ("training",)),
            Step("megakernel", ("megakernel", "--parts", "layers,rivals"), resumes=False),
        ),
    ),
    # The sources' experiments. Whoever compiles keeps all others from timing all the while.
    "papers": (
        (
            _paper("cuconv", "survey", "", "--batch", "1,8,16,32,64", "--workers", "5"),
            # VGG-19's first layers with their rivals' workspaces take most of a card of 80 GB.
            _paper("cuconv", "survey", "", "--batch", "128,256", "--workers", "2"),
        ),
        (
            _paper("lenet5", "network", "_network"),
            _paper("megakernel", "filters"),
            _paper("megakernel", "resnet2", "_resnet2"),
        ),
    ),
    "papers_compiled": (
        (
            _paper("single_image", "blocks", "_blocks"),
            _paper("single_image", "networks", "_networks", "--workers", "5", "--compile-limit", "150"),
        ),
    ),
    "papers_layers": (
        (
            _paper("lenet5", "layers", "", "--workers", "2"),
            _paper("textbook", "ladder", "", "--workers", "2"),
            _paper("textbook", "kernels", "_kernels"),
            _paper("megakernel", "counters", "_counters"),
        ),
        (
            _paper("megakernel", "layers"),
            _paper("megakernel", "mapping"),
            _paper("megakernel", "distribution"),
            _paper("single_image", "layers", "", "--workers", "3"),
            _paper("single_image", "kernels", "_kernels"),
            _paper("megakernel", "networks", "_networks", "--workers", "2"),
            _paper("cuconv", "counters", "_counters"),
        ),
    ),
    "gradients_others": ((*_gradients("weight", _OTHER_CLASSES), *_gradients("input", _OTHER_CLASSES)),),
    "energy": (
        (
            Step(
                "networks_energy",
                (
                    "networks", "--suite", "networks_energy", "--energy", "2", "--modes", "compile,fused_graph",
                    "--peers", _FORMS, "--classes", "fp32,fp16", "--workers", "2", "--compile-limit", "150",
                ),
            ),
        ),
    ),
    # What is timed of cuDNN alone goes with the leanest kernels around it, which are those of frozen networks.
    "networks_cudnn": (
        (
            _networks(
                "networks_cudnn", "torch_eager,folded_eager,frozen_default,cudnn_best_layers", "--workers", "3",
                "--compile-limit", "150",
            ),
        ),
    ),
    # Compiled beside each other for the caches alone; what max-autotune keeps it has timed with the GPU for itself.
    "networks_autotune": (
        (
            _networks(
                "networks_autotune", "compile_max_autotune,frozen_max_autotune", "--compile-workers", "3",
                "--compile-limit", "600",
            ),
        ),
    ),
}  # fmt: skip


def run(
    phases: Iterable[Phase], folder: Path, head: results.Document, budget_s: float, report: Callable[[str], None]
) -> list[str]:
    """Runs the phases one after the other, with a log for each step beside its result file in `folder`.

    head: of any suite of this machine and commit. budget_s: no step begins in the last seconds of it, and those that
    run begin nothing new after it. Returns what is missing or went wrong, a line for each step.
    """
    deadline = time.monotonic() + budget_s
    folder.mkdir(parents=True, exist_ok=True)
    wrong: list[str] = []

    def queue(steps: tuple[Step, ...]) -> list[str]:
        return [line for step in steps if (line := _run_step(step, folder, head, deadline, report))]

    with _ends_together():
        for phase in phases:
            with turns.sharing(), ThreadPoolExecutor(len(phase)) as pool:
                for lines in pool.map(queue, phase):
                    wrong += lines
    return wrong


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


def _run_step(step: Step, folder: Path, head: results.Document, deadline: float, report: Callable[[str], None]) -> str:
    """What is missing of a step; "" if nothing is."""
    path, left = folder / f"{step.suite}.json", deadline - time.monotonic()
    if not step.resumes and _rows(path, head):
        report(f"{step.suite}: the file has it")
        return ""
    if left < SHORTEST_S:
        return f"{step.suite}: not begun, the time is spent"
    begin = time.monotonic()
    with open(path.with_suffix(".log"), "a") as log:
        command = [sys.executable, "-c", _STEP, json.dumps(sys.path), *step.arguments(path, left)]
        with subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True) as process:
            _running.add(process.pid)
            try:
                code: int | str = process.wait(left + GRACE_S)
            except subprocess.TimeoutExpired:
                code = "none, it was ended long after its time"
            finally:
                with contextlib.suppress(ProcessLookupError):  # it and the processes that it has started
                    os.killpg(process.pid, signal.SIGKILL)
                _running.discard(process.pid)
    report(f"{step.suite}: {_rows(path, head)} rows, {time.monotonic() - begin:.0f} s")
    if code != 0:
        return f"{step.suite}: exit code {code}; {path.with_suffix('.log')} says why"
    missing = len(results.read(path).get("missing", []))
    return f"{step.suite}: {missing} not measured, the time was over" if missing else ""


def _rows(path: Path, head: results.Document) -> int:
    """How many rows of this machine, versions and commit a file has."""
    rows = results.merge(path, {**head, "suite": path.stem}, ())["rows"]
    return sum("commit" not in row for row in rows)


def command(
    phases: Annotated[str, typer.Option(help=f"Some of {', '.join(PHASES)}; default all, in this order.")] = "all",
    folder: Annotated[Path | None, typer.Option(help="Where the files go; default benchmarks/results/<gpu>.")] = None,
    budget: Annotated[float, typer.Option(metavar="SECONDS", help="Begin nothing after.")] = 3600.0,
    device: DeviceOption = "auto",
) -> None:
    """Every suite of README and docs on one GPU; run it again to go on where it ended (GPU)."""
    from fastconv import environment
    from fastconv.cli.support import split

    names = list(PHASES) if phases == "all" else split(phases, "phases", list(PHASES))
    where = device_named(device)
    if where.type != "cuda":
        raise fail("no CUDA GPU on this machine: nothing was measured")
    head: Any = environment.describe("layers", where)
    wrong = run([PHASES[name] for name in names], folder or results.default_path(head).parent, head, budget, say)
    if wrong:
        raise fail("; ".join(wrong))
