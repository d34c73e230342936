"""`fastconv bench all`: the suites that README and docs draw from, on one GPU or several, resumed run by run.

A phase is some queues of steps. On one GPU its queues go on beside each other and share it in turns
(harness/turns.py): while one process times, others build plans and compile. Of several GPUs each takes the next step of
all phases, and has a folder of its own for files, which are joined behind every step. What a file holds of this
machine, versions and commit is not measured again, so that a run that was cut short is continued by the next.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import merge
from benchmarks.corpus.networks import DECODERS
from benchmarks.harness import results, turns
from benchmarks.layers.sets import FUSED, suite_of
from benchmarks.training import suite as training
from fastconv.cli.support import DeviceOption, device_named, fail, say
from fastconv.models import MAIN_NETWORKS

SHORTEST_S = 20.0  # with less time left no step is begun
GRACE_S = 90.0  # how far behind its budget a step may end: what it has begun it finishes
WORKERS = 4  # processes of a step, at most five
THREADS = ("TORCHINDUCTOR_COMPILE_THREADS", "OMP_NUM_THREADS")  # of which each process would take all cores

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


Queue = tuple[Step, ...]


@dataclass(frozen=True)
class Phase:
    """quiet: what it measures is the host's time, too, so that nothing else goes on meanwhile; each of its steps is one
    process, and several GPUs run one each."""

    queues: tuple[Queue, ...]
    quiet: bool = False


def _layers(layer_set: str, workers: int, direction: str = "forward", *options: str) -> Step:
    command = ("layers", "--set", layer_set, "--pass", direction, "--workers", str(workers), *options)
    return Step(suite_of(layer_set, direction), command)


def _gradients(direction: str, classes: str) -> Queue:
    # Layers with strides are the largest: one process, whose plans have the card's memory for themselves.
    sets = (("layers", 4), ("pointwise", 4), ("groups", 3), ("stems", 3), ("strided", 1))
    options = ("--batch", "64", "--classes", classes)
    return tuple(_layers(layer_set, workers, f"backward_{direction}", *options) for layer_set, workers in sets)


def _paper(source: str, part: str, suffix: str = "", *options: str) -> Step:
    """A part of a source's experiments; suffix: what its file has behind the source."""
    return Step(f"paper_{source}{suffix}", ("paper", source, "--parts", part, *options), folder=True)


def _survey(batch: int, workers: int) -> Step:
    return _paper("cuconv", "survey", "", "--batch", str(batch), "--workers", str(workers))


def _resnets(names: str) -> Step:
    options = ("--network", names, "--workers", "5", "--compile-limit", "150")
    return _paper("single_image", "networks", "_networks", *options)


# The forms of PyTorch that were ever its fastest, and what its users have: each takes memory, and time to compile.
_FORMS = "torch_eager,torch_graph,folded_graph,folded_graph_all_plans,compile_reduce_overhead,frozen_reduce_overhead"
_MODES = "eager,compile,graph,fused,fused_graph"
_CLASSES, _OTHER_CLASSES = "fp32,tf32,fp16", "bf16,ieee"


def _network(name: str, classes: str = "fp32,tf32,fp16,bf16", workers: int = 4) -> Step:
    """A network of README's table, in every form that it shows. workers: as many as a card of 80 GB has room for."""
    forms = ("--modes", _MODES, "--peers", _FORMS, "--energy", "2")
    command = ("networks", "--network", name, "--classes", classes, "--workers", str(workers), *forms)
    return Step("networks", (*command, "--compile-limit", "150"))


def _another_network(name: str, classes: str = "fp16,tf32", workers: int = 4, batch: int | None = None) -> Step:
    """One that our choices were not made for, or that README's table has in another batch or size, in the forms that
    are the fastest of ours and of PyTorch."""
    forms = ("--layouts", "nhwc", "--classes", classes, "--workers", str(workers), "--compile-limit", "150")
    of_batch = () if batch is None else ("--batch", str(batch))
    return _networks("networks_others", _FORMS, "--network", name, *forms, *of_batch)


def _networks(suite: str, peers: str, *options: str, modes: str = "compile,fused_graph") -> Step:
    """Whole networks against other rivals, in a file of their own. Ours is timed again, in the forms that are its
    fastest: a speed is a ratio of times of one run."""
    command = ("networks", "--suite", suite, "--modes", modes, "--peers", peers, *options)
    return Step(suite, command)


