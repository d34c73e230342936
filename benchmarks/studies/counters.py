"""Hardware counters of kernels, by NVIDIA's Nsight Compute: the bytes of memory and of the L2 cache, hit rates,
instructions and warps of what one call launches.

`ncu` runs a process of its own, which makes some layers' calls ready and launches each once, behind a marker, from cold
caches: what a kernel of the call leaves in them its next one finds. The process runs as often as it takes to read all
counters, so that no kernel is replayed alone; since most of its time is its start, it has several layers. Where
counters may not be read (another runtime, a driver that keeps them for the administrator), the rows say why.
"""

from __future__ import annotations

import csv
import functools
import io
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import ours, results, turns
from benchmarks.harness.runs import LAYOUTS, deadline_of, is_past, until
from benchmarks.papers.common import KERNEL_KEY, empty_row
from fastconv import environment, timing
from fastconv.instrumented import Options, kernel_of, random_data
from fastconv.models.layers import Layer, select

# Of a row: the counter, and how kernels of a call are joined: added, or their mean weighted by time.
METRICS = {
    "us": ("gpu__time_duration.sum", "sum"),
    "dram_read_bytes": ("dram__bytes_read.sum", "sum"),
    "dram_write_bytes": ("dram__bytes_write.sum", "sum"),
    "l2_bytes": ("lts__t_bytes.sum", "sum"),
    "l2_hit_percent": ("lts__t_sector_hit_rate.pct", "mean"),
    "l1_hit_percent": ("l1tex__t_sector_hit_rate.pct", "mean"),
    "instructions": ("smsp__inst_executed.sum", "sum"),
    "warps_percent": ("sm__warps_active.avg.pct_of_peak_sustained_active", "mean"),
}
MARKER = "spin_kernel"  # of torch.cuda._sleep
FORBIDDEN = "ERR_NVGPUCTRPERM"  # what ncu says where the driver keeps the counters for the administrator
LIMIT_S, JOB_S = 60.0, 20.0  # that a process of several jobs may take, and more for each of them
JOBS = 8  # of a process: a layer, class and algorithm each
MEGAKERNEL = "winograd_megakernel"
# The maps of the megakernel whose counters are compared, as its instruments take them.
MAPS: dict[str, dict[str, Any]] = {
    "as planned": {},
    "D_IG, D_GO 0, M 1": {"d_ig": 0, "d_go": 0, "m": 1},
    "M 16": {"m": 16},
    "in series": {"series": True},
}

# The process that ncu watches imports the packages that this one has, wherever it found them.
_WORKER = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from benchmarks.studies import counters
counters.work(json.loads(sys.argv[2]))
"""


class NoCounters(RuntimeError):
    """ncu is missing, or may not read the device's counters; the message says which."""


