"""winograd_megakernel by itself: against its own tasks in series, against winograd_f4 and cuDNN's non-fused Winograd,
with other maps, and its tasks over time, as the paper shows them (docs/concepts/megakernel.md)."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import ours, results, turns
from benchmarks.layers import group as layer_group
from benchmarks.layers.reference import Reference
from benchmarks.layers.sets import floor_here
from benchmarks.layers.suite import groups_of
from benchmarks.peers import cudnn, torch_convolution
from fastconv import environment, timing, trace
from fastconv.instrumented import Megakernel, Options, kernel_of, random_data, random_kernel
from fastconv.models.layers import Layer, select

NAME, STAGED, RIVAL = "winograd_megakernel", "winograd_f4", "cudnn_winograd_nonfused"
SERIES = "winograd_megakernel_series"  # the same tasks kind by kind, a launch each: the same code, the same V, U and M
FILTER_FORMS = PACKED, PACKING, FILTER_TASKS = "packed beforehand", "packed in every call", "filter tasks"
PARTS = ("layers", "mapping", "rivals", "distribution", "filters")
KEY = ("part", "layer", "n", "class", "variant")
MIN_CHANNELS = 128  # C and K of the layers that part `layers` takes by itself: below, other algorithms are far ahead
# cuDNN's Winograd, and what it has beside that is near the fastest on these layers.
RIVALS = ("winograd_nonfused", "winograd", "fft_tiling", "implicit_precomp_gemm")
SWEPT_LAYERS, RIVALS_LAYER, SHOWN_LAYERS = "res1,res2,res3,res4", "res1", "vgg2_2,vgg4_2,res3"
DISTANCES = (0, 16, 33, 66, 132, 264, 528, 1056, 2112, 4224)  # tasks
BATCHES = (1, 2, 3, 4, 5, 6, 8, 12, 16)  # M


def _row(layer: Layer, n: int, accuracy: str, part: str, variant: str = "") -> results.Row:
    """A row of the contract in which nothing has been measured yet."""
    nothing = ("us", "us_q25", "us_q75", "error", "max_error", "best_peer", "best_peer_us", "peer_error")
    row: dict[str, Any] = {**layer.fields(), "n": n, "class": accuracy, "layout": "nhwc", "pass": "forward"}
    row |= {"part": part, "variant": variant, "algorithm": NAME, **dict.fromkeys(nothing)}
    return row | {"algorithms": {}, "peers": {}, "floor_us": floor_here(layer, n, accuracy), "notes": {}}


def _timed(row: results.Row, found: timing.Timing | None) -> None:
    if found is not None:
        row |= {"us": found.us, "us_q25": found.q25, "us_q75": found.q75}


def _bytes(kernel: Megakernel, options: Options) -> dict[str, int]:
    """Of workspace and packed filters; where tasks transform the filters, none are packed."""
    packed = 0 if options.filters else kernel.packed_bytes
    return {"workspace_bytes": kernel.workspace_bytes(options), "packed_bytes": packed}


class _Suite:
    """One run: the document, what it could not measure, and how long it may go on."""

    def __init__(
        self, batch: int, rounds: int, budget_s: float, path: Path, head: results.Document, resume: bool,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.n, self.rounds, self.path, self.say = batch, rounds, path, say
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.end = time.perf_counter() + budget_s
        self.document = results.merge(path, head, KEY)
        self.held = {
            tuple(row[name] for name in ("part", "layer", "n", "class"))
            for row in results.own_rows(self.document)
            if resume and row["us"] is not None  # without: there was no time for it, or no kernel
        }
        self.missing: list[str] = []

    def put(self, row: results.Row) -> None:
        results.put(self.document, row, KEY)
        self.document["missing"] = self.missing
        results.write(self.path, self.document)

    def each(self, part: str, layers: Sequence[Layer], classes: Sequence[str]) -> Iterator[tuple[Layer, str]]:
        """What can be measured and for which there is time; the rest becomes `missing`, and a row without a time."""
        for accuracy in classes:
            for layer in layers:
                if (part, layer.layer, self.n, accuracy) in self.held:
                    continue
                candidate = self._candidate(layer, accuracy)
                reason = "" if candidate["ok"] else candidate["reason"]
                if time.perf_counter() > self.end:
                    reason = "the suite's time was over"
                if not reason:
                    with turns.timing():
                        yield layer, accuracy
                    torch.cuda.empty_cache()
                    continue
                self._lack(layer, accuracy, part, reason)

    def _lack(self, layer: Layer, accuracy: str, part: str, reason: str) -> None:
        """Books what could not be measured."""
        self.missing.append(f"{part}: {layer.layer}, batch {self.n}, {accuracy}: {reason}")
        self.say(f"missing: {self.missing[-1]}")
        self.put(_row(layer, self.n, accuracy, part) | {"notes": {NAME: reason}})

    def all_of(
        self, part: str, layers: Sequence[Layer], classes: Sequence[str], measure: Callable[[Layer, str], None]
    ) -> None:
        """Measures each; where one fails, for want of memory say, the others go on."""
        for layer, accuracy in self.each(part, layers, classes):
            try:
                measure(layer, accuracy)
            except RuntimeError as error:
                timing.recover()
                self._lack(layer, accuracy, part, timing.message_of(error))

    def _candidate(self, layer: Layer, accuracy: str) -> dict[str, Any]:
        rows = ours.candidates(layer, self.n, accuracy, "nhwc", self.device)
        (candidate,) = (row for row in rows if row["algorithm"] == NAME)
        return candidate

    def measure(self, contenders: Mapping[str, Callable[[], object]]) -> timing.Measurement:
        return timing.measure(contenders, device=self.device, rounds=self.rounds)

    # ---- The parts

    def layer(self, layer: Layer, accuracy: str) -> None:
        """Against its own tasks in series, our staged kernels, cuDNN's, what `auto` takes and PyTorch's fastest plans;
        each a CUDA graph, interleaved, L2 cold."""
        x, weight = random_data(layer, self.n, accuracy, self.device)
        choice = ours.auto_choice(layer, self.n, accuracy, "nhwc", self.device)
        calls = {name: ours.contender(name, x, weight, layer, accuracy) for name in (NAME, STAGED, choice)}
        calls[SERIES] = functools.partial(kernel_of(x, weight, layer, accuracy), Options(series=True))
        calls[PACKING] = ours.packing_contender(NAME, x, weight, layer, accuracy)
        problems, torchs = {}, {}
        for layout, order in (("nchw", torch.contiguous_format), ("nhwc", torch.channels_last)):
            its = (x.contiguous(memory_format=order), weight.contiguous(memory_format=order))
            problems[layout] = cudnn.Problem(*its, layer, layout, tf32=False)
            torchs[f"torch_{layout}"] = functools.partial(torch_convolution, *its, layer, False)
        rivals, notes = cudnn.contenders(problems, only=RIVALS)
        rivals |= torchs
        reference = Reference(x, weight, layer)
        errors = {}
        for name, call in (calls | rivals).items():
            try:
                errors[name] = reference.error(call())
            except RuntimeError as error:  # the series needs room for all of V and M
                timing.recover()
                notes[name] = timing.message_of(error)
        measured = self.measure({name: call for name, call in (calls | rivals).items() if name in errors})
        times, notes = measured.timings, notes | measured.failures
        row = _row(layer, self.n, accuracy, "layers") | {"notes": notes}
        _timed(row, times.get(NAME))
        row["workspace_bytes"] = self._candidate(layer, accuracy)["workspace_bytes"]
        row["packed_bytes"] = ours.packed_bytes(NAME, weight, layer, accuracy)
        if NAME in errors:
            row |= {"error": errors[NAME]["l2"], "max_error": errors[NAME]["max"]}
        row |= {"auto": choice, "us_with_packing": times[PACKING].us if PACKING in times else None}
        row["algorithms"] = {name: times[name].us if name in times else None for name in calls if name != PACKING}
        row["peers"] = {name: times[name].us if name in times else None for name in rivals}
        row["peer_errors"] = {name: errors[name]["l2"] for name in rivals if name in errors}
        best = min((name for name in rivals if name in times), key=lambda name: times[name].us, default=None)
        if best is not None:
            row |= {"best_peer": best, "best_peer_us": times[best].us, "peer_error": errors[best]["l2"]}
        self.put(row)
        shown = ", ".join(f"{name} {found.us:.1f}" for name, found in times.items())
        self.say(f"{layer.layer:8} {accuracy}: {shown} us")

    def mapping(self, layer: Layer, accuracy: str) -> None:
        """Other distances, one at a time, and other M; every map on the same data, interleaved."""
        x, weight = random_data(layer, self.n, accuracy, self.device)
        kernel = kernel_of(x, weight, layer, accuracy)
        planned = kernel.planned.arguments()
        swept = {"d_ig": DISTANCES, "d_go": DISTANCES, "m": BATCHES}
        options = {"planned": Options()}
        for name, values in swept.items():
            for value in sorted({*values, planned[name]}):
                options[f"{name}={value}"] = replace(Options(), **{name: value})
        calls = {variant: functools.partial(kernel, each) for variant, each in options.items()}
        times = self.measure(calls | {STAGED: ours.contender(STAGED, x, weight, layer, accuracy)}).timings
        staged = times[STAGED].us if STAGED in times else None
        for variant in options:
            row = _row(layer, self.n, accuracy, "mapping", variant)
            its = kernel.task_map(options[variant]).arguments()
            row |= {name: its[name] for name in swept} | {"algorithms": {STAGED: staged}}
            row |= _bytes(kernel, options[variant])
            _timed(row, times.get(variant))
            self.put(row)
        best = min((variant for variant in options if variant in times), key=lambda variant: times[variant].us)
        self.say(f"{layer.layer:8} {accuracy}: best {best}, {times[best].us:.1f} us")

    def rivals(self, classes: Sequence[str]) -> None:
        """ResNet's 2_x against every algorithm of ours, PyTorch's and cuDNN's."""
        possible = list(self.each("rivals", select(RIVALS_LAYER), classes))
        layers = {accuracy: layer for layer, accuracy in possible}
        for dtype, tf32, members in groups_of(list(layers)):
            layer = layers[members[0]]
            group = layer_group.Group(layer, self.n, dtype, tf32, members, ("nhwc",), self.device)
            with turns.timing():
                rows = layer_group.measure(group, None, self.rounds, seed=0)
            for row in rows:
                self.put(row | {"part": "rivals", "variant": ""})
                self.say(f"{layer.layer:8} {row['class']}: {NAME} {row['algorithms'].get(NAME)} us")

    def filters(self, layer: Layer, accuracy: str) -> None:
        """U packed beforehand, packed in every call, or made by tasks of the kernel. Class ieee alone has these tasks,
        for even C and K."""
        x, weight = random_data(layer, self.n, accuracy, self.device)
        kernel = kernel_of(x, weight, layer, accuracy)
        calls: dict[str, Callable[[], object]] = {
            PACKED: functools.partial(kernel, Options()),
            PACKING: ours.packing_contender(NAME, x, weight, layer, accuracy),
            FILTER_TASKS: functools.partial(kernel, Options(filters=True)),
        }
        row = _row(layer, self.n, accuracy, "filters")
        error = Reference(x, weight, layer).error(kernel(Options(filters=True)))
        row |= {"error": error["l2"], "max_error": error["max"]} | _bytes(kernel, Options(filters=True))
        times = self.measure(calls).timings
        _timed(row, times.get(FILTER_TASKS))
        row["algorithms"] = {name: times[name].us if name in times else None for name in calls}
        self.put(row)
        self.say(f"{layer.layer:8} {accuracy}: " + ", ".join(f"{name} {its.us:.1f}" for name, its in times.items()))

    def distribution(self, classes: Sequence[str]) -> None:
        """How many tasks of each kind run at a time, as the kernel records it: as mapped, and in series."""
        for layer, accuracy in self.each("distribution", select(SHOWN_LAYERS), classes):
            try:
                kernel = random_kernel(layer, self.n, accuracy, self.device)
                found = trace.record(kernel, Options())
            except (RuntimeError, ValueError) as error:
                self.missing.append(f"distribution: {layer.layer}, {accuracy}: {timing.message_of(error)}")
                self.say(f"missing: {self.missing[-1]}")
                timing.recover()
                continue
            if "no_series" in found.detail:
                self.missing.append(f"distribution: {layer.layer}, {accuracy}, series: {found.detail['no_series']}")
            for variant, run in found.runs.items():
                times, counts = trace.distribution(run, samples=300)
                row = _row(layer, self.n, accuracy, "distribution", variant) | run.summary() | found.detail
                row |= _bytes(kernel, Options(series=variant == "series"))
                running = dict(zip(trace.KINDS, counts.tolist(), strict=True))
                self.put(row | {"times_us": times.tolist(), "running": running})
                self.say(f"{layer.layer:8} {accuracy}: {variant} {run.us:.1f} us, overlap {run.overlap or 0.0:.0%}")


