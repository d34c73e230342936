"""The main job, shown: real networks on real photographs, swapped, equal to the unswapped within a stated bound."""

from __future__ import annotations

import copy
import gc
import math
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import fastconv
from fastconv.models import MAIN_NETWORKS, build, network, photographs
from fastconv.models.compare import CLASS_DTYPE, ERROR_MULTIPLE, agreement, bound, precision_of, pytorch_class

# Forced beside "auto", so that something of ours is shown even where PyTorch's own is the fastest choice.
FORCED = "winograd_f4"
SCATTER = 2.0  # a network's error over what its layers' errors let expect
CPU_BATCH = 2
SLOWER = 1.03  # times PyTorch's time: beyond the noise
REFERENCE_PICTURES = 8  # of the batch, run in float64: GPUs do that slowly
TIMED_PASSES = {"cpu": 5, "cuda": 10}


@dataclass(frozen=True)
class Pass:
    """One network with one `algorithm` asked for, beside its unswapped self.

    swapped of total convolutions are fastconv's; `ran` counts what these ran. difference, max_difference, top1: swapped
    against unswapped on the whole batch; bound: of `difference`. error, peer_error: of the swapped and the unswapped
    logits against float64. ms, peer_ms: median time of one forward pass, of both in turns.
    """

    network: str
    algorithm: str
    precision: str
    device: str
    batch: int
    swapped: int
    total: int
    ran: dict[str, int]
    difference: float
    max_difference: float
    bound: float
    top1: float
    error: float
    peer_error: float
    ms: float
    peer_ms: float

    @property
    def problem(self) -> str | None:
        """Why the pass shows nothing or shows an error; None if it is good."""
        if self.swapped == 0:
            return "nothing was swapped"
        if not self.difference <= self.bound:  # NaN fails too
            return f"swapped and unswapped logits differ by {self.difference:.1e}, more than {self.bound:.1e}"
        return None

    @property
    def slowdown(self) -> str | None:
        """In words, that the network became slower than PyTorch's by more than SLOWER; None if it did not."""
        if not self.ms > SLOWER * self.peer_ms:
            return None
        text = (
            f"slower than PyTorch: {self.ms:.0f} ms where PyTorch takes {self.peer_ms:.0f}, "
            f"{self.ms / self.peer_ms:.2f} times as long"
        )
        return text + ("; fastconv tune measures what auto should take here" if self.algorithm == "auto" else "")


def default_algorithms() -> list[str]:
    """`auto`, and FORCED if this build has it."""
    known = [row.name for row in fastconv.algorithms()]
    return ["auto", *([FORCED] if FORCED in known else [])]


def run(
    networks: Sequence[str] = MAIN_NETWORKS,
    *,
    device: torch.device | str | None = None,
    batch: int | None = None,
    image: int | None = None,
    precision: str = "fp32",
    algorithms: Sequence[str] | None = None,
    console: Console | None = None,
) -> list[Pass]:
    """Runs every network with every algorithm and prints what happened.

    device: default the GPU if there is one. batch: default the paper's on a GPU, 2 on a CPU. image: side of the
    pictures, default the network's own. precision: accuracy class, see `fastconv.models.compare.CLASS_DTYPE`.
    Raises ValueError for an unknown network, class or algorithm, and for an image that a network cannot take; the
    caller looks at `Pass.problem`.
    """
    console = console or Console()
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    precision_of(precision)
    chosen = list(algorithms) if algorithms else default_algorithms()
    known = ["auto", *(row.name for row in fastconv.algorithms())]
    for name in chosen:
        if name not in known:
            raise ValueError(f"algorithm is {name!r}; expected one of {', '.join(known)}")
    for name in networks:
        network(name, image)
    passes = []
    for name in networks:
        passes += _run_network(name, target, batch, image, precision, chosen, console)
        gc.collect()
        if target.type == "cuda":
            torch.cuda.empty_cache()
    console.print(table(passes))
    for item in passes:
        if item.problem:
            console.print(f"[red]{item.network}, {item.algorithm}: {item.problem}[/red]")
    for item in passes:
        if item.slowdown:
            console.print(f"[yellow]{item.network}, {item.algorithm}: {item.slowdown}[/yellow]", highlight=False)
    return passes


