"""`fastconv bench networks`: whole networks, swapped or fused, against every form in which PyTorch runs them.

All contenders of a network and class (forms.py) are timed interleaved, one forward pass each per round,
after a synchronisation, so that the host's launch gaps count for everybody whose GPU waits for them. A peer's time is
that of its faster layout, and so is ours. `best_peer` is the fastest of all forms of PyTorch that were timed, whatever
ours is; `cudnn_best_layers` (parts.py), which nobody can run, is never it.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import energy, results, turns
from benchmarks.harness.clocks import ClockMonitor
from benchmarks.harness.runs import (
    LAYOUTS,
    SPENT,
    check_names,
    deadline_of,
    fastest_of,
    free,
    is_final,
    is_past,
    synchronised,
    tf32_fields,
)
from benchmarks.networks import parts as network_parts
from benchmarks.networks import zoo
from benchmarks.networks.forms import MODES, PEERS, Case, Contender, Job, compile_ahead
from fastconv import environment, timing
from fastconv.models import MAIN_NETWORKS, flatten_output
from fastconv.models.compare import Agreement, agreement, precision_of, pytorch_class

PEER_NAMES = {**PEERS, network_parts.NAME: None}
CPU_MODES, CPU_PEERS = ("eager", "fused"), ("torch_eager", "folded_eager", "compile_default")
KEY = ("network", "batch", "class", "mode", "algorithm")
SLOWER_LAYOUT = 1.25  # a layout this many times slower than another of its form runs 3 rounds only
COMPILE_LIMIT_S = 120.0
NOT_BEGUN = f"not begun: {SPENT}"
# In TF32, beside class fp32: PyTorch's fastest there, without a compiler and with one.
TF32_PEERS = ("folded_graph", "frozen_reduce_overhead", "frozen_graph")

Report = Callable[[str], None]


def suite_name(device: torch.device) -> str:
    """Of the result file."""
    return "networks" if device.type == "cuda" else "networks_cpu"


def head_of(device: torch.device | str | None, suite: str | None = None) -> results.Document:
    """Of the result file of `suite` (None: suite_name); device None: the GPU, if there is one."""
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return environment.describe(suite or suite_name(target), target)


def contenders_of(
    modes: Sequence[str], peers: Sequence[str], layouts: Sequence[str], compiled_layouts: Sequence[str]
) -> list[Contender]:
    """Ours in every mode, PyTorch's in every form of `peers`, each in every layout; compiled ones last. What takes long
    to make ready, PyTorch's compiled forms and those over all of cuDNN's plans, is of the compiled layouts.

    Raises ValueError for an unknown mode, form or layout.
    """
    check_names("mode", modes, MODES)
    check_names("peer", peers, PEER_NAMES)
    check_names("layout", [*layouts, *compiled_layouts], LAYOUTS)
    found = [
        Contender(ours, name, layout)
        for ours, names, forms in ((True, modes, MODES), (False, peers, PEERS))
        for name in names
        if name in forms
        for layout in (
            ("nhwc",) if ours and forms[name].mode
            else compiled_layouts if forms[name].mode or forms[name].all_plans
            else layouts
        )
    ]  # fmt: skip
    return sorted(found, key=lambda contender: contender.form.mode is not None)


def tf32_contenders(cls: str, peers: Sequence[str]) -> list[Contender]:
    """PyTorch's in TF32, which users of class fp32 could have instead: in the same run."""
    return [Contender(False, name, "nhwc", tf32=True) for name in TF32_PEERS if cls == "fp32" and name in peers]


def held_of(document: results.Document) -> set[tuple[Any, ...]]:
    """The keys of the rows of this commit that need not be measured again."""
    return {tuple(row[name] for name in KEY) for row in results.own_rows(document) if is_final(row)}