def run(
    parts: Sequence[str] = PARTS,
    *,
    layers: str | None = None,
    classes: Sequence[str] = ("fp32", "ieee"),
    batch: int = 64,
    rounds: int = 20,
    budget_s: float = 60.0,
    out: Path | str | None = None,
    suite: str = "megakernel",
    resume: bool = False,
    report: Callable[[str], None] = print,
) -> results.Document:
    """Measures the parts and writes the result file of `suite`; returns its content. Needs a CUDA device.

    layers: of part `layers`; default those with C, K >= MIN_CHANNELS. resume: what the file holds of this machine and
    commit is not measured again. Nothing begins after `budget_s` seconds. What
    is not measured, for want of time or of a kernel, is in the document's `missing`, and has a row without a time. Rows
    of the same machine and commit that the file already holds are kept.
    """
    head = environment.describe(suite, "cuda")
    path = Path(out) if out is not None else results.default_path(head)
    study = _Suite(batch, rounds, budget_s, path, head, resume, report)
    wide = [layer for layer in select(layers) if layers is not None or min(layer.c, layer.k) >= MIN_CHANNELS]
    even = [layer for layer in select(layers) if layer.c % 2 == 0 and layer.k % 2 == 0]
    steps: dict[str, Callable[[], None]] = {
        "layers": lambda: study.all_of("layers", wide, classes, study.layer),
        "mapping": lambda: study.all_of("mapping", select(SWEPT_LAYERS), classes, study.mapping),
        "rivals": lambda: study.rivals(classes),
        "distribution": lambda: study.distribution(classes),
        "filters": lambda: study.all_of("filters", even, [name for name in classes if name == "ieee"], study.filters),
    }
    for part in parts:
        steps[part]()
    study.document["missing"] = study.missing
    results.write(path, study.document)
    report(f"written: {path}")
    return study.document