@torch.inference_mode()
def _run_network(
    name: str,
    device: torch.device,
    batch: int | None,
    image: int | None,
    precision: str,
    algorithms: Sequence[str],
    console: Console,
) -> list[Pass]:
    entry = network(name)
    batch = batch or (entry.batch if device.type == "cuda" else CPU_BATCH)
    dtype = CLASS_DTYPE[precision]
    console.rule(f"{name}: {batch} photographs, {precision}, {device}")
    with console.status("unswapped, and in float64"), pytorch_class(precision, benchmark=device.type == "cuda"):
        model = build(name, image=image)
        pictures = photographs(batch, image or entry.image)
        few = slice(0, REFERENCE_PICTURES)
        exact = copy.deepcopy(model).to(device, torch.float64)(pictures[few].to(device, torch.float64))
        model = model.to(device, dtype)
        x = pictures.to(device, dtype)
        plain = model(x)
        peer_error = agreement(_rows(plain, few), exact).relative_l2
    convolutions = sum(isinstance(module, nn.Conv2d) for module in model.modules())
    multiples = {row.name: SCATTER * row.accuracy.get(precision, 0.0) for row in fastconv.algorithms()}

    passes = []
    for algorithm in algorithms:
        with console.status(f"swapped, {algorithm}"), pytorch_class(precision, benchmark=device.type == "cuda"):
            swapped = copy.deepcopy(model)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # nothing swapped: said below, as a failure
                report = fastconv.swap_(swapped, algorithm=algorithm, precision=precision_of(precision))
            layers = [module for module in swapped.modules() if isinstance(module, fastconv.Conv2d)]
            output = swapped(x)
            peer_ms, ms = _timed([model, swapped], x)
            ran = Counter(str(layer.last_algorithm) for layer in layers)
            versus_plain, versus_exact = agreement(output, plain), agreement(_rows(output, few), exact)
        multiple = max([ERROR_MULTIPLE, *(multiples.get(name, 0.0) for name in ran)])
        passes.append(
            Pass(
                network=name,
                algorithm=algorithm,
                precision=precision,
                device=str(device),
                batch=batch,
                swapped=report.swapped,
                total=report.total,
                ran=dict(ran),
                difference=versus_plain.relative_l2,
                max_difference=versus_plain.maximum,
                bound=bound(peer_error, precision, convolutions, multiple),
                top1=versus_plain.top1,
                error=versus_exact.relative_l2,
                peer_error=peer_error,
                ms=ms,
                peer_ms=peer_ms,
            )
        )
        _print_pass(passes[-1], report, console)
    return passes


def _rows(output: Tensor | tuple[Tensor, ...], rows: slice) -> Tensor | tuple[Tensor, ...]:
    return output[rows] if isinstance(output, Tensor) else tuple(tensor[rows] for tensor in output)


def _timed(models: Sequence[nn.Module], x: Tensor) -> list[float]:
    """Each model's median milliseconds of a forward pass: in turns, so that what slows the machine slows all.

    They have run before: nothing warms them up here.
    """

    def milliseconds(model: nn.Module) -> float:
        synchronise()
        begin = time.perf_counter()
        model(x)
        synchronise()
        return (time.perf_counter() - begin) * 1e3

    def synchronise() -> None:
        if x.is_cuda:
            torch.cuda.synchronize(x.device)

    turns = [[milliseconds(model) for model in models] for _ in range(TIMED_PASSES[x.device.type])]
    return [statistics.median(times) for times in zip(*turns, strict=True)]


def _print_pass(item: Pass, report: Any, console: Console) -> None:
    ran = ", ".join(f"{count} {name}" for name, count in sorted(item.ran.items(), key=lambda pair: -pair[1]))
    swapped = f"{item.swapped} of {item.total} convolutions swapped"
    console.print(f"[bold]{item.algorithm}[/bold]: {swapped}; ran: {ran or '-'}", highlight=False)
    console.print(
        f"  largest difference {item.max_difference:.1e} of the largest logit; error against float64 {item.error:.1e} "
        f"(PyTorch's {item.peer_error:.1e}); {item.ms:.1f} ms (PyTorch's {item.peer_ms:.1f} ms)",
        highlight=False,
    )
    reasons = Counter(row.reason for row in report.rows if not row.swapped)
    for reason, count in reasons.most_common(5):
        console.print(f"  left alone, {count}: {reason}", highlight=False, markup=False)


def table(passes: Sequence[Pass]) -> Table:
    """All passes, one line each."""
    found = Table("network", "algorithm", "swapped", title="swapped against unswapped, on the same photographs")
    for column in ("difference", "bound", "top-1"):
        found.add_column(column, justify="right")
    found.add_column("")
    for item in passes:
        found.add_row(
            item.network,
            item.algorithm,
            f"{item.swapped}/{item.total}",
            _scientific(item.difference),
            _scientific(item.bound),
            f"{100 * item.top1:.1f}%",
            "[red]FAILED[/red]" if item.problem else "[green]equal[/green]",
        )
    found.caption = "difference: of the logits, relative L2; top-1: share of decisions for the same class"
    return found


def _scientific(value: float) -> str:
    return "nan" if math.isnan(value) else f"{value:.1e}"
