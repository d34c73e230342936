"""The forms in which a whole network runs: ours and PyTorch's own, from a plain forward to max-autotune with freezing.

A form says which model runs (as it is, batch norms folded, swapped, fused), how it is compiled, and whether it is
captured in a CUDA graph. A contender is a form in one memory layout.
"""

from __future__ import annotations

import copy
import multiprocessing
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import fastconv
from benchmarks.harness import turns
from benchmarks.harness.runs import LAYOUTS, TF32, time_limit
from benchmarks.peers import over_all_plans
from fastconv import timing
from fastconv.models.compare import CLASS_DTYPE, precision_of, pytorch_class


@dataclass(frozen=True)
class Form:
    """model: torch, folded, swapped or fused; rewritten: PyTorch's, by `fastconv.compile`. mode: that of torch.compile;
    None: eager. frozen: with Inductor's freezing, which makes constants of the weights and folds batch norms. graph:
    captured in a CUDA graph by us, with its input in place; a mode may bring a graph of its own. all_plans: cuDNN's
    search is over every plan (benchmark_limit=0), which takes long."""

    model: str
    mode: str | None = None
    frozen: bool = False
    graph: bool = False
    all_plans: bool = False


# Ours, a row of the result file each.
MODES = {
    "eager": Form("swapped"),
    "compile": Form("rewritten", "reduce-overhead", frozen=True),
    # The same without a graph, so that its memory and its kernels can be told.
    "compile_default": Form("rewritten", "default", frozen=True),
    "compile_graph": Form("rewritten", "default", frozen=True, graph=True),
    "graph": Form("swapped", graph=True),
    "fused": Form("fused"),
    "fused_graph": Form("fused", graph=True),
}

# PyTorch's own. folded: batch norms folded into the convolutions by torch.fx.
PEERS = {
    "torch_eager": Form("torch"),
    "torch_graph": Form("torch", graph=True),
    "folded_eager": Form("folded"),
    "folded_graph": Form("folded", graph=True),
    "folded_graph_all_plans": Form("folded", graph=True, all_plans=True),
    "compile_default": Form("torch", "default"),
    "compile_graph": Form("torch", "default", graph=True),
    "compile_reduce_overhead": Form("torch", "reduce-overhead"),
    "compile_max_autotune": Form("torch", "max-autotune"),
    "frozen_default": Form("torch", "default", frozen=True),
    "frozen_graph": Form("torch", "default", frozen=True, graph=True),
    "frozen_reduce_overhead": Form("torch", "reduce-overhead", frozen=True),
    "frozen_max_autotune": Form("torch", "max-autotune", frozen=True),
}


@dataclass(frozen=True)
class Contender:
    """A form of one side in one memory layout; `name` is unique among all contenders of a network and class. tf32: with
    PyTorch's switches on, whatever the class is."""

    ours: bool
    form_name: str
    layout: str
    tf32: bool = False

    @property
    def form(self) -> Form:
        return (MODES if self.ours else PEERS)[self.form_name]

    @property
    def name(self) -> str:
        prefix = "fastconv_" if self.ours else TF32 if self.tf32 else ""
        return f"{prefix}{self.form_name}_{self.layout}"

    @property
    def has_graph(self) -> bool:
        """Whether the GPU gets all of it in one launch: neither its kernels nor its memory can be told apart."""
        return self.form.graph or self.form.mode in ("reduce-overhead", "max-autotune")


def compiler_options(form: Form, layout: str) -> dict[str, Any]:
    """Inductor's options of a compiled form. It makes convolutions channels_last unless told not to."""
    from torch._inductor import list_mode_options

    return {**list_mode_options(form.mode), "freezing": form.frozen, "layout_optimization": layout == "nhwc"}


def fold(model: nn.Module) -> nn.Module:
    """A copy with its batch norms folded into the convolutions by PyTorch's own tool: the rival of `fastconv.fuse`."""
    from torch.fx.experimental import optimization

    return optimization.fuse(model)


