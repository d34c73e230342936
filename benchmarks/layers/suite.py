"""`fastconv bench layers`: the layer set, ours per algorithm against PyTorch and cuDNN, into a result file."""

from __future__ import annotations

import gc
import itertools
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.harness import parts, results, turns
from benchmarks.harness.runs import is_disturbed
from benchmarks.harness.supervise import Marker, supervise
from benchmarks.layers import group as layer_group
from benchmarks.layers import plans as earlier
from benchmarks.layers.sets import PASSES, batches_of, suite_of
from fastconv import environment, timing
from fastconv.models.layers import Layer, select

# A worker imports the packages that this process has, wherever it found them.
_WORKER = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from benchmarks.layers import suite
sys.exit(suite.work(json.loads(sys.argv[2])))
"""
ROW_KEY = ("layer", "n", "class", "layout", "pass")
SHARED_BYTES = 256 << 20  # of input and output: what is larger has the GPU's memory for itself
KEPT_BYTES = 4 << 30  # with more memory after a layer that it cannot give back, a process ends, and another goes on
_LOST = 3  # exit code of a worker whose device is lost


def groups_of(classes: Sequence[str]) -> list[tuple[torch.dtype, bool, list[str]]]:
    """(element type, TF32 allowed, classes): ieee and fp32 have the same peers and are timed against them together."""
    wanted = [
        (torch.float32, False, [name for name in ("ieee", "fp32") if name in classes]),
        (torch.float32, True, [name for name in ("tf32",) if name in classes]),
        (torch.float16, False, [name for name in ("fp16",) if name in classes]),
        (torch.bfloat16, False, [name for name in ("bf16",) if name in classes]),
    ]
    return [group for group in wanted if group[2]]


@dataclass
class _Plan:
    """What a run does, as plain values that travel to a worker process."""

    suite: str
    batch_sizes: list[int]
    classes: list[str]
    layers: list[dict[str, Any]]  # fields of Layer
    algorithms: list[str] | None
    rounds: int
    deadline: float | None  # time.time() after which nothing more is begun
    device: str
    layouts: list[str]
    out: str
    direction: str = "forward"
    resume: bool = False
    max_error: float = 1.5
    survey: bool = False
    triton: bool = False
    packs: bool = False
    plans: tuple[str, ...] = ()
    part: int = 0  # of so many parts: every parts-th item of the work is this one's
    parts: int = 1

    def is_over(self) -> bool:
        return self.deadline is not None and time.time() > self.deadline

    def is_mine(self, index: int) -> bool:
        return index % self.parts == self.part

    def work(self) -> list[tuple[int, Layer, tuple[torch.dtype, bool, list[str]]]]:
        layers, groups = [Layer(**fields) for fields in self.layers], groups_of(self.classes)
        return [(n, layer, group) for n in self.batch_sizes for layer in layers for group in groups]

    def name(self, index: int) -> str:
        work = self.work()
        if index >= len(work):
            return "the end"
        n, layer, (_, _, members) = work[index]
        return f"{layer.layer}, batch {n}, {'/'.join(members)}"


def run(
    batch_sizes: Sequence[int] | None = None,
    classes: Sequence[str] | None = None,
    layers: str | Sequence[str] | Sequence[Layer] | None = None,
    algorithms: Sequence[str] | None = None,
    rounds: int = 20,
    budget_s: float | None = None,
    out: Path | str | None = None,
    device: torch.device | str | None = None,
    layouts: Sequence[str] | None = None,
    console: Console | None = None,
    isolate: bool | None = None,
    layer_set: str = "layers",
    direction: str = "forward",
    resume: bool = False,
    max_error: float = 1.5,
    workers: int = 1,
    survey: bool = False,
    triton: bool = False,
    packs: bool = False,
    plans: Sequence[Path | str] = (),
    suite: str | None = None,
) -> results.Document:
    """Times a layer set and writes the result file, after every layer; returns its content.

    batch_sizes: default sets.batches_of(layer_set).
    classes: of `ieee fp32 tf32 fp16 bf16`; default all, on the CPU fp32. algorithms: what to restrict to.
    layers: names of the set, or its layers themselves (of a sweep: sets.grid).
    budget_s: no further layer is begun after so many seconds; what is then missing is listed in the file. resume: what
    the file already holds, of this machine, versions and commit, is not measured again. out: default
    `benchmarks/results/<gpu>/<suite>.json`, suite `layers` or `layers_<layer_set>`, with `_cpu` behind on the CPU; rows
    of the same machine, versions and commit that it already holds are kept. device: default cuda if there is one.
    layouts: ours; default NHWC, on the CPU both. isolate: measure in a second process, which is started again without
    the contender that made it crash or hang (`banned` in the file); default on CUDA. layer_set: of
    fastconv.models.layers.SETS, or "sweep".
    direction: the pass, of sets.PASSES; any but forward is in the suite's name. suite: the file's, default
    sets.suite_of.
    workers: so many processes measure, one at a time on the GPU, while the others build cuDNN's plans.
    survey: very many layers in little time: rivals without a search, few rounds, nothing printed but the end; all but
    the rounds of a small layer is done beside other workers. Algorithms that are named are timed, however slow.
    triton: an implicit GEMM in Triton is one more rival of the forward pass; its tiles compile for some seconds.
    packs: what `auto` takes is timed with its filter packed in every call, too; at batch 1, in a survey, it always is.
    plans: result files of the same cuDNN: what were the fastest plans there is not searched for again.
    max_error: forward rows tell in `within` what `auto` takes within this limit, beside what it takes by default.
    Raises ValueError for unknown names, for plans of another cuDNN and, not isolated, timing.DeviceLost if the
    GPU fails.
    """
    if direction not in PASSES:
        raise ValueError(f"direction is {direction!r}; expected one of {', '.join(PASSES)}")
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    on_gpu = device.type == "cuda"
    classes = list(classes or (results.CLASSES if on_gpu else ("fp32",)))
    unknown = [name for name in classes if name not in results.CLASSES]
    if unknown:
        raise ValueError(f"classes: {unknown} are not among {results.CLASSES}")
    chosen = [layer for layer in layers or () if isinstance(layer, Layer)]
    if not chosen:
        chosen = select(layers, layer_set)  # type: ignore[arg-type]
    suite = suite or suite_of(layer_set, direction, device.type)
    head = environment.describe(suite, device)
    path = Path(out) if out is not None else results.default_path(head)
    earlier.check(plans, head)
    plan = _Plan(
        suite=suite,
        batch_sizes=list(batch_sizes or batches_of(layer_set)),
        classes=classes,
        layers=[layer.fields() for layer in chosen],
        algorithms=None if algorithms is None else list(algorithms),
        rounds=rounds,
        deadline=None if budget_s is None else time.time() + budget_s,
        device=str(device),
        layouts=list(layouts or (("nhwc",) if on_gpu else ("nchw", "nhwc"))),
        out=str(path),
        direction=direction,
        resume=resume,
        max_error=max_error,
        survey=survey,
        triton=triton,
        packs=packs,
        plans=tuple(map(str, plans)),
    )
    console = console or _console()
    console.print(f"{head['gpu']}, torch {head['torch']}, cuDNN {head['cudnn'] or '-'}, commit {head['commit'][:12]}")
    begin = time.perf_counter()
    if workers > 1:
        document = parts.run(
            path, head, ROW_KEY, workers,
            lambda part, out: _run_isolated(replace(plan, part=part, parts=workers, out=out), console),
        )  # fmt: skip
    elif on_gpu if isolate is None else isolate:
        document = _run_isolated(plan, console)
    else:
        document = _work(plan, console, Marker(None), 0, {})
    planned = {(layer.layer, n, name) for n, layer, group in plan.work() for name in group[2]}
    fresh = [row for row in document["rows"] if (row["layer"], row["n"], row["class"]) in planned]
    for table in [] if survey else summary_tables(fresh):
        console.print(table)
    for state in ("failed", "missing"):
        for text in document.get(state, []):
            console.print(f"{state}: {text}", markup=False, highlight=False)
    console.print(f"{len(fresh)} rows in {time.perf_counter() - begin:.0f} s -> {path}")
    return document


def _run_isolated(plan: _Plan, console: Console) -> results.Document:
    def command(index: int, banned: dict[str, str]) -> list[str]:
        job = json.dumps({"plan": asdict(plan), "index": index, "banned": banned})
        return [sys.executable, "-c", _WORKER, json.dumps(sys.path), job]

    path = Path(plan.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    banned, failed = supervise(command, _marker_path(plan), plan.name, console.print)
    document = json.loads(path.read_text())
    if banned or failed:
        document["banned"] = banned
        document["failed"] = document.get("failed", []) + failed
        results.write(path, document)
    return document


def _marker_path(plan: _Plan) -> Path:
    return Path(plan.out).with_suffix(".running")


def work(job: dict[str, Any]) -> int:
    """What a worker process does; its exit code."""
    plan, begin = _Plan(**job["plan"]), job["index"]
    marker = Marker(_marker_path(plan))
    try:
        _work(plan, _console(), marker, begin, job["banned"])
    except timing.DeviceLost as lost:
        marker.accuse(str(lost))
        return _LOST
    return 0


def _work(plan: _Plan, console: Console, marker: Marker, first: int, banned: Mapping[str, str]) -> results.Document:
    """Measures the plan's work from item `first` on, and writes the file after each."""
    device, path = torch.device(plan.device), Path(plan.out)
    document = results.merge(path, environment.describe(plan.suite, device), ROW_KEY)
    if first > 0:
        document["failed"] = json.loads(path.read_text()).get("failed", []) if path.exists() else []
    work, missing = plan.work(), []
    gc.freeze()  # torch's own objects: the collections below look at ours alone
    with torch.inference_mode():
        for index in filter(plan.is_mine, range(first, len(work))):
            n, layer, (dtype, tf32, members) = work[index]
            if plan.resume and _holds(document, plan, layer, n, members):
                continue
            if plan.is_over():
                missing.append(plan.name(index))
                continue
            started = time.perf_counter()
            marker.set(index, "")
            group = layer_group.Group(layer, n, dtype, tf32, members, plan.layouts, device, banned=banned)
            group.direction, group.max_error, group.survey = plan.direction, plan.max_error, plan.survey
            group.triton, group.packs = plan.triton, plan.packs
            group.known_plans = earlier.known(plan.plans, layer, n, members[0], plan.direction)
            group.keeps_named = plan.survey and plan.algorithms is not None
            group.announce = lambda name, index=index: marker.set(index, name)  # type: ignore[misc]
            rows: list[results.Row] | None = []
            try:
                rows = _measure(group, plan, index, marker)
            except timing.DeviceLost:
                raise
            except Exception as failure:  # of the layer as a whole: out of memory for its data, say
                document.setdefault("failed", []).append(f"{plan.name(index)}: {timing.message_of(failure)}")
                console.print(f"{plan.name(index)}: FAILED: {timing.message_of(failure)}", markup=False)
                timing.recover()
            if rows is None:
                missing.append(plan.name(index))
            for row in rows or ():
                results.put(document, row, ROW_KEY)
                if not plan.survey:
                    console.print(progress_line(row, time.perf_counter() - started), highlight=False)
            results.write(path, document)
            del group
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
                # Pools of graphs that a rival's workspaces of tens of GB were in have been kept to the process's end,
                # and left other processes without memory.
                if torch.cuda.memory_reserved(device) > KEPT_BYTES and marker.hand_over(index + 1):
                    return document
    if missing:
        document["missing"] = [f"{name}: the suite's time was over" for name in missing]
    results.write(path, document)
    return document


