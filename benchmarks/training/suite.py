"""`fastconv bench training`: whole training steps, swapped against PyTorch.

A step is forward, loss, backward and SGD's update on one batch that lies on the device. All sides of a network and
class are timed interleaved, one step each per round, after a synchronisation: what the host needs to get ahead of the
device counts. Memory format is channels_last; in class `fp32` PyTorch's network in NCHW, where its convolutions are the
faster ones, is a peer, too, and its TF32 stands beside (`tf32_peers`).

`kernels_us` is the sum of one step's kernels, `groups` its parts; a step that takes much longer is bound by the host.
`peak_bytes` is the most that was allocated during a step for everything that a side has: parameters, optimizer, packed
weights, activations; `held_bytes` what is left of it after a step. `loss_error` and `gradient_error` are those of the
first two steps against float64.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from benchmarks.harness import results
from benchmarks.harness.clocks import ClockMonitor
from benchmarks.harness.profile import Groups, kernel_groups
from benchmarks.harness.runs import (
    SPENT,
    TF32,
    check_names,
    deadline_of,
    fastest_of,
    free,
    is_final,
    is_past,
    synchronised,
    tf32_fields,
)
from benchmarks.networks.parts import CONVOLUTIONS, LINEAR
from benchmarks.training.trainer import (
    CLASSES,
    OURS,
    PEERS,
    Batch,
    Form,
    Losses,
    Trainer,
    random_batch,
    reference,
    without_dropout,
)
from fastconv import environment, models, timing

BATCHES = {"resnet50": 64, "vgg16": 32, "densenet121": 64, "unet": 32}
MODES = {"eager": ("eager",), "compile": ("compile_default", "compile_reduce_overhead")}
KEY = ("network", "batch", "class", "mode")
COMPILE_LIMIT_S = 120.0

_CONVERSIONS = r"convert|transpose_(fours|any)|guess_image_scales|nchwToNhwc|nhwcToNchw"
GROUPS = Groups(
    CONVOLUTIONS
    | dict.fromkeys(
        ("ConvolutionBackward", "MpsConvolutionBackward", "aten::_mps_convolution", "aten::convolution_backward"),
        "convolution",
    )
    | dict.fromkeys(("aten::to", "aten::_to_copy", "ToCopyBackward"), "conversion")
    | dict.fromkeys(("aten::batch_norm", "aten::native_batch_norm", "aten::cudnn_batch_norm"), "norm")
    | dict.fromkeys(("NativeBatchNormBackward", "CudnnBatchNormBackward", "BatchNormBackward"), "norm")
    | dict.fromkeys(
        ("aten::relu", "ReluBackward", "aten::add", "AddBackward", "aten::cat", "CatBackward"), "elementwise"
    )
    | dict.fromkeys(("aten::max_pool2d", "aten::avg_pool2d", "aten::adaptive_avg_pool2d"), "pool")
    | dict.fromkeys(("MaxPool2D", "AvgPool2D", "AdaptiveAvgPool2D", "aten::mean", "MeanBackward"), "pool")
    | LINEAR
    | dict.fromkeys(("AddmmBackward", "aten::linear_backward", "MkldnnLinearBackward"), "linear")
    | dict.fromkeys(("Optimizer.", "aten::_amp_", "aten::_fused_sgd"), "optimizer"),
    {
        _CONVERSIONS: "conversion",
        r"^triton_.*batch_norm": "norm",
        r"^triton_.*_pool": "pool",
        r"^triton_": "elementwise",
    },
)

Report = Callable[[str], None]


def suite_name(device: torch.device) -> str:
    """Of the result file."""
    return "training" if device.type == "cuda" else "training_cpu"


def peers_of(cls: str, modes: Sequence[str], compiled: Sequence[str]) -> dict[str, tuple[Form, str]]:
    """PyTorch's sides in a class: name -> its form and the class of its switch."""
    names = ["torch_eager", *(["torch_eager_nchw"] if cls == "fp32" else [])]
    names += compiled if "compile" in modes else []
    switch = CLASSES[cls][0]
    found = {name: (PEERS[name], switch) for name in names}
    if cls == "fp32":
        found |= {TF32 + name: (PEERS[name], "tf32") for name in names if PEERS[name].layout == "nhwc"}
    return found