_NETWORKS = ("yolov3", "rrdb", "vgg16", "densenet161", "sd_vae_decoder", "resnet50", "unet")  # of README's table
_OTHERS = (
    "efficientnet_b0", "hrnet_w18", "segformer_mit_b2", "repvgg_b1", "mobilenet_v3_large", "convnext_tiny", "yolov8n",
    "retinanet_resnet50_fpn", "sd15_unet", "sdxl_unet",
)  # fmt: skip
# Of equal use the longest come first, so that several GPUs end together.
PHASES: dict[str, Phase] = {
    "layers": Phase(
        (
            (_layers("layers", 5), _layers("strided", 3)),
            (
                _layers("groups", 3),
                _layers("pointwise", 3),
                _layers("stems", 3),
                Step("megakernel", ("megakernel", "--parts", "layers,rivals"), resumes=False),
            ),
        )
    ),
    # With bias and ReLU, and with a residual between them, where cuDNN's graphs have the fusion.
    "layers_fused": Phase(
        (
            tuple(
                _layers(layer_set, 4, direction, "--batch", "64", "--classes", _CLASSES)
                for layer_set in ("layers", "pointwise")
                for direction in FUSED
            ),
        )
    ),
    "networks": Phase(
        (
            (
                _network("yolov3", "fp32,tf32", 1),
                _network("rrdb"),
                _network("vgg16", workers=2),
                _network("densenet161", "fp32,tf32", 2),
                _network("densenet161", "fp16,bf16", 2),
                _network("yolov3", "fp16,bf16", 2),
                *map(_network, ("sd_vae_decoder", "resnet50", "unet")),
            ),
        )
    ),
    # One queue: the plans of eight processes are more than a card of 80 GB.
    "gradients": Phase(((*_gradients("weight", _CLASSES), *_gradients("input", _CLASSES)),)),
    # The sources' experiments. Whoever compiles keeps all others from timing all the while.
    "papers": Phase(
        (
            # VGG-19's first layers with their rivals' workspaces take most of a card of 80 GB.
            (_survey(256, 2), _survey(128, 2), *(_survey(batch, 4) for batch in (64, 32, 16, 8, 1))),
            (
                _paper("lenet5", "network", "_network"),
                _paper("megakernel", "filters"),
                _paper("megakernel", "resnet2", "_resnet2"),
            ),
        )
    ),
    "papers_compiled": Phase(
        (
            (
                _resnets("resnet152"),
                _resnets("resnet101,resnet34"),
                _resnets("resnet50,resnet18"),
                _paper("single_image", "blocks", "_blocks"),
            ),
        )
    ),
    "papers_layers": Phase(
        (
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
        )
    ),
    "networks_others": Phase(
        (
            (
                *map(_another_network, _OTHERS),
                *(_another_network(name, its, 1) for its in ("fp32,tf32", "fp16,bf16") for name in DECODERS),
                *(_another_network(name, _CLASSES, 2, 8) for name in ("sd_vae_decoder", "rrdb")),
                *(_another_network(name, _CLASSES, batch=n) for n in (8, 1) for name in (*MAIN_NETWORKS, "unet")),
            ),
        )
    ),
    # Problems of the corpus that no constant was fitted to, drawn anew.
    "regret": Phase(
        (
            tuple(
                Step("regret", ("regret", "--split", "judge", "--workers", "4", "--classes", _CLASSES, *options))
                for options in (
                    ("--sample", "110", "--seed", "26", "--layouts", "nhwc"),
                    ("--sample", "40", "--seed", "27", "--layouts", "nchw"),
                    ("--sample", "40", "--seed", "28", "--layouts", "nhwc", "--pass", "backward_input"),
                    ("--sample", "40", "--seed", "29", "--layouts", "nhwc", "--pass", "backward_weight"),
                )
            ),
        )
    ),
    "training_compiled": Phase(
        (tuple(Step("training", ("training", "--network", name, "--modes", "compile")) for name in training.BATCHES),),
        quiet=True,
    ),
    "alone": Phase(
        (
            (
                *(Step("training", ("training", "--network", name)) for name in training.BATCHES),
                Step("host", ("host",), resumes=False),
            ),
        ),
        quiet=True,
    ),
    "gradients_others": Phase(((*_gradients("weight", _OTHER_CLASSES), *_gradients("input", _OTHER_CLASSES)),)),
    # What is timed of cuDNN alone goes with the leanest kernels around it, which are those of frozen networks. Neither
    # these nor `fused` are graphs, so that the memory that they take can be told.
    "networks_cudnn": Phase(
        (
            tuple(
                _networks(
                    "networks_cudnn", "torch_eager,folded_eager,frozen_default,cudnn_best_layers", "--network", name,
                    "--workers", "2", "--compile-limit", "150", modes="fused,compile,fused_graph",
                )
                for name in _NETWORKS
            ),
        )
    ),
    # Compiled beside each other for the caches alone; what max-autotune keeps it has timed with the GPU for itself.
    "networks_autotune": Phase(
        (
            tuple(
                _networks(
                    "networks_autotune", "compile_max_autotune,frozen_max_autotune", "--network", name,
                    "--compile-workers", "3", "--compile-limit", "600",
                )
                for name in _NETWORKS
            ),
        )
    ),
}  # fmt: skip


