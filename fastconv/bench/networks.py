"""`fastconv bench networks`: whole networks, swapped or fused against unswapped, eager, compiled and as CUDA graphs.

A contender is a form (eager, compile, graph; of ours also fused, fused_graph: what `fastconv.fuse` made of the network,
eager and as a graph) of the swapped or the unswapped network in one memory layout. All
contenders of a network and class are timed interleaved, one forward pass each per round, after a synchronisation, so
that the host's launch gaps count for everybody whose GPU waits for them.
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fastconv
from fastconv.bench import environment, results, timing
from fastconv.models import MAIN_NETWORKS, build, flatten_output, network, photographs
from fastconv.models.compare import CLASS_DTYPE, Agreement, agreement, precision_of, pytorch_class

FORMS = ("eager", "compile", "graph")
# PyTorch's own, each with all that it can do beside ours: a compiled network in a graph, and, for the fused modes, the
# network with its batch norms folded into the convolutions by torch.fx.
PEER_FORMS = (*FORMS, "compile_graph", "folded", "folded_compile", "folded_graph", "folded_compile_graph")
MODES = (*FORMS, "fused", "fused_graph")
LAYOUTS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
KEY = ("network", "batch", "class", "mode")
LAYER_PASSES = 3

Report = Callable[[str], None]


@dataclass(frozen=True)
class Contender:
    """`ours`: the swapped network; else PyTorch's own."""

    ours: bool
    form: str
    layout: str

    @property
    def name(self) -> str:
        who = "fastconv" if self.ours else "torch"
        return f"{who}_{self.layout}" if self.form == "eager" else f"{who}_{self.form}_{self.layout}"

    @property
    def parts(self) -> frozenset[str]:
        """What the form is made of: fused (ours), folded (PyTorch's), compile, graph."""
        return frozenset(self.form.split("_")) - {"eager"}


@dataclass
class _Case:
    """One network in one class: its models, made when first asked for, and what was found out about them."""

    base: nn.Module
    cls: str
    algorithm: str
    pictures: Tensor
    device: torch.device
    models: dict[tuple[str, str], nn.Module] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)  # kind -> layers that are ours, all

    def input(self, layout: str) -> Tensor:
        if layout not in self.inputs:
            x = self.pictures.to(self.device, CLASS_DTYPE[self.cls])
            self.inputs[layout] = x.to(memory_format=LAYOUTS[layout])
        return self.inputs[layout]

    def model(self, ours: bool, layout: str, form: str = "eager") -> nn.Module:
        kind = _kind(ours, form)
        if (kind, layout) not in self.models:
            model = copy.deepcopy(self.base).to(self.device, CLASS_DTYPE[self.cls])
            model = model.to(memory_format=LAYOUTS[layout])  # type: ignore[call-overload]
            precision = precision_of(self.cls)
            if kind == "swapped":
                report = fastconv.swap_(model, algorithm=self.algorithm, precision=precision)
                self.counts[kind] = report.swapped, report.total
            elif kind == "fused":
                model = fastconv.fuse(model, algorithm=self.algorithm, precision=precision)
                rows = model.report.rows
                self.counts[kind] = sum(bool(row.fused) for row in rows), len(rows)
            elif kind == "folded":
                model = fold(model).to(memory_format=LAYOUTS[layout])  # type: ignore[call-overload]
            self.models[kind, layout] = model
        return self.models[kind, layout]

    def call(self, contender: Contender) -> Callable[[], Any]:
        """One forward pass of a contender. Compilation and capture happen here or in the first call."""
        model, x = self.model(contender.ours, contender.layout, contender.form), self.input(contender.layout)
        compiled = "compile" in contender.parts
        forward: Callable[..., Any] = torch.compile(model, dynamic=False) if compiled else model
        return _graphed(forward, x) if "graph" in contender.parts else lambda: forward(x)


def _kind(ours: bool, form: str) -> str:
    """Which model a form runs: torch, folded, swapped or fused."""
    special = "fused" if ours else "folded"
    return special if special in form.split("_") else "swapped" if ours else "torch"


