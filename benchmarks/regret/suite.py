"""`fastconv bench regret`: problem after problem, into a result file after each."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import parts, results
from benchmarks.harness.supervise import Marker, supervise
from benchmarks.regret import contest
from benchmarks.regret.problems import Problem
from fastconv import environment, timing

_WORKER = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from benchmarks.regret import suite
sys.exit(suite.work(json.loads(sys.argv[2])))
"""
PROBLEM = ("n", *results.GEOMETRY, "pass")
ROW_KEY = (*PROBLEM, "class", "layout")
ROUNDS = {"cpu": 7, "cuda": 20}
_LOST = 3  # exit code of a worker whose device is lost


@dataclass
class _Plan:
    """What a run does, as plain values that travel to a worker process."""

    problems: list[dict[str, Any]]  # fields of Problem
    classes: list[str]
    layouts: list[str]
    rounds: int
    deadline: float | None  # time.time() after which nothing more is begun
    device: str
    out: str
    part: int = 0  # of so many parts: every parts-th item of the work is this one's
    parts: int = 1

    def work(self) -> list[tuple[Problem, str]]:
        found = []
        for fields in self.problems:
            pairs = {name: tuple(value) for name, value in fields.items() if isinstance(value, list | tuple)}
            found.append(Problem(**fields | pairs))
        return [(problem, accuracy) for problem in found for accuracy in self.classes]

    def name(self, index: int) -> str:
        work = self.work()
        if index >= len(work):
            return "the end"
        problem, accuracy = work[index]
        return f"{problem.layer}, batch {problem.n}, {problem.direction}, {accuracy}"

    @property
    def marker(self) -> Path:
        return Path(self.out).with_suffix(".running")

    @property
    def file(self) -> Path:
        """Of the plan itself: thousands of problems are more than a command line holds."""
        return Path(self.out).with_suffix(".plan")


def run(
    problems: Sequence[Problem],
    *,
    classes: Sequence[str] | None = None,
    layouts: Sequence[str] = tuple(contest.ORDERS),
    rounds: int | None = None,
    budget_s: float | None = None,
    resume: bool = False,
    device: torch.device | str = "cpu",
    out: Path | str | None = None,
    isolate: bool | None = None,
    workers: int = 1,
    report: Callable[[str], None] = print,
) -> results.Document:
    """Times every problem in every class and layout; returns the result file's content.

    classes: default all, on the CPU fp32. rounds: default 20, on the CPU 7. budget_s: nothing is begun after so many
    seconds; `missing` in the file counts what is left. resume: what the file holds, of this machine, versions and
    commit, is not measured again. out: default `benchmarks/results/<gpu>/regret.json`. isolate: measure in a second
    process, which is started again without the contender that made it crash or hang; default on CUDA. workers: so many
    processes measure, one at a time; the others load their kernels meanwhile, or once more when nobody measures.
    """
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    plan = _Plan(
        problems=[asdict(problem) for problem in problems],
        classes=list(classes or (results.CLASSES if on_gpu else ("fp32",))),
        layouts=list(layouts),
        rounds=rounds or ROUNDS[device.type],
        deadline=None if budget_s is None else time.time() + budget_s,
        device=str(device),
        out=str(out or results.default_path(environment.describe("regret", device))),
    )
    head = environment.describe("regret", device)
    document = results.merge(plan.out, head, ROW_KEY)
    wanted = {_key(problem, accuracy, layout) for problem, accuracy in plan.work() for layout in layouts}
    if not resume:
        document["rows"] = [row for row in document["rows"] if _key_of(row) not in wanted]
        document.pop("done", None)
    results.write(plan.out, document)
    if workers > 1:
        return parts.run(
            plan.out, head, ROW_KEY, workers,
            lambda part, path: _isolated(replace(plan, part=part, parts=workers, out=path), report),
        )  # fmt: skip
    if on_gpu if isolate is None else isolate:
        return _isolated(plan, report)
    return _work(plan, Marker(None), 0, {}, report)


def _isolated(plan: _Plan, report: Callable[[str], None]) -> results.Document:
    plan.file.write_text(json.dumps(asdict(plan)))
    try:
        banned, failed = supervise(lambda index, banned: _command(plan, index, banned), plan.marker, plan.name, report)
    finally:
        plan.file.unlink()
    document: results.Document = json.loads(Path(plan.out).read_text())
    if banned or failed:
        document["banned"], document["failed"] = banned, document.get("failed", []) + failed
        results.write(plan.out, document)
    return document


def _command(plan: _Plan, index: int, banned: dict[str, str]) -> list[str]:
    job = json.dumps({"plan": str(plan.file), "index": index, "banned": banned})
    return [sys.executable, "-c", _WORKER, json.dumps(sys.path), job]


def work(job: dict[str, Any]) -> int:
    """What a worker process does; its exit code."""
    plan = _Plan(**json.loads(Path(job["plan"]).read_text()))
    marker = Marker(plan.marker)
    try:
        _work(plan, marker, job["index"], job["banned"], lambda text: print(text, flush=True))
    except timing.DeviceLost as lost:
        marker.accuse(str(lost))
        return _LOST
    return 0


def _work(
    plan: _Plan, marker: Marker, first: int, banned: Mapping[str, str], report: Callable[[str], None]
) -> results.Document:  # fmt: skip
    device = torch.device(plan.device)
    document = results.merge(plan.out, environment.describe("regret", device), ROW_KEY)
    held = {_key_of(row) for row in results.own_rows(document)}
    missing, failed = 0, list[str]()
    with torch.no_grad():
        for index, (problem, accuracy) in enumerate(plan.work()):
            if index < first or index % plan.parts != plan.part:
                continue
            if {_key(problem, accuracy, layout) for layout in plan.layouts} <= held:
                continue
            if plan.deadline is not None and time.time() > plan.deadline:
                missing += 1
                continue
            marker.set(index, "")
            try:
                rows = contest.measure(
                    problem, accuracy, plan.layouts, device, plan.rounds, index,
                    lambda name, index=index: marker.set(index, name), tuple(banned), marker.beat,  # type: ignore[misc]
                )  # fmt: skip
            except timing.DeviceLost:
                raise
            except Exception as failure:  # of the problem as a whole: out of memory for its data, say
                failed.append(f"{plan.name(index)}: {timing.message_of(failure)}")
                report(failed[-1])
                timing.recover()
                continue
            for row in rows:
                results.put(document, row, ROW_KEY)
                report(line(row))
            results.write(plan.out, document)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    for name, value in (("missing", [f"{missing} problems: the time was over"] if missing else []), ("failed", failed)):
        if value:
            document[name] = value
    results.write(plan.out, document)
    return document


def _key(problem: Problem, accuracy: str, layout: str) -> str:
    return _key_of({**problem.fields(), "class": accuracy, "layout": layout})


def _key_of(row: Mapping[str, Any]) -> str:
    return json.dumps([row[name] for name in ROW_KEY])


def line(row: results.Row) -> str:
    """One row on one line, for the eye."""
    regret = contest.regret(row)
    us = "failed" if row["us"] is None else f"{row['us']:.1f}"
    text = f"{row['layer']:32} n{row['n']:<3} {row['pass']:15} {row['class']:4} {row['layout']} "
    text += f"{row['algorithm']:19} {us:>9} us"
    if regret is None:
        return text
    slower = "  slower than PyTorch" if contest.is_slower(row) else ""
    return f"{text}  {regret:5.2f} of {row['best']} {row['best_us']:.1f}{slower}"