def _measure(group: layer_group.Group, plan: _Plan, seed: int, marker: Marker) -> list[results.Row] | None:
    """None: the time was over when it was this process's turn, for which several wait. In a survey, workers make small
    layers ready beside each other, and time them in turns."""
    moved = group.n * (group.layer.c * group.layer.h * group.layer.w + group.layer.k * group.layer.p * group.layer.q)
    if not plan.survey or moved * group.dtype.itemsize > SHARED_BYTES:
        with turns.timing(marker.beat):
            return None if plan.is_over() else layer_group.measure(group, plan.algorithms, plan.rounds, seed)
    group.alone = plan.parts == 1
    with turns.preparing(marker.beat, patient=True):
        choices = layer_group.enter(group, plan.algorithms, seed)
    with turns.timing(marker.beat):
        return layer_group.finish(group, choices, plan.rounds, seed)


def _holds(document: results.Document, plan: _Plan, layer: Layer, n: int, classes: Sequence[str]) -> bool:
    """Whether the document has every row of a group, and none of them disturbed."""
    wanted = itertools.product([layer.layer], [n], classes, plan.layouts, [plan.direction])
    held = (row for row in results.own_rows(document) if not is_disturbed(row))
    return set(wanted) <= {tuple(row[name] for name in ROW_KEY) for row in held}


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=150)