@dataclass
class Case:
    """One network in one class: its models and compiled models, made when first asked for, and shared by the forms."""

    base: nn.Module
    cls: str
    algorithm: str
    pictures: Tensor
    device: torch.device
    compile_limit_s: float | None = None
    deadline: float | None = None  # of harness.runs.deadline_of: behind it nothing goes on being compiled
    models: dict[tuple[str, str], nn.Module] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    swaps: dict[str, fastconv.SwapReport] = field(default_factory=dict)  # of the swapped models, by layout
    compiles: dict[str, fastconv.CompileReport] = field(default_factory=dict)  # of `fastconv.compile`, by layout
    _compiled: dict[tuple[str, str | None, bool, str, bool], Callable[..., Any]] = field(default_factory=dict)
    _pool: Any = None  # of all captures: one graph runs at a time, and nobody reads an older one's output

    def input(self, layout: str) -> Tensor:
        if layout not in self.inputs:
            x = self.pictures.to(self.device, CLASS_DTYPE[self.cls])
            self.inputs[layout] = x.to(memory_format=LAYOUTS[layout])
        return self.inputs[layout]

    def model(self, kind: str, layout: str) -> nn.Module:
        """kind: torch, folded, swapped or fused."""
        if (kind, layout) not in self.models:
            model = copy.deepcopy(self.base).to(self.device, CLASS_DTYPE[self.cls])
            model = model.to(memory_format=LAYOUTS[layout])  # type: ignore[call-overload]
            precision = precision_of(self.cls)
            if kind == "swapped":
                self.swaps[layout] = fastconv.swap_(model, algorithm=self.algorithm, precision=precision)
            elif kind == "fused":
                model = fastconv.fuse(model, algorithm=self.algorithm, precision=precision)
            elif kind == "folded":
                model = fold(model).to(memory_format=LAYOUTS[layout])  # type: ignore[call-overload]
            self.models[kind, layout] = model
        return self.models[kind, layout]

    def call(self, contender: Contender) -> Callable[[], Any]:
        """One forward pass of a contender. All searches, compilation and capture are done when it is returned."""
        form, layout = contender.form, contender.layout
        x = self.input(layout)
        forward: Callable[..., Any]
        forward = self.model(form.model, layout) if form.mode is None else self.compiled(form, layout, contender.tf32)
        if form.all_plans:
            return over_all_plans(lambda: self._graphed(forward, x), self.device)
        return self._graphed(forward, x) if form.graph else lambda: forward(x)

    def compiled(self, form: Form, layout: str, tf32: bool = False) -> Callable[..., Any]:
        """The compiled model of a form, by PyTorch's switches as they are now, which `tf32` tells apart from the
        class's own. Raises TimeoutError where there is too little time."""
        key = form.model, form.mode, form.frozen, layout, tf32
        if key not in self._compiled:
            from torch._inductor import config

            options, x = compiler_options(form, layout), self.input(layout)
            compiled: Any
            if form.model == "rewritten":
                compiled = fastconv.compile(
                    self.model("torch", layout), precision_of(self.cls), algorithm=self.algorithm, frozen=form.frozen,
                    dynamic=False, mode=form.mode,
                )  # fmt: skip
                self.compiles[layout] = compiled.report
            else:
                compiled = torch.compile(self.model(form.model, layout), dynamic=False, options=options)
            # Freezing is also asked for where Dynamo traces.
            with config.patch(options):
                with time_limit(self.compile_limit_s, self.deadline):
                    compiled(x)
                for _ in range(2):  # a mode's own graph is recorded in the second call
                    compiled(x)
            self._compiled[key] = compiled
        return self._compiled[key]

    def _graphed(self, model: Callable[..., Any], x: Tensor) -> Callable[[], Any]:
        if not x.is_cuda:
            raise RuntimeError("CUDA graphs need a CUDA device")
        stream = torch.cuda.Stream(x.device)
        stream.wait_stream(torch.cuda.current_stream(x.device))
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        with torch.cuda.stream(stream):
            model(x)  # lazy loading and cuDNN's search, which a capture does not allow
            torch.cuda.synchronize(x.device)
            graph, output = timing.capture(lambda: model(x), self._pool)

        def replay() -> Any:
            graph.replay()
            return output

        return replay

    def release(self) -> None:
        """Gives all models, compiled models and inputs up."""
        self.models.clear()
        self.inputs.clear()
        self._compiled.clear()

    def counts(self, kind: str, layout: str) -> dict[str, int]:
        """Of a swapped, fused or rewritten model, after a forward pass: `total` convolutions, `swapped` of them
        fastconv's, `ours` of these where an algorithm of ours ran (in the others PyTorch's own convolution did),
        `fused` with more."""
        if kind != "rewritten":
            model = self.model(kind, layout)
            model(self.input(layout))
        if kind != "swapped":
            found: Any = model.report if kind == "fused" else self.compiles[layout]
            swapped = sum(row.count for row in found.rows if row.fused) if kind == "fused" else found.ours
            return {"swapped": swapped, "ours": found.ours, "fused": found.fused, "total": found.total}
        report = self.swaps[layout]
        ours = sum(row.swapped and row.algorithm != "torch" for row in report.rows)
        return {"swapped": report.swapped, "ours": ours, "fused": 0, "total": report.total}


@dataclass(frozen=True)
class Job:
    """A compilation, as plain values that travel to a worker process."""

    network: str
    cls: str
    contender: Contender
    algorithm: str
    batch: int
    image: int
    device: str
    limit_s: float | None


def compile_one(job: Job) -> None:
    """Compiles what a contender runs, for the sake of Inductor's and Triton's caches on disk; a failure shows later.

    Nothing that is chosen by timing is kept: other processes compile, and use the device, at the same time.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import config

    from benchmarks.networks import zoo

    device, form = torch.device(job.device), job.contender.form
    keeps_graph = form.mode != "max-autotune"
    base, pictures = zoo.build(job.network, image=job.image), zoo.inputs(job.network, job.batch, job.image)
    case = Case(base, job.cls, job.algorithm, pictures, device, job.limit_s)
    with (
        turns.preparing(), torch.inference_mode(), pytorch_class(job.cls, benchmark=False), warnings.catch_warnings(),
        config.patch(autotune_local_cache=False, fx_graph_cache=keeps_graph),
        functorch_config.patch(enable_autograd_cache=keeps_graph),
    ):  # fmt: skip
        warnings.simplefilter("ignore")
        case.compiled(form, job.contender.layout)


def compile_ahead(jobs: Sequence[Job], workers: int, limit_s: float | None, report: Callable[[str], None]) -> None:
    """Compiles in `workers` processes at a time until all is done, for at most `limit_s` seconds."""
    begin = time.perf_counter()
    pool = futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
    waiting = {pool.submit(compile_one, job): job for job in jobs}
    try:
        for done in futures.as_completed(waiting, limit_s):
            job, error = waiting[done], done.exception()
            state = "compiled" if error is None else f"{type(error).__name__}: {error}".splitlines()[0]
            report(f"{job.network} {job.cls} {job.contender.name}: {state} after {time.perf_counter() - begin:.0f} s")
    except TimeoutError:
        report("compiling ahead: the time is spent")
        for process in list((pool._processes or {}).values()):  # what is compiling cannot be asked to stop
            process.terminate()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