def run(
    phases: Iterable[Phase],
    folder: Path,
    head: results.Document,
    budget_s: float,
    report: Callable[[str], None],
    gpus: Sequence[str] = (),
) -> list[str]:
    """Runs the phases, with a log for each step beside its result file in `folder`.

    head: of any suite of this machine and commit. budget_s: no step begins in the last seconds of it, and those that
    run begin nothing new after it. gpus: what CUDA_VISIBLE_DEVICES is to be for each of several GPUs; their steps' logs
    lie in `folder`/gpu0 and so on. Returns what is missing or went wrong, a line for each step.
    """
    folder.mkdir(parents=True, exist_ok=True)
    steps = _Steps(folder, head, time.monotonic() + budget_s, report, lanes=len(gpus) or 1)
    wrong: list[str] = []
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
                    lines += [line for step in queue if (line := steps.run(step, lane))]

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
        self, folder: Path, head: results.Document, deadline: float, report: Callable[[str], None], lanes: int
    ) -> None:  # fmt: skip
        self._folder, self._head, self._deadline, self._report = folder, head, deadline, report
        self._joining = threading.Lock()
        self._threads = str(max(1, (os.cpu_count() or 1) // (lanes * WORKERS)))

    def run(self, step: Step, lane: _Lane) -> str:
        """What is missing of a step; "" if nothing is."""
        path, left = self._folder / f"{step.suite}.json", self._deadline - time.monotonic()
        if not step.resumes and _rows(path, self._head):
            self._report(f"{step.suite}: the file has it")
            return ""
        if left < SHORTEST_S:
            return f"{step.suite}: not begun, the time is spent"
        begin = time.monotonic()
        environment = {**dict.fromkeys(THREADS, self._threads), **os.environ}  # as it is now: with the lock of the turns
        if lane is None:
            code = _process(step, path, left, environment)
        else:
            own = self._folder / f"gpu{lane[0]}" / path.name
            own.parent.mkdir(exist_ok=True)
            self._join([own, path], own)
            code = _process(step, own, left, {**environment, "CUDA_VISIBLE_DEVICES": lane[1]})
            self._join([path, own], path)
            path = own
        self._report(f"{step.suite}: {_rows(path, self._head)} rows, {time.monotonic() - begin:.0f} s")
        if code != 0:
            return f"{step.suite}: exit code {code}; {path.with_suffix('.log')} says why"
        missing = len(results.read(path).get("missing", []))
        return f"{step.suite}: {missing} not measured, the time was over" if missing else ""

    def _join(self, paths: Sequence[Path], into: Path) -> None:
        """What the files have of this machine and commit."""
        with self._joining:
            known = [path for path in paths if _rows(path, self._head)]
            if known and known != [into]:
                results.write(into, merge.joined(known))


def _process(step: Step, path: Path, left: float, environment: dict[str, str]) -> int | str:
    """How a step ended that has so many seconds left."""
    command = [sys.executable, "-c", _STEP, json.dumps(sys.path), *step.arguments(path, left)]
    with (
        open(path.with_suffix(".log"), "a") as log,
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


def _rows(path: Path, head: results.Document) -> int:
    """How many rows of this machine, versions and commit a file has."""
    return len(results.own_rows(results.merge(path, {**head, "suite": path.stem}, ())))


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
    folder: Annotated[Path | None, typer.Option(help="Where the files go; default benchmarks/results/<gpu>.")] = None,
    budget: Annotated[float, typer.Option(metavar="SECONDS", help="Begin nothing after.")] = 3600.0,
    gpus: Annotated[
        str, typer.Option(help="Numbers of GPUs of one kind that share the work, with commas between, or all.")
    ] = "",
    device: DeviceOption = "auto",
) -> None:
    """Every suite of README and docs, on one GPU or several; run it again to go on where it ended (GPU)."""
    from fastconv import environment
    from fastconv.cli.support import split

    names = list(PHASES) if phases == "all" else split(phases, "phases", list(PHASES))
    where = device_named(device)
    if where.type != "cuda":
        raise fail("no CUDA GPU on this machine: nothing was measured")
    head: Any = environment.describe("layers", where)
    lanes = _visible(gpus) if gpus else []
    where_to = folder or results.default_path(head).parent
    wrong = run([PHASES[name] for name in names], where_to, head, budget, say, lanes)
    if wrong:
        raise fail("; ".join(wrong))