def is_wrong(row: results.Row) -> bool:
    """Whether the error of ours is beyond anything that the class could mean."""
    return row["error"] is not None and row["error"] > layer_group.CLASS_ERROR[row["class"]]


def ratio(row: results.Row) -> float | None:
    """How many times faster ours is than the best peer; None where either has no time, or ours is wrong."""
    if is_wrong(row) or not row["us"] or not row["best_peer_us"]:
        return None
    return row["best_peer_us"] / row["us"]


def geometric_mean(values: Sequence[float]) -> float | None:
    return math.exp(sum(math.log(value) for value in values) / len(values)) if values else None


def progress_line(row: results.Row, seconds: float) -> str:
    """One row on one line, for the eye."""
    times = ratio(row)
    us = "   failed" if row["us"] is None else f"{row['us']:9.1f}"
    peer = "-" if row["best_peer"] is None else f"{row['best_peer']} {row['best_peer_us']:.1f}"
    error = "-" if row["error"] is None else f"{row['error']:.1e}"
    peer_error = "-" if row["peer_error"] is None else f"{row['peer_error']:.1e}"
    floor = "-" if row["floor_us"] is None else f"{row['floor_us']:.0f}"
    verdict = "    -" if times is None else f"{times:5.2f}x" + (" LOST" if times < 1 else "")
    verdict = "WRONG" if is_wrong(row) else verdict
    return (
        f"{row['layer']:8} n{row['n']:<3} {row['class']:4} {row['layout']} {row['algorithm']:14} {us} us  {verdict:11} "
        f"vs {peer:36} error {error}/{peer_error} floor {floor}  ({seconds:.1f} s)"
    )


