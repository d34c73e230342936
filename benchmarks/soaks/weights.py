"""Many writes of weights, each in some way and followed by a call in some mode: no result is of a weight that is gone,
where the documents say that it is not."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from operator import add
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import Tensor

import fastconv
from benchmarks.harness import ours, results
from benchmarks.soaks import modes, writes
from benchmarks.soaks.modes import MODES, Mode, Subject
from fastconv import environment, testing

SUITE = "soak_weights"
ROW_KEY = ("mode", "write", "class")
ROUND = 1000  # steps with the same models
MODELS, COMPILED_MODELS = 6, 1  # of a mode and class in a round
SHOWN = 20  # failures that the file describes

_EMPTY = {"count": 0, "failures": 0, "old": 0, "error_over_bound": 0.0}  # of a row
# What PyTorch is expected to err by, however few the terms (docs/concepts/numerics.md): the operands' rounding, or the
# output's.
_FLOORS = {"tf32": 0.6 * 2.0**-11, "fp16": 0.425 * 2.0**-11, "bf16": 0.425 * 2.0**-8}


def suite_name(device: torch.device) -> str:
    return SUITE if device.type == "cuda" else f"{SUITE}_cpu"


def classes_of(device: torch.device) -> list[str]:
    """Those that differ there: on a CPU all of float32 are computed alike."""
    return list(results.CLASSES) if device.type == "cuda" else ["fp32", "fp16", "bf16"]


class _Round:
    """Some models, and what became of calls of them."""

    def __init__(self, wanted: Sequence[str], classes: Sequence[str], seed: str, device: torch.device) -> None:
        self.draw, self.device, self.classes = random.Random(seed), device, classes
        self.halves = [each for each in classes if each in ("fp16", "bf16")]
        self.modes = [name for name in wanted if modes.is_possible(MODES[name], self.device, bool(self.halves))]
        self.subjects: dict[tuple[str, str, int], Subject] = {}
        self.rows: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.failed: list[str] = []

    def step(self) -> None:
        """Writes one of the models, and calls it."""
        (name,) = self.draw.choices(self.modes, [MODES[name].weight for name in self.modes])
        mode = MODES[name]
        accuracy = self.draw.choice(self.halves if mode.halves else self.classes)
        slot = name, accuracy, self.draw.randrange(COMPILED_MODELS if mode.compiles else MODELS)
        dtype = torch.float32 if mode.halves else ours.dtype_of(accuracy)
        write = self.draw.choice([each for each in writes.WRITES if writes.is_possible(each, self.device, dtype)])
        row = self.rows.setdefault((name, write, accuracy), dict(_EMPTY))
        subject, wrong = self.subjects.get(slot), row["failures"]
        with torch.backends.cudnn.flags(
            enabled=True, benchmark=False, deterministic=False, allow_tf32=accuracy == "tf32"
        ):
            try:
                if subject is None:
                    subject = self.subjects[slot] = modes.subject(mode, accuracy, self.draw, self.device)
                    for x in subject.inputs:
                        self._hold(subject, mode, accuracy, row, x, "before any write")
                self._write(subject, mode, accuracy, write, row)
            except Exception as error:
                row["count"] += 1
                self._fail(row, f"{type(error).__name__}: {error}"[:300], subject)
        if row["failures"] > wrong:  # later steps would find the same
            self.subjects.pop(slot, None)

    def _write(self, subject: Subject, mode: Mode, accuracy: str, write: str, row: dict[str, Any]) -> None:
        name = writes.drawn(self.draw, subject.module)
        before = {key: value.detach().clone() for key, value in subject.module.state_dict().items()}
        writes.WRITES[write](self.draw, subject.module, name)
        what = f"{write} of {name}"
        if mode.seen is not None and write not in mode.seen:
            if write not in mode.again:
                self._hold(subject, mode, accuracy, row, self.draw.choice(subject.inputs), what, before)
            fastconv.refresh(subject.module)
        if subject.captured is not None and write in mode.again:
            subject.captured.again()
        for x in self.draw.sample(subject.inputs, self.draw.randint(1, len(subject.inputs))):
            self._hold(subject, mode, accuracy, row, x, what)

    def _hold(
        self, subject: Subject, mode: Mode, accuracy: str, row: dict[str, Any], x: Tensor, what: str,
        before: dict[str, Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Holds a call against the weights as they are; with `before`, or as they were then."""
        found = subject.call(x)
        over = _over_bound(subject, mode, accuracy, x, found, subject.module.state_dict())
        if before is not None and over > 1:
            over = min(over, _over_bound(subject, mode, accuracy, x, found, before))
            row["old"] += over <= 1
        row["count"] += 1
        row["error_over_bound"] = max(row["error_over_bound"], over)
        if over > 1:
            self._fail(
                row, f"{what}{'' if before is None else ', before refresh'}: {over:.3g} times the bound", subject
            )

    def _fail(self, row: dict[str, Any], what: str, subject: Subject | None) -> None:
        row["failures"] += 1
        (key,) = (key for key, each in self.rows.items() if each is row)
        self.failed.append(f"{' '.join(key)}: {subject.name if subject else 'a new model'}: {what}")