def run(
    networks: Sequence[str] = tuple(BATCHES),
    classes: Sequence[str] = tuple(CLASSES),
    modes: Sequence[str] = ("eager",),
    rounds: int = 20,
    device: torch.device | str | None = None,
    out: Path | str | None = None,
    *,
    compiled: Sequence[str] = ("compile_default",),
    algorithm: str = "auto",
    batch: int | None = None,
    image: int | None = None,
    compile_limit_s: float | None = COMPILE_LIMIT_S,
    budget_s: float | None = None,
    resume: bool = False,
    report: Report = lambda line: None,
) -> results.Document:
    """Times training steps and compares losses and gradients with float64; returns the result file's content.

    networks: names, see `fastconv.models.NETWORKS`. classes: of CLASSES. modes: eager, compile, a row each. compiled:
        how both sides are compiled, some of MODES["compile"]; a row has the faster one of ours.
    batch, image: instead of the network's own.
    out: the result file, written after every network and class; rows of the same machine and commit are kept.
    compile_limit_s: what is not compiled (forward and backward) within so many seconds is given up.
    budget_s: after so many seconds nothing more is compiled, and no further network or class is begun.
    resume: networks and classes of which `out` holds every mode are passed over.
    Raises ValueError for an unknown name. A side that fails is null in its row, the reason under `failures`.
    """
    for name in networks:
        models.network(name)
    check_names("class", classes, CLASSES)
    check_names("mode", modes, MODES)
    check_names("compiled", compiled, dict.fromkeys(MODES["compile"]))
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    head = environment.describe(suite_name(target), target)
    document = results.merge(out, head, KEY) if out else {**head, "rows": []}
    deadline = deadline_of(budget_s)
    rows = results.own_rows(document) if resume else []
    held = {tuple(row[each] for each in KEY) for row in rows if is_final(row)}
    for name in networks:
        entry = models.network(name)
        n, side = batch or BATCHES.get(name, entry.batch), image or entry.image
        wanted = [cls for cls in classes if any((name, n, cls, mode) not in held for mode in modes)]
        if not wanted or is_past(deadline):
            report(f"{name}: passed over, {'the time is spent' if wanted else 'the file has its rows'}")
            continue
        base = without_dropout(models.build(name, calibrate=False))
        data = random_batch(base, n, side)
        expected = reference(base, data, target)
        free(target)
        for cls in wanted:
            if is_past(deadline):
                report(f"{name} {cls}: not begun, the time is spent")
                break
            ours = {each: OURS[each] for mode in modes for each in MODES[mode] if mode == "eager" or each in compiled}
            found = _Measured(base, data, expected, cls, target, rounds, algorithm)
            found.prepare(ours, peers_of(cls, modes, compiled), compile_limit_s, deadline, report, f"{name} {cls}")
            found.measure()
            for mode in modes:
                row = {"network": name, "batch": n, "image": side} | found.row(mode)
                results.put(document, row, KEY)
                report(_line(row))
            if out:
                results.write(out, document)
            del found
            free(target)
    return document