def summary_tables(rows: Sequence[results.Row]) -> list[Table]:
    """A compact table per batch and layout: microseconds and speedup over the best peer, per class."""
    tables = []
    for n, layout in dict.fromkeys((row["n"], row["layout"]) for row in rows):
        here = [row for row in rows if (row["n"], row["layout"]) == (n, layout)]
        classes = [name for name in results.CLASSES if any(row["class"] == name for row in here)]
        table = Table(title=f"batch {n}, {layout}: us of auto, times faster than the best peer", box=None)
        table.add_column("layer")
        for name in classes:
            table.add_column(name, justify="right", no_wrap=True)
        cells = {(row["layer"], row["class"]): row for row in here}
        for layer in dict.fromkeys(row["layer"] for row in here):
            table.add_row(layer, *(_cell(cells.get((layer, name))) for name in classes))
        means = []
        for name in classes:
            ratios = [ratio(row) for row in here if row["class"] == name and row["c"] >= 64]
            mean = geometric_mean([value for value in ratios if value])
            means.append("-" if mean is None else f"{mean:.2f}x")
        table.add_row("geometric mean, C >= 64", *means)
        tables.append(table)
    return tables


def grid_tables(rows: Sequence[results.Row]) -> list[Table]:
    """Of a sweep, a table per batch, class and layout: times faster than the best peer over C, K and map, by what."""
    tables = []
    for part in dict.fromkeys((row["n"], row["class"], row["layout"]) for row in rows):
        here = [row for row in rows if (row["n"], row["class"], row["layout"]) == part]
        columns = list(dict.fromkeys((row["c"], row["k"]) for row in here))
        table = Table("map", *(f"{c}->{k}" for c, k in columns), title="batch {}, {}, {}".format(*part), box=None)
        for size in dict.fromkeys(row["h"] for row in here):
            cells = {(row["c"], row["k"]): row for row in here if row["h"] == size}
            table.add_row(f"{size}x{size}", *(_grid_cell(cells.get(column)) for column in columns))
        tables.append(table)
    return tables


def _grid_cell(row: results.Row | None) -> str:
    times = None if row is None else ratio(row)
    return "-" if row is None or times is None else f"{times:.2f}x {row['algorithm']}"


def _cell(row: results.Row | None) -> str:
    if row is None or row["us"] is None:
        return "-"
    if is_wrong(row):
        return "WRONG"
    times = ratio(row)
    return f"{row['us']:.1f}" + ("" if times is None else f" {times:5.2f}x")