def compiled_layouts_of(cls: str) -> tuple[str, ...]:
    """The layout that compiled networks have unless another is asked for: where PyTorch's convolutions of the class are
    the faster ones. (Left alone, Inductor takes NHWC.)"""
    return ("nchw",) if cls in ("ieee", "fp32") else ("nhwc",)


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
    suite: str | None = None,
    batch: int | None = None,
    image: int | None = None,
    reference_pictures: int = 8,
    compile_limit_s: float | None = COMPILE_LIMIT_S,
    compile_workers: int = 0,
    budget_s: float | None = None,
    resume: bool = False,
    energy_s: float | None = None,
    report: Report = lambda line: None,
) -> results.Document:
    """Times networks and compares their outputs with float64; returns the result file's content.

    networks, classes: names, of zoo.names() and `CLASS_DTYPE`.
    modes: how ours runs, of MODES, one row each. peers: how PyTorch runs, of PEER_NAMES. None: all on CUDA, the cheap
        ones on the CPU. layouts, compiled_layouts: of eager and of compiled networks; None: compiled_layouts_of.
    batch, image: instead of the network's own. reference_pictures: pictures of the batch that are compared.
    suite: the file's, default suite_name.
    out: the result file, written after every network and class; rows of the same machine and commit are kept.
        `network_layers.json` beside it has the layers of cudnn_best_layers.
    compile_limit_s: what is not compiled within so many seconds is given up. compile_workers: so many processes first
        compile everything there is to compile, for the caches on disk, in half of `budget_s` at most.
    budget_s: after so many seconds nothing more is compiled or searched for over all plans, no energy is measured, and
        no further network or class is begun.
    resume: networks and classes of which `out` holds every mode are passed over.
    energy_s: the fastest layout of each mode, and the fastest form of PyTorch, run so many seconds more in turns, for
        the energy of an image.
    Raises ValueError for an unknown name. A contender that fails is null in its row, the reason under `failures`.
    """
    for name in networks:
        zoo.network(name)
    for cls in classes:
        precision_of(cls)
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    cuda = target.type == "cuda"
    modes = (tuple(MODES) if cuda else CPU_MODES) if modes is None else modes
    peers = (tuple(PEER_NAMES) if cuda else CPU_PEERS) if peers is None else peers
    contenders = {
        cls: contenders_of(modes, peers, layouts, compiled_layouts or compiled_layouts_of(cls)) for cls in classes
    }
    head = head_of(target, suite)
    document = results.merge(out, head, KEY) if out else {**head, "rows": []}
    best_layers = None
    if network_parts.NAME in peers:
        path = Path(out).with_name("network_layers.json") if out else None
        best_layers = network_parts.BestLayers(path, head, target, rounds)
    deadline = deadline_of(budget_s)

    sizes = {name: (batch or zoo.network(name).batch, image or zoo.network(name).image) for name in networks}
    held = held_of(document) if resume else set()
    work = {
        name: [
            cls for cls in classes if any((name, sizes[name][0], cls, mode, algorithm) not in held for mode in modes)
        ]
        for name in networks
    }
    if compile_workers:
        jobs = [
            Job(name, cls, contender, algorithm, *sizes[name], str(target), compile_limit_s)
            for name, wanted in work.items()
            for cls in wanted
            for contender in contenders[cls]
            if contender.form.mode is not None and not contender.form.graph
        ]
        compile_ahead(jobs, compile_workers, None if budget_s is None else budget_s / 2, report)

    for name, wanted in work.items():
        if not wanted or is_past(deadline):
            report(f"{name}: passed over, {'the time is spent' if wanted else 'the file has its rows'}")
            continue
        base, pictures = zoo.build(name, image=image), zoo.inputs(name, *sizes[name])
        with turns.preparing():
            reference = zoo.comparable(name, _reference(base, pictures[:reference_pictures], target))
        for cls in wanted:
            if is_past(deadline):
                report(f"{name} {cls}: not begun, the time is spent")
                break
            case = Case(base, cls, algorithm, pictures, target, compile_limit_s, deadline)
            tf32 = tf32_contenders(cls, peers)
            found = Measured(name, case, contenders[cls], reference, rounds, report, energy_s, tf32)
            found.release()
            with turns.timing():
                bound = _cudnn_bound(found, case, best_layers, deadline)
            for mode in modes:
                row = found.row(mode, peers, *bound) | found.clocks.found
                row |= {} if image is None else {"image": image}
                results.put(document, row, KEY)
                report(_line(row))
            if out:
                results.write(out, document)
            del case, found
            free(target)
    return document


@torch.inference_mode()
def _reference(base: nn.Module, pictures: Tensor, device: torch.device) -> Any:
    with pytorch_class("ieee", benchmark=False):
        output = copy.deepcopy(base).to(device, torch.float64)(pictures.to(device, torch.float64))
    free(device)
    return output