def _over_bound(
    subject: Subject, mode: Mode, accuracy: str, x: Tensor, found: Sequence[Tensor], state: dict[str, Tensor]
) -> float:
    """The error of a call's tensors in float64, over what is allowed: so many times PyTorch's own, or what that is
    expected to be (docs/concepts/numerics.md, "What the tests check")."""
    references: list[Sequence[Tensor]] = []
    for module, its in ((subject.exact, x.double()), (subject.plain, x)):
        module.load_state_dict(state)
        call = modes.with_gradient(module) if mode.trains else modes.without_gradient(module)
        if mode.halves and module is subject.plain:
            call = modes.autocast(module, accuracy)
        references.append(call(its))
    floor = _FLOORS.get(accuracy, modes.serial_sum(subject.terms) * 2.0**-24)
    worst = 0.0
    for y, exact, peer in zip(found, *references, strict=True):
        allowed = subject.allowed * max(floor, testing.errors(peer, exact).relative_l2)
        worst = max(worst, testing.errors(y, exact).relative_l2 / allowed)
    return worst if math.isfinite(worst) else 1e30  # JSON has no infinity


def run(
    wanted: Sequence[str],
    classes: Sequence[str],
    *,
    steps: int = 20_000,
    seed: int = 0,
    budget_s: float = 600.0,
    resume: bool = False,
    device: torch.device | str = "cpu",
    out: Path | str | None = None,
    report: Callable[[str], None] = print,
) -> results.Document:
    """Writes weights `steps` times, in modes of `modes.MODES` and ways of `writes.WRITES`, and writes a result file.

    Each step writes a tensor of one model, or all of it, calls what the documents demand after such a write in this
    mode, and holds the next calls against float64. Where they allow the old weight until then, one call before must be
    of the old or of the new one. The models are made anew after every ROUND steps. resume: rounds that the file has, of
    this machine and commit, are not run again. No step begins after `budget_s` seconds. Returns the document, suite
    `soak_weights`: a row per mode, way and class with `count` and `failures` of calls, how many were of the old weight
    (`old`), and the largest error over its bound; `failed`: some of the failures; `missing`: for want of time.
    """
    device = torch.device(device)
    head = environment.describe(suite_name(device), device)
    path = Path(out) if out is not None else results.default_path(head)
    document: results.Document = {**head, "rows": []}
    if resume:
        document = results.merge(path, head, ROW_KEY)
    made = {tuple(row[name] for name in ROW_KEY): row for row in document["rows"]}
    begin, first = time.perf_counter(), max((row["rounds"] for row in document["rows"]), default=0)
    rounds = math.ceil(steps / ROUND)
    for number in range(first, rounds):
        its = _Round(wanted, classes, f"{seed}/{number}", device)
        torch._dynamo.reset()
        # Beyond the limit what was compiled would run as PyTorch's.
        unlimited = torch._dynamo.config.patch(recompile_limit=ROUND)
        with unlimited, torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed + number)
            for _ in range(min(ROUND, steps - number * ROUND)):
                if time.perf_counter() - begin > budget_s:
                    break
                its.step()
        for key, row in its.rows.items():
            old = made.get(key, _EMPTY)
            made[key] = {name: (max if name == "error_over_bound" else add)(old[name], row[name]) for name in _EMPTY}
        document["rows"] = [
            {**dict(zip(ROW_KEY, key, strict=True)), **row, "rounds": number + 1} for key, row in sorted(made.items())
        ]
        document["failed"] = (document.get("failed", []) + its.failed)[:SHOWN]
        count, wrong = (sum(row[name] for row in document["rows"]) for name in ("count", "failures"))
        report(f"round {number + 1} of {rounds}: {count} calls, {wrong} wrong, {time.perf_counter() - begin:.1f} s")
        results.write(path, document)
        if time.perf_counter() - begin > budget_s:
            document["missing"] = [f"{rounds - number - 1} of {rounds} rounds, for want of time"]
            results.write(path, document)
            break
    return document