class _Measured:
    """All sides of one network and class; then a row for each mode."""

    def __init__(
        self, base: nn.Module, data: Batch, expected: Losses, cls: str, device: torch.device, rounds: int,
        algorithm: str,
    ) -> None:  # fmt: skip
        self.base, self.data, self.expected, self.cls = base, data, expected, cls
        self.device, self.rounds, self.algorithm = device, rounds, algorithm
        self.failures: dict[str, str] = {}
        self.errors: dict[str, dict[str, float]] = {}
        self.memory: dict[str, dict[str, int]] = {}
        self.groups: dict[str, dict[str, float]] = {}
        self.peers: list[str] = []
        self._trainers: dict[str, Trainer] = {}

    def prepare(
        self, ours: dict[str, Form], peers: dict[str, tuple[Form, str]], limit_s: float | None,
        deadline: float | None, report: Report, head: str,
    ) -> None:  # fmt: skip
        """Builds every side and takes its first steps, eager ones first."""
        self.peers = list(peers)
        switch = CLASSES[self.cls][0]
        sides = {f"fastconv_{name}": (form, switch) for name, form in ours.items()} | peers
        for name, (form, its) in sorted(sides.items(), key=lambda side: side[1][0].mode is not None):
            if form.mode is not None and is_past(deadline):
                self.failures[name] = f"not begun: {SPENT}"
                continue
            begin = time.perf_counter()
            try:
                self._begin(name, form, its, limit_s, deadline)
            except Exception as error:
                self.failures[name] = timing.message_of(error)
                timing.recover()
            state = self.failures.get(name, "ready")
            report(f"{head} {name}: {state} in {time.perf_counter() - begin:.1f} s")

    def _begin(
        self, name: str, form: Form, switch: str, limit_s: float | None, deadline: float | None
    ) -> None:  # fmt: skip
        cuda = self.device.type == "cuda"
        before = torch.cuda.memory_allocated(self.device) if cuda else 0
        trainer = Trainer(
            self.base, self.data, form, switch, CLASSES[self.cls][1], self.device, algorithm=self.algorithm
        )
        first = trainer.first_steps(limit_s, deadline) if form.mode else trainer.first_steps()
        self.errors[name] = first.errors(self.expected)
        if cuda:
            trainer.step()
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            trainer.step()
            self.memory[name] = {
                "peak_bytes": torch.cuda.max_memory_allocated(self.device) - before,
                "held_bytes": torch.cuda.memory_allocated(self.device) - before,
            }
        self._trainers[name] = trainer

    def measure(self) -> None:
        """Times all sides, and then looks into one step of each."""
        self.clocks = ClockMonitor(self.device)
        calls = {name: synchronised(trainer.step, self.device) for name, trainer in self._trainers.items()}
        measured = timing.measure(
            calls, device=self.device, rounds=self.rounds, flush=False, graph=False, monitor=self.clocks
        )
        self.failures |= measured.failures
        self.times = measured.timings
        for name in self.times:
            try:
                self.groups[name] = kernel_groups(self._trainers[name].step, self.device, GROUPS, passes=2)
            except RuntimeError as error:
                self.failures[f"groups of {name}"] = timing.message_of(error)
                timing.recover()
        self.counts = {name: trainer.counts() for name, trainer in self._trainers.items()}
        self._trainers.clear()

    def _us(self, name: str) -> float | None:
        return self.times[name].us if name in self.times else None

    def row(self, mode: str) -> results.Row:
        ours = fastest_of({f"fastconv_{form}": self._us(f"fastconv_{form}") for form in MODES[mode]}) or ""
        # An eager step is compared with eager ones, a compiled one with all.
        rivals = [name for name in self.peers if mode == "compile" or "eager" in name]
        peers = {name: self._us(name) for name in rivals if not name.startswith(TF32)}
        tf32 = {name.removeprefix(TF32): self._us(name) for name in rivals if name.startswith(TF32)}
        best = fastest_of(peers)
        groups, peer_groups = self.groups.get(ours), self.groups.get(best or "")
        its = self.times.get(ours)
        row: results.Row = {
            "class": self.cls,
            "mode": mode,
            "form": ours.removeprefix("fastconv_") or None,
            "algorithm": self.algorithm,
            "us": its and its.us,
            "us_q25": its and its.q25,
            "us_q75": its and its.q75,
            "rounds": its and its.rounds,
            "kernels_us": groups and sum(groups.values()),
            "groups": groups,
            "peers": peers,
            "best_peer": best,
            "best_peer_us": peers[best] if best else None,
            "peer_kernels_us": peer_groups and sum(peer_groups.values()),
            "peer_groups": {name: self.groups[name] for name in rivals if name in self.groups},
            **self.counts.get(ours, dict.fromkeys(("swapped", "ours", "total"), 0)),
        }
        for side, name in (("", ours), ("peer_", best or "")):
            for key in ("peak_bytes", "held_bytes"):
                row[side + key] = self.memory.get(name, {}).get(key)
            for key in ("loss_error", "gradient_error"):
                row[side + key] = self.errors.get(name, {}).get(key)
        return row | tf32_fields(tf32) | {"failures": dict(self.failures)} | self.clocks.found


def _line(row: results.Row) -> str:
    head = f"{row['network']} {row['class']} {row['mode']}"
    if row["us"] is None or row["best_peer_us"] is None:
        return f"{head}: not measured ({'; '.join(row['failures'].values()) or 'no contender'})"
    text = f"{head}: {row['us'] / 1e3:.2f} ms (kernels {(row['kernels_us'] or 0) / 1e3:.2f}), best peer "
    text += (
        f"{row['best_peer_us'] / 1e3:.2f} ms ({row['best_peer']}, kernels {(row['peer_kernels_us'] or 0) / 1e3:.2f})"
    )
    text += f", {row['best_peer_us'] / row['us']:.2f}x"
    if row.get("best_tf32_peer_us"):
        text += f", TF32 {row['best_tf32_peer_us'] / 1e3:.2f} ms"
    return f"{text}; gradient's error {row['gradient_error']:.1e} (peer {row['peer_gradient_error']:.1e})"