def _first(output: Tensor | tuple[Tensor, ...], count: int) -> Tensor | tuple[Tensor, ...]:
    return output[:count] if isinstance(output, Tensor) else tuple(tensor[:count] for tensor in output)


class Measured:
    """All contenders of one network (or part of one) and class, measured when made; then a row for each mode."""

    def __init__(
        self, name: str, case: Case, contenders: Sequence[Contender], reference: Any, rounds: int, report: Report,
        energy_s: float | None = None, tf32: Sequence[Contender] = (),
    ) -> None:  # fmt: skip
        self.name, self.case, self.contenders, self.tf32 = name, case, contenders, tf32
        self.batch = len(case.pictures)
        self.agreements: dict[str, Agreement] = {}
        self.failures: dict[str, str] = {}
        self.peak_bytes: dict[str, int] = {}
        self.groups: dict[str, dict[str, float]] = {}
        self.own_us: dict[str, float] = {}  # of the convolutions, those of fastconv's operators
        self._calls: dict[str, Callable[[], Any]] = {}
        estimates: dict[str, float] = {}
        # Every form of a network compiles the same code object.
        with torch.inference_mode(), pytorch_class(case.cls), torch._dynamo.config.patch(recompile_limit=256):
            for contender in (*contenders, *tf32):
                compiled = contender.form.mode is not None
                begin = time.perf_counter()
                # cuDNN's search is by time, and its choices hold for the compiled forms as well, which come last. They
                # take long, so whoever waits to time goes first.
                with turns.preparing(patient=True) if compiled else turns.timing():
                    if (compiled or contender.form.all_plans) and is_past(case.deadline):
                        self.failures[contender.name] = NOT_BEGUN
                        continue
                    try:
                        estimates[contender.name] = self._prepare(contender, reference)
                    except Exception as error:
                        self.failures[contender.name] = timing.message_of(error)
                        timing.recover()
                seconds = time.perf_counter() - begin
                state = self.failures.get(contender.name, "ready")
                report(f"{name} {case.cls} {contender.name}: {state} in {seconds:.1f} s")
            self.clocks = ClockMonitor(case.device)
            with turns.timing():
                measured = timing.measure(
                    {key: synchronised(call, case.device) for key, call in self._calls.items()},
                    device=case.device, rounds=rounds, few_rounds=_slower(contenders, estimates), flush=False,
                    graph=False, monitor=self.clocks,
                )  # fmt: skip
                self._profile(measured.timings)
                self.failures |= measured.failures
                self.times = measured.timings
                self.energy = self._energy(energy_s) if energy_s else {}
            with turns.preparing():
                self.floor_us = self._floor()
                self.counts = {
                    kind: case.counts(kind, layout)
                    for kind, layout in [*case.models, *(("rewritten", layout) for layout in case.compiles)]
                    if kind in ("swapped", "fused", "rewritten")
                }

    def _prepare(self, contender: Contender, reference: Any) -> float:
        """Makes a contender ready, compares its output, and returns the time of one call."""
        cuda = self.case.device.type == "cuda"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call = _in_tf32(self.case, contender) if contender.tf32 else self.case.call(contender)
        output = zoo.comparable(self.name, call())
        self.agreements[contender.name] = agreement(_first(output, len(flatten_output(reference))), reference)
        del output
        if cuda and not contender.has_graph:
            torch.cuda.reset_peak_memory_stats(self.case.device)
            held = torch.cuda.memory_allocated(self.case.device)
            call()
            self.peak_bytes[contender.name] = torch.cuda.max_memory_allocated(self.case.device) - held
        self._calls[contender.name] = call
        return timing.once(call, self.case.device)[1]

    def _profile(self, timed: Mapping[str, timing.Timing]) -> None:
        """Kernels by group, of what is launched kernel by kernel: of PyTorch's forms each in its faster layout, of ours
        in every one, since in a graph another can be the faster."""

        def kind_of(contender: Contender) -> object:
            return contender.name if contender.ours else contender.form_name

        fastest = self._fastest(timed, kind_of)
        for contender in self.contenders:
            if contender.name in fastest and not contender.has_graph:
                try:
                    groups = network_parts.kernel_groups(self._calls[contender.name], self.case.device)
                    self.own_us[contender.name] = own = groups.pop(network_parts.OWN)
                    groups["convolution"] += own
                    self.groups[contender.name] = groups
                except RuntimeError as error:
                    self.failures[f"groups of {contender.name}"] = timing.message_of(error)
                    timing.recover()

    def _fastest(self, timed: Mapping[str, timing.Timing], kind_of: Callable[[Contender], object]) -> list[str]:
        """The fastest contender of each kind."""
        found: dict[object, str] = {}
        for contender in self.contenders:
            kind, name = kind_of(contender), contender.name
            if name in timed and timed[name].us <= timed[found.setdefault(kind, name)].us:
                found[kind] = name
        return list(found.values())

    def _energy(self, seconds: float) -> dict[str, energy.Energy]:
        """Of the fastest layout of each form of ours and of the fastest contender of PyTorch's."""
        if is_past(self.case.deadline):
            self.failures["energy"] = NOT_BEGUN
            return {}
        fastest = self._fastest(self.times, lambda contender: contender.ours and contender.form_name)
        try:
            read = energy.meter(self.case.device)
            calls = {name: self._calls[name] for name in fastest}
            return energy.measure(calls, self.case.device, seconds, read)
        except (OSError, RuntimeError) as error:
            self.failures["energy"] = timing.message_of(error)
            timing.recover()
            return {}

    def _floor(self) -> float | None:
        """None on a CPU."""
        case = self.case
        if case.device.type != "cuda":
            return None
        try:
            gpu = results.slug(torch.cuda.get_device_name(case.device))
            return network_parts.floor_us(case.base, case.pictures.shape, case.cls, gpu)
        except (ValueError, RuntimeError) as error:
            self.failures["floor_us"] = timing.message_of(error)
            return None

    def release(self) -> None:
        """Gives up what was timed: the memory is needed."""
        self._calls.clear()
        self.case.release()
        free(self.case.device)

    def _peer_of_memory(self) -> Contender | None:
        """The form of PyTorch whose memory stands beside ours: its fastest compiled one of those whose memory can be
        told (no graph holds it), else its fastest eager one."""
        known = [c for c in self.contenders if not c.ours and c.name in self.peak_bytes and c.name in self.times]
        return min(known, key=lambda c: (c.form.mode is None, self.times[c.name].us), default=None)

    def rest_us(self) -> float | None:
        """The least time of all kernels but convolutions in a form of PyTorch's network whose convolutions are
        PyTorch's operator (max-autotune may write its own, and fuse them with others)."""
        rests = [
            sum(us for group, us in self.groups[contender.name].items() if group != "convolution")
            for contender in self.contenders
            if not contender.ours and contender.form.mode in (None, "default") and contender.name in self.groups
        ]
        return min(rests, default=None)

    def _layouts(self, ours: bool, form_name: str) -> dict[str, float | None]:
        return {
            c.layout: self.times[c.name].us if c.name in self.times else None
            for c in self.contenders
            if (c.ours, c.form_name) == (ours, form_name)
        }

    def row(self, mode: str, peers: Sequence[str], bound_us: float | None, why_no_bound: str) -> results.Row:
        layouts = self._layouts(True, mode)
        layout = fastest_of(layouts)
        key = None if layout is None else Contender(True, mode, layout).name
        peer_layouts = {name: self._layouts(False, name) for name in peers if name in PEERS}
        best: dict[str, float] = {}
        best_key = None
        for name, its in peer_layouts.items():
            if (fastest := fastest_of(its)) is not None:
                best[name] = us = its[fastest] or 0.0
                if min(best.values()) == us:
                    best_key = Contender(False, name, fastest).name
        peer_us: dict[str, float | None] = {name: best.get(name) for name in peer_layouts}
        failures = dict(self.failures)
        if network_parts.NAME in peers:
            peer_us[network_parts.NAME] = bound_us
            failures |= {network_parts.NAME: why_no_bound} if bound_us is None else {}
        best_peer = fastest_of(best)
        time_of = self.times.get(key or "")
        own, peer = self.agreements.get(key or ""), self.agreements.get(best_key or "")
        groups, of_memory = self.groups.get(key or ""), self._peer_of_memory()
        counts = self.counts.get(MODES[mode].model, dict.fromkeys(("swapped", "ours", "fused", "total"), 0))
        tf32 = {c.form_name: self.times[c.name].us if c.name in self.times else None for c in self.tf32}
        return {
            "network": self.name,
            "batch": self.batch,
            "class": self.case.cls,
            "mode": mode,
            "algorithm": self.case.algorithm,
            "layout": layout,
            "us": time_of and time_of.us,
            "us_q25": time_of and time_of.q25,
            "us_q75": time_of and time_of.q75,
            "rounds": time_of and time_of.rounds,
            "floor_us": self.floor_us,
            "layouts": layouts,
            "peers": peer_us,
            "peer_layouts": peer_layouts,
            "best_peer": best_peer,
            "best_peer_us": None if best_peer is None else best[best_peer],
            **tf32_fields(tf32),
            "logits_error": own and own.relative_l2,
            "peer_error": peer and peer.relative_l2,
            "top1_agreement": own and own.top1,
            "peer_top1_agreement": peer and peer.top1,
            **counts,
            "layers_us": groups and groups["convolution"],
            "layers_us_of": {
                c.layout: self.groups[c.name]["convolution"]
                for c in self.contenders
                if (c.ours, c.form_name) == (True, mode) and c.name in self.groups
            },
            "own_us": self.own_us.get(key or ""),
            "peak_bytes": self.peak_bytes.get(key or ""),
            "peer_peak_bytes": of_memory and self.peak_bytes[of_memory.name],
            "peer_peak_form": of_memory and of_memory.form_name,
            **{
                name: self.energy[of].fields(self.batch)
                for name, of in (("energy", key), ("peer_energy", best_key))
                if of in self.energy
            },
            "groups": groups,
            "peer_groups": {name: its for name, its in self.groups.items() if not name.startswith("fastconv_")},
            "failures": failures,
        }


