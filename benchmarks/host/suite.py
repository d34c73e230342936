"""`fastconv bench host`: the host's time of a call, in every way of calling.

All forms of ours and of PyTorch's of one layer (or network) in one class are timed interleaved, in blocks of calls that
the device's queue holds, so that nobody waits for the device; it is waited for between the blocks. `us` is ours,
`torch_us` what stands beside it: nn.Conv2d, F.conv2d, the modules that a fused layer replaces, or the network.
`empty_operator_us` is an operator of four arguments that does nothing, called from Python. `kernels_us` and
`torch_kernels_us` are what a call keeps the GPU busy for, `cudnn_us` the convolution's part of the latter: a layer
whose host time is larger is bound by the host.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.harness import results
from benchmarks.harness.profile import kernel_groups
from benchmarks.harness.runs import check_names, deadline_of, free, is_final, is_past
from benchmarks.host.calls import CALLS, LAYER_FORMS, NETWORK_FORMS, PER_THREAD, THREADS, Call, Subject
from benchmarks.networks.parts import GROUPS
from fastconv import environment, models, ops, testing, timing
from fastconv.models.compare import CLASS_DTYPE, pytorch_class
from fastconv.models.layers import Layer

LAYERS = (Layer("3x3", 64, 14, 14, 64), Layer("1x1", 256, 14, 14, 64, 1, 1, 1, 0))
COMPILED = ("3x3",)  # compiling takes seconds, and the way to a kernel is the same for all layers
NETWORKS = ("resnet50",)
KEY = ("layer", "class", "form", "call")
LAYER_CALLS, NETWORK_CALLS = 50, 2  # in a block: at most some 600 launches
COMPILE_LIMIT_S = 30.0
EMPTY = "empty operator"

Report = Callable[[str], None]


def suite_name(device: torch.device) -> str:
    """Of the result file."""
    return "host" if device.type == "cuda" else "host_cpu"


def run(
    layers: Sequence[Layer] = LAYERS,
    networks: Sequence[str] = NETWORKS,
    classes: Sequence[str] = ("fp16", "fp32"),
    forms: Sequence[str] = tuple(LAYER_FORMS),
    calls: Sequence[str] = CALLS,
    rounds: int = 20,
    device: torch.device | str | None = None,
    out: Path | str | None = None,
    *,
    image: int | None = None,
    compile_limit_s: float | None = COMPILE_LIMIT_S,
    budget_s: float | None = None,
    resume: bool = False,
    report: Report = lambda line: None,
) -> results.Document:
    """Times calls, at batch 1; returns the result file's content.

    layers: each in every form of `forms` and every way of `calls` that the form has; compiled only those of COMPILED,
        or all where others than LAYERS are given. networks: without gradients, in the forms that a network has.
    image: the side of networks' inputs, instead of their own. compile_limit_s: for each compilation.
    out: the result file, written after every layer and class. budget_s: after so many seconds none is begun.
    resume: layers, networks and classes of which `out` holds every call are passed over.
    Raises ValueError for an unknown name. A form that fails is null in its row, the reason under `failures`.
    """
    check_names("class", classes, CLASS_DTYPE)
    check_names("form", forms, LAYER_FORMS)
    check_names("call", calls, dict.fromkeys(CALLS))
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    head = environment.describe(suite_name(target), target)
    document = results.merge(out, head, KEY) if out else {**head, "rows": []}
    deadline = deadline_of(budget_s)
    rows = results.own_rows(document) if resume else []
    held = {tuple(row[each] for each in KEY) for row in rows if is_final(row)}
    subjects: list[Layer | str] = [*layers, *networks]
    for cls in classes:
        for name in subjects:
            if is_past(deadline):
                report(f"{name if isinstance(name, str) else name.layer} {cls}: not begun, the time is spent")
                continue
            fields, subject = _subject(name, cls, target, forms, calls, image)
            asked = {(fields["layer"], cls, form, how) for form, its in subject.forms.items() for how in its.calls}
            if asked <= held:
                report(f"{fields['layer']} {cls}: passed over, the file has its rows")
                continue
            subject.compile_limit_s, subject.deadline = compile_limit_s, deadline
            with pytorch_class(cls), torch._dynamo.config.patch(recompile_limit=256):
                found = _Measured(subject, LAYER_CALLS if isinstance(name, Layer) else NETWORK_CALLS, rounds)
                for row in found.rows(fields | {"class": cls}):
                    results.put(document, row, KEY)
                    report(_line(row))
            if out:
                results.write(out, document)
            del subject, found
            free(target)
    return document


def _subject(
    name: Layer | str, cls: str, device: torch.device, forms: Sequence[str], calls: Sequence[str], image: int | None
) -> tuple[dict[str, Any], Subject]:
    """What is called, and what the rows say of it."""
    options: dict[str, Any] = {"device": device, "dtype": CLASS_DTYPE[cls]}

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, **options).contiguous(memory_format=torch.channels_last)

    residual, its = None, NETWORK_FORMS
    if isinstance(name, Layer):
        its = LAYER_FORMS
        calls = calls if name.layer in COMPILED or name not in LAYERS else [call for call in calls if call != "compile"]
        geometry = (name.r, name.s), name.stride, name.padding, name.dilation, name.groups
        base: nn.Module = nn.Conv2d(name.c, name.k, *geometry)
        x, residual = random(1, name.c, name.h, name.w), random(1, name.k, name.p, name.q)
        fields = {"n": 1, **name.fields()}
    else:
        side = image or models.network(name).image
        base, x = models.build(name, calibrate=False), random(1, 3, side, side)
        fields = {"layer": name, "n": 1}
    wanted = {
        form: replace(entry, calls=tuple(call for call in entry.calls if call in calls))
        for form, entry in its.items()
        if form in forms
    }
    return fields, Subject(base, x, residual, wanted)


def _is_by_threads(name: str) -> bool:
    return name.split()[-1] in THREADS


def _of_one(its: timing.Timing) -> timing.Timing:
    """Of one call of each thread."""
    return replace(its, us=its.us / PER_THREAD, q25=its.q25 / PER_THREAD, q75=its.q75 / PER_THREAD)


class _Measured:
    """All forms of one layer or network in one class, timed when made."""

    def __init__(self, subject: Subject, block: int, rounds: int) -> None:
        self.subject, self.block, self.rounds = subject, block, rounds
        self.failures: dict[str, str] = {}
        self.errors: dict[str, float] = {}
        self.kernels: dict[str, dict[str, float]] = {}
        self._calls: dict[str, Call] = {}
        for form, entry in subject.forms.items():
            reference = None
            for name, ours in ((entry.peer, False), (form, True)):
                if name in self.errors:  # a peer of several forms
                    continue
                try:
                    module = subject.module(form, ours)
                    if reference is None:
                        reference = subject.output(form, subject.module(form, False), torch.float64)
                    self.errors[name] = testing.errors(subject.output(form, module), reference).relative_l2
                except Exception as error:
                    self.failures[name] = timing.message_of(error)
                    timing.recover()
                    continue
                for how in entry.calls:
                    self._prepare(f"{name} {how}", form, module, how)
        device = subject.x.device
        self.empty = timing.measure({EMPTY: self._empty()}, device=device, rounds=rounds, host_calls=LAYER_CALLS)
        self.times: dict[str, timing.Timing] = {}
        self.failures |= self.empty.failures
        for by_threads in (False, True):  # what others run beside a thread waits for the device
            its = {name: call for name, call in self._calls.items() if _is_by_threads(name) == by_threads}
            measured = timing.measure(its, device=device, rounds=rounds, host_calls=1 if by_threads else block)
            self.failures |= measured.failures
            self.times |= {name: _of_one(time) if by_threads else time for name, time in measured.timings.items()}
        if subject.x.is_cuda:
            self._profile()

    def _prepare(self, name: str, form: str, module: nn.Module, how: str) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._calls[name] = self.subject.call(form, module, how)
        except Exception as error:
            self.failures[name] = timing.message_of(error)
            timing.recover()

    def _empty(self) -> Call:
        x = self.subject.x
        weight = torch.empty(1, dtype=x.dtype, device=x.device)
        return lambda: ops.empty_operator(x, weight, None, 0)

    def _profile(self) -> None:
        for name, call in self._calls.items():
            if name in self.times and not _is_by_threads(name):
                try:
                    self.kernels[name] = kernel_groups(call, self.subject.x.device, GROUPS)
                except RuntimeError as error:
                    self.failures[f"kernels of {name}"] = timing.message_of(error)
                    timing.recover()

    def rows(self, fields: dict[str, Any]) -> list[results.Row]:
        empty = self.empty.timings.get(EMPTY)
        found = []
        for form, entry in self.subject.forms.items():
            for how in entry.calls:
                name, peer = f"{form} {how}", f"{entry.peer} {how}"
                ours, torchs = self.times.get(name), self.times.get(peer)
                kernels, peer_kernels = self.kernels.get(name), self.kernels.get(peer)
                found.append(
                    {
                        **fields,
                        "form": form,
                        "call": how,
                        "us": ours and ours.us,
                        "us_q25": ours and ours.q25,
                        "us_q75": ours and ours.q75,
                        "peer": entry.peer,
                        "torch_us": torchs and torchs.us,
                        "torch_us_q25": torchs and torchs.q25,
                        "torch_us_q75": torchs and torchs.q75,
                        "empty_operator_us": empty and empty.us,
                        "kernels_us": kernels and sum(kernels.values()),
                        "torch_kernels_us": peer_kernels and sum(peer_kernels.values()),
                        "cudnn_us": peer_kernels and peer_kernels["convolution"],
                        "rounds": self.rounds,
                        "calls": self.block,
                        "error": self.errors.get(form),
                        "peer_error": self.errors.get(entry.peer),
                        "failures": {
                            key: why
                            for key, why in self.failures.items()
                            if key in (form, entry.peer, EMPTY) or key.removeprefix("kernels of ") in (name, peer)
                        },
                    }
                )
        return found


def _line(row: results.Row) -> str:
    head = f"{row['layer']} {row['class']} {row['form']} {row['call']}"
    if row["us"] is None or row["torch_us"] is None:
        return f"{head}: not measured ({'; '.join(row['failures'].values())})"
    text = f"{head}: {row['us']:.1f} us, {row['peer']} {row['torch_us']:.1f} us, {row['torch_us'] / row['us']:.2f}x"
    return text + ("" if row["kernels_us"] is None else f"; kernels {row['kernels_us']:.1f} us")