def _graphed(model: Callable[..., Any], x: Tensor) -> Callable[[], Any]:
    if not x.is_cuda:
        raise RuntimeError("CUDA graphs need a CUDA device")
    stream = torch.cuda.Stream(x.device)
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        model(x)  # lazy loading and cuDNN's search, which a capture does not allow
    torch.cuda.synchronize(x.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        output = model(x)

    def replay() -> Any:
        graph.replay()
        return output

    return replay


def fold(model: nn.Module) -> nn.Module:
    """A copy with its batch norms folded into the convolutions by PyTorch's own tool: the rival of `fastconv.fuse`."""
    from torch.fx.experimental import optimization

    return optimization.fuse(model)


def _synchronised(call: Callable[[], Any], device: torch.device) -> Callable[[], None]:
    def run() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        call()

    return run


def swapped_layers(model: nn.Module) -> list[str]:
    """Names of the layers of a model that are fastconv's."""
    return [name for name, module in model.named_modules() if isinstance(module, fastconv.Conv2d)]


def time_inside(model: nn.Module, layers: Iterable[str], x: Tensor, passes: int = LAYER_PASSES) -> float:
    """Microseconds that one forward pass spends inside the named layers: the median over `passes`, one more before.

    On CUDA each layer is enclosed in two events, and the GPU is kept waiting until the host has put the whole pass into
    its queue: the sum is of GPU time, without launch gaps.
    """
    cuda = x.is_cuda
    spans: list[tuple[Any, Any]] = []
    begun: list[Any] = []

    def stamp() -> Any:
        if not cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def before(module: nn.Module, inputs: Any) -> None:
        begun.append(stamp())

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        spans.append((begun.pop(), stamp()))

    modules = dict(model.named_modules())
    hooks = [
        hook
        for name in layers
        for hook in (modules[name].register_forward_pre_hook(before), modules[name].register_forward_hook(after))
    ]
    sums: list[float] = []
    try:
        begin = time.perf_counter()
        model(x)
        host_s = time.perf_counter() - begin
        for _ in range(passes):
            spans.clear()
            if cuda:
                torch.cuda.synchronize(x.device)
                # Cycles at no more than 2 GHz: the pause outlasts the host's work, of which the warm-up tells the size.
                torch.cuda._sleep(int(2e9 * min(2 * host_s, 0.2)))
            model(x)
            if cuda:
                torch.cuda.synchronize(x.device)
                sums.append(sum(first.elapsed_time(second) for first, second in spans) * 1e3)
            else:
                sums.append(sum(second - first for first, second in spans) * 1e6)
    finally:
        for hook in hooks:
            hook.remove()
    return statistics.median(sums)


def suite_name(device: torch.device) -> str:
    """Of the result file."""
    return "networks" if device.type == "cuda" else "networks_cpu"


def contenders_of(
    modes: Sequence[str], peers: Sequence[str], layouts: Sequence[str], compiled_layouts: Sequence[str]
) -> list[Contender]:
    """Ours in every mode, PyTorch's in every form of `peers`, each in every layout; compiled ones last.

    Raises ValueError for an unknown mode, form or layout.
    """

    def layouts_of(form: str) -> Sequence[str]:
        return compiled_layouts if "compile" in form else layouts

    every_layout = [*layouts, *compiled_layouts]
    for kind, values, known in (
        ("mode", modes, MODES),
        ("peer", peers, PEER_FORMS),
        ("layout", every_layout, tuple(LAYOUTS)),
    ):
        for value in values:
            if value not in known:
                raise ValueError(f"{kind} is {value!r}; expected one of {', '.join(known)}")
    found = [
        Contender(ours, form, layout)
        for ours, forms in ((True, modes), (False, peers))
        for form in forms
        for layout in layouts_of(form)
    ]
    return sorted(found, key=lambda contender: "compile" in contender.parts)


def run(
    networks: Sequence[str] = MAIN_NETWORKS,
    classes: Sequence[str] = ("fp32", "tf32", "fp16", "bf16"),
    modes: Sequence[str] | None = None,
    rounds: int = 20,
    device: torch.device | str | None = None,
    out: Path | str | None = None,
    *,
    peers: Sequence[str] | None = None,
    layouts: Sequence[str] = tuple(LAYOUTS),
    compiled_layouts: Sequence[str] | None = None,
    algorithm: str = "auto",
    batch: int | None = None,
    image: int | None = None,
    reference_pictures: int = 8,
    budget_s: float | None = None,
    report: Report = lambda line: None,
) -> results.Document:
    """Times networks and compares their outputs with float64; returns the result file's content.

    networks, classes: names, see `fastconv.models.NETWORKS` and `CLASS_DTYPE`.
    compiled_layouts: those of compiled networks, if not all: the compiler lays convolutions out as it likes.
    modes: how ours runs, one row each: "eager", "compile", "graph" swapped, "fused" and "fused_graph" through
        `fastconv.fuse`. peers: how PyTorch runs, of PEER_FORMS; graphs are rivals of graphs alone, folded batch norms
        of the fused modes alone. None: all on CUDA; on the CPU ours "eager" and "fused", peers "eager" and "compile".
    batch, image: instead of the network's own. reference_pictures: pictures of the batch that are compared.
    out: the result file, written after every network and class; rows of the same machine and commit are kept.
    budget_s: after so many seconds nothing more is compiled, and no further network or class is begun.
    Raises ValueError for an unknown name. A contender that fails is null in its row, the reason under `failures`.
    """
    for name in networks:
        network(name)
    for cls in classes:
        precision_of(cls)
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    cuda = target.type == "cuda"
    modes = (MODES if cuda else ("eager", "fused")) if modes is None else modes
    peers = (PEER_FORMS if cuda else ("eager", "compile")) if peers is None else peers
    contenders = contenders_of(modes, peers, layouts, layouts if compiled_layouts is None else compiled_layouts)
    head = environment.describe(suite_name(target), target)
    document = results.merge(out, head, KEY) if out else {**head, "rows": []}
    deadline = None if budget_s is None else time.perf_counter() + budget_s

    for name in networks:
        if _is_past(deadline):
            break
        entry = network(name)
        base = build(name, image=image)
        pictures = photographs(batch or entry.batch, image or entry.image)
        reference = _reference(base, pictures[:reference_pictures], target)
        for cls in classes:
            if _is_past(deadline):
                report(f"{name} {cls}: not begun, the time is spent")
                break
            case = _Case(base, cls, algorithm, pictures, target)
            for row in _measure(name, case, contenders, modes, reference, rounds, deadline, report):
                results.put(document, row, KEY)
                report(_line(row))
            if out:
                results.write(out, document)
            del case
            _free(target)
    return document


def _is_past(deadline: float | None) -> bool:
    return deadline is not None and time.perf_counter() > deadline


@torch.inference_mode()
def _reference(base: nn.Module, pictures: Tensor, device: torch.device) -> Any:
    with pytorch_class("ieee", benchmark=False):
        output = copy.deepcopy(base).to(device, torch.float64)(pictures.to(device, torch.float64))
    _free(device)
    return output


def _free(device: torch.device) -> None:
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _first(output: Tensor | tuple[Tensor, ...], count: int) -> Tensor | tuple[Tensor, ...]:
    return output[:count] if isinstance(output, Tensor) else tuple(tensor[:count] for tensor in output)


@torch.inference_mode()
def _measure(
    name: str,
    case: _Case,
    contenders: Sequence[Contender],
    modes: Sequence[str],
    reference: Any,
    rounds: int,
    deadline: float | None,
    report: Report,
) -> list[results.Row]:
    calls: dict[str, Callable[[], None]] = {}
    agreements: dict[str, Agreement] = {}
    failures: dict[str, str] = {}
    count = len(flatten_output(reference))
    with pytorch_class(case.cls):
        for contender in contenders:
            if "compile" in contender.parts and _is_past(deadline):
                failures[contender.name] = "not compiled: the time is spent"
                continue
            begin = time.perf_counter()
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    call = case.call(contender)
                    agreements[contender.name] = agreement(_first(call(), count), reference)
                calls[contender.name] = _synchronised(call, case.device)
            except Exception as error:
                failures[contender.name] = timing.message_of(error)
                timing.recover()
            report(f"{name} {case.cls} {contender.name}: ready in {time.perf_counter() - begin:.1f} s")
        measured = timing.measure(calls, device=case.device, rounds=rounds, flush=False, graph=False)
        failures |= measured.failures
        times = measured.timings
        layers = _layer_times(case, [contender for contender in contenders if contender.name in times], times)
    rows = []
    for mode in modes:
        peers = {c.name: times[c.name].us if c.name in times else None for c in contenders if _is_rival(c, mode)}
        best_peer = _fastest({key: us for key, us in peers.items() if us is not None})
        ours = {c.layout: c.name for c in contenders if c.ours and c.form == mode}
        by_layout = {layout: times[key].us for layout, key in ours.items() if key in times}
        layout = _fastest(by_layout)
        timed = None if layout is None else times[ours[layout]]
        own = None if layout is None else agreements[ours[layout]]
        peer = None if best_peer is None else agreements[best_peer]
        counts = case.counts.get(_kind(True, mode), (0, 0))
        rows.append(
            {
                "network": name,
                "batch": len(case.pictures),
                "class": case.cls,
                "mode": mode,
                "algorithm": case.algorithm,
                "layout": layout,
                "us": timed and timed.us,
                "us_q25": timed and timed.q25,
                "us_q75": timed and timed.q75,
                "layouts": {layout: by_layout.get(layout) for layout in ours},
                "peers": peers,
                "best_peer": best_peer,
                "best_peer_us": None if best_peer is None else peers[best_peer],
                "logits_error": own and own.relative_l2,
                "peer_error": peer and peer.relative_l2,
                "top1_agreement": own and own.top1,
                "peer_top1_agreement": peer and peer.top1,
                "swapped": counts[0],
                "total": counts[1],
                "layers_us": layers[True] if mode == "eager" else None,
                "peer_layers_us": layers[False] if mode == "eager" else None,
                "failures": failures,
            }
        )
    return rows


def _is_rival(contender: Contender, mode: str) -> bool:
    """A captured graph competes with ours as a graph alone, folded batch norms with ours fused: who asks for it can
    have both."""
    asked = {"graph"} & set(mode.split("_")) | ({"folded"} if _kind(True, mode) == "fused" else set())
    return not contender.ours and contender.parts & {"graph", "folded"} <= asked


def _layer_times(
    case: _Case, contenders: Sequence[Contender], times: dict[str, timing.Timing]
) -> dict[bool, float | None]:
    """Time inside the layers that the swap took, ours (True) and PyTorch's, each in its faster eager layout."""
    found: dict[bool, float | None] = {True: None, False: None}
    swapped = next((swapped_layers(model) for (kind, _), model in case.models.items() if kind == "swapped"), [])
    for ours in found:
        layout = _fastest({c.layout: times[c.name].us for c in contenders if c.ours == ours and c.form == "eager"})
        if layout is not None and swapped:
            found[ours] = time_inside(case.model(ours, layout), swapped, case.input(layout))
    return found


def _fastest(times: dict[str, float]) -> str | None:
    return min(times, key=lambda name: times[name], default=None)


def _line(row: results.Row) -> str:
    head = f"{row['network']} {row['class']} {row['mode']}"
    if row["us"] is None or row["best_peer_us"] is None:
        return f"{head}: not measured ({'; '.join(row['failures'].values()) or 'no contender'})"
    return (
        f"{head}: {row['us'] / 1e3:.2f} ms ({row['layout']}), best peer {row['best_peer_us'] / 1e3:.2f} ms "
        f"({row['best_peer']}), {row['best_peer_us'] / row['us']:.2f}x, error {row['logits_error']:.1e} "
        f"(peer {row['peer_error']:.1e}), {row['swapped']}/{row['total']} layers"
    )