def _in_tf32(case: Case, contender: Contender) -> Callable[[], Any]:
    """The call, made ready and made with PyTorch's switches on (6 us of the host's)."""
    with pytorch_class("tf32"):
        call = case.call(contender)

    def switched() -> Any:
        with pytorch_class("tf32"):
            return call()

    return switched


def _slower(contenders: Sequence[Contender], estimates: dict[str, float]) -> list[str]:
    """The contenders that another layout of the same form beats by far."""
    best: dict[tuple[bool, str], float] = {}
    for c in contenders:
        if c.name in estimates:
            best[c.ours, c.form_name] = min(estimates[c.name], best.get((c.ours, c.form_name), estimates[c.name]))
    return [
        c.name
        for c in contenders
        if c.name in estimates and estimates[c.name] > SLOWER_LAYOUT * best[c.ours, c.form_name]
    ]


@torch.inference_mode()
def _cudnn_bound(
    found: Measured, case: Case, best_layers: network_parts.BestLayers | None, deadline: float | None
) -> tuple[float | None, str]:
    """`cudnn_best_layers` in microseconds, or why there is none."""
    if best_layers is None:
        return None, "not asked for"
    rest = found.rest_us()
    if rest is None:
        return None, "no form of PyTorch's was profiled"
    try:
        layers = network_parts.convolutions(case.base, case.pictures.shape)
    except ValueError as error:
        return None, f"{error}"
    total, why = best_layers.sum_us(layers, len(case.pictures), case.cls, lambda: is_past(deadline))
    return (None, why) if total is None else (total + rest, "")


def _line(row: results.Row) -> str:
    head = f"{row['network']} {row['class']} {row['mode']}"
    if row["us"] is None or row["best_peer_us"] is None:
        return f"{head}: not measured ({'; '.join(row['failures'].values()) or 'no contender'})"
    bound = row["peers"].get(network_parts.NAME)
    return (
        f"{head}: {row['us'] / 1e3:.2f} ms ({row['layout']}), best peer {row['best_peer_us'] / 1e3:.2f} ms "
        f"({row['best_peer']}), {row['best_peer_us'] / row['us']:.2f}x, error {row['logits_error']:.1e} "
        f"(peer {row['peer_error']:.1e}), {row['ours']} of {row['total']} layers ours"
        + ("" if bound is None else f"; best cuDNN layers {bound / 1e3:.2f} ms")
    )