def program() -> str:
    """ncu, on the path or in the CUDA Toolkit. Raises NoCounters."""
    found = shutil.which("ncu") or shutil.which(f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin/ncu")
    if found is None:
        raise NoCounters("ncu was found neither on the path nor in CUDA_HOME; NVIDIA's Nsight Compute has it")
    return found


def calls_of(layer: Layer, n: int, accuracy: str, algorithm: str, layout: str) -> dict[str, Callable[[], object]]:
    """Of one layer by one algorithm, by variant: of the megakernel its maps, else one. Needs a CUDA device."""
    x, weight = random_data(layer, n, accuracy, torch.device("cuda"))
    x = x.contiguous(memory_format=LAYOUTS[layout])
    if algorithm != MEGAKERNEL:  # PyTorch's by cuDNN's heuristics: a search may end otherwise in the next process
        return {"": ours.contender(algorithm, x, weight, layer, accuracy, search=False)}
    kernel = kernel_of(x, weight, layer, accuracy)
    return {name: functools.partial(kernel, Options(**its)) for name, its in MAPS.items()}


Job = Mapping[str, Any]  # a layer's fields, batch, class, algorithm, layout


def work(jobs: Sequence[Job]) -> None:
    """What the watched process does: of each job it makes the calls ready, then a marker and a launch for each; at last
    it prints the variants of each job, or why it has none."""
    flush = timing.L2Flush(torch.device("cuda"))
    found: list[list[str] | str] = []
    for job in jobs:
        try:
            calls = calls_of(Layer(**job["layer"]), job["n"], job["class"], job["algorithm"], job["layout"])
            with torch.inference_mode():
                for call in calls.values():
                    call()
                for call in calls.values():
                    _launch(call, flush)
            found.append(list(calls))
        except RuntimeError as error:  # of a first call: nothing of the job was watched
            timing.recover()
            found.append(timing.message_of(error))
    print("variants " + json.dumps(found))


def _launch(call: Callable[[], object], flush: Callable[[], object]) -> None:
    flush()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    torch.cuda._sleep(1)
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def parse(output: str) -> list[list[dict[str, str]]]:
    """The kernels of each call, as rows of ncu's table, from what it printed with `--csv --page raw`. Raises NoCounters
    where there is no table."""
    lines = output.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if begin is None:
        said = [line for line in lines if line.startswith("==ERROR==")] or lines[-1:] or ["nothing"]
        raise NoCounters(f"ncu gave no table: {' '.join(said)}")
    rows = csv.DictReader(io.StringIO("\n".join(line for line in lines[begin:] if line.startswith('"'))))
    calls: list[list[dict[str, str]]] = []
    for row in rows:
        if not row["ID"]:  # the units
            continue
        if MARKER in row["Kernel Name"]:
            calls.append([])
        elif calls:
            calls[-1].append(row)
    return calls


def joined(kernels: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """The counters of a call: those of its kernels, added, rates weighted by time, and each kernel's under `parts`.
    Times in microseconds."""
    values = [
        {name: float(kernel[metric].replace(",", "")) for name, (metric, _) in METRICS.items()} for kernel in kernels
    ]
    parts = [
        {"kernel": kernel["Kernel Name"], **its, "us": its["us"] / 1e3}
        for kernel, its in zip(kernels, values, strict=True)
    ]
    total = {name: sum(each[name] for each in values) for name in METRICS}
    weights = total["us"] or 1.0
    for name, (_, way) in METRICS.items():
        if way == "mean":
            total[name] = sum(each[name] * each["us"] for each in values) / weights
    return {**total, "us": total["us"] / 1e3, "kernels": len(kernels), "parts": parts}


def measure(jobs: Sequence[Job], limit_s: float | None = None) -> list[dict[str, dict[str, Any]] | str]:
    """Of each job: variant -> counters, or why it has none. Raises NoCounters where there are none of any, also after
    `limit_s` seconds."""
    command = [program(), "--csv", "--page", "raw", "--print-units", "base", "--profile-from-start", "off"]
    command += ["--clock-control", "none", "--cache-control", "none", "--replay-mode", "application"]
    command += ["--metrics", ",".join(metric for metric, _ in METRICS.values())]
    command += [sys.executable, "-c", _WORKER, json.dumps(sys.path), json.dumps(jobs)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise NoCounters(f"ncu took more than {limit_s:.0f} s") from None
    found = iter(calls := parse(done.stdout))
    names = next((json.loads(line[9:]) for line in done.stdout.splitlines() if line.startswith("variants ")), None)
    if names is None or sum(len(its) for its in names if isinstance(its, list)) != len(calls):
        raise NoCounters(f"ncu saw {len(calls)} calls; {done.stderr.strip().splitlines()[-1:] or 'no word of why'}")
    return [its if isinstance(its, str) else {name: joined(next(found)) for name in its} for its in names]


def run(
    layers: str | Sequence[Layer], n: int, classes: Sequence[str], algorithms: Sequence[str], *, out: Path, suite: str,
    layout: str = "nhwc", budget_s: float | None = None, resume: bool = False, report: Callable[[str], None] = print,
) -> results.Document:  # fmt: skip
    """A row for each layer, class, algorithm and variant, into the file of `suite`; `notes` says why one has none.

    budget_s: nothing is begun after so many seconds. resume: counters that the file holds are not read again. Whom the
    driver refuses is refused every time: the others then have the same note.
    """
    document = results.merge(out, environment.describe(suite, "cuda"), (*KERNEL_KEY, "variant"))
    rows = results.own_rows(document) if resume else []
    held = {tuple(row[name] for name in KERNEL_KEY) for row in rows if row["us"] is not None}
    deadline, refusal = deadline_of(budget_s), ""
    chosen = select(layers) if isinstance(layers, str) else layers
    wanted = [
        (layer, empty)
        for layer, accuracy, algorithm in itertools.product(chosen, classes, algorithms)
        if (empty := empty_row(layer, n, accuracy, layout) | {"algorithm": algorithm, "variant": ""})
        and tuple(empty[name] for name in KERNEL_KEY) not in held
    ]
    for begin in range(0, len(wanted), JOBS):
        if is_past(deadline):
            break
        part = wanted[begin : begin + JOBS]
        jobs = [
            {"layer": layer.fields(), **{name: empty[name] for name in ("n", "class", "algorithm", "layout")}}
            for layer, empty in part
        ]
        try:
            if refusal:
                raise NoCounters(refusal)
            with turns.timing():
                found = measure(jobs, until(LIMIT_S + JOB_S * len(jobs), deadline))
        except NoCounters as error:
            found = [str(error)] * len(jobs)
            refusal = str(error) if FORBIDDEN in str(error) else ""
        for (_, empty), its in zip(part, found, strict=True):
            if isinstance(its, str):
                rows = [empty | {"notes": {empty["algorithm"]: its}}]
            else:
                rows = [empty | {"variant": name, **counted} for name, counted in its.items()]
            for row in rows:
                results.put(document, row, (*KERNEL_KEY, "variant"))
                said = row["notes"] or f"{row['us']:.0f} us, {row['dram_read_bytes'] / 1e6:.0f} MB read"
                report(f"{row['layer']} {row['class']} {row['algorithm']} {row['variant']}: {said}")
        results.write(out, document)
    return document
