"""The suite of networks by several processes: each has one network in one class; they compile beside each other, and
time one after the other (harness/turns.py)."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.harness import results, turns
from benchmarks.harness.runs import BESIDE_OTHERS, SHORTEST_S, deadline_of, seconds_to
from benchmarks.layers.suite import ROW_KEY
from benchmarks.networks import suite

NO_MEMORY = "OutOfMemoryError"  # in the reasons of a row's failures
ENDED = "the process ended with code"

# A worker imports the packages that this process has, wherever it found them.
_WORKER = """
import functools, json, sys
sys.path[:] = json.loads(sys.argv[1])
from benchmarks.networks import suite
suite.run(**json.loads(sys.argv[2]), report=functools.partial(print, flush=True))
"""


def run(
    networks: Sequence[str],
    classes: Sequence[str],
    workers: int,
    *,
    out: Path,
    report: suite.Report,
    budget_s: float | None = None,
    **arguments: Any,
) -> results.Document:
    """As suite.run, by so many processes at a time; arguments: its others, plain values. The file is written after
    every network and class. Those that had no memory beside others (the reasons in their rows say so), or ended early,
    are measured again when these are done, alone. `failed` of the document names those whose process ended early,
    `missing` those that were not begun within the budget."""
    head = suite.head_of(arguments.get("device"), arguments.get("suite"))
    layers_out = out.with_name("network_layers.json")
    document = results.merge(out, head, suite.KEY)
    layers = results.merge(layers_out, {**head, "suite": "network_layers"}, ROW_KEY)
    begun = json.dumps(document)
    known_rows = json.loads(begun)["rows"]
    deadline, writing = deadline_of(budget_s), threading.Lock()
    with tempfile.TemporaryDirectory() as folder, turns.sharing():

        def measure(pair: tuple[str, str], alone: bool = False) -> bool:
            """Whether it had no memory beside others, or ended early."""
            left = seconds_to(deadline)
            if left is not None and left < SHORTEST_S:
                document.setdefault("missing", []).append(f"{' '.join(pair)}: the suite's time was over")
                return False
            path = Path(folder) / "-".join(pair) / out.name
            results.write(path, json.loads(begun))  # for `resume`
            with writing:
                results.write(path.with_name(layers_out.name), layers)
            for known in out.parent.glob("layers*.json"):  # what cudnn_best_layers need not measure
                link = path.with_name(known.name)
                link.unlink(missing_ok=True)
                link.symlink_to(known.resolve())
            job = {**arguments, "networks": pair[:1], "classes": pair[1:], "out": str(path), "budget_s": left}
            done = subprocess.run([sys.executable, "-c", _WORKER, json.dumps(sys.path), json.dumps(job)])
            with writing:
                if done.returncode != 0:
                    document.setdefault("failed", []).append(f"{' '.join(pair)}: {ENDED} {done.returncode}")
                rows = [row for row in json.loads(path.read_text())["rows"] if row not in known_rows]
                short = not alone and any([_mark_memory(row) for row in rows])  # each of them
                for row in rows:
                    results.put(document, row, suite.KEY)
                results.write(out, document)
                for row in json.loads(path.with_name(layers_out.name).read_text())["rows"]:
                    results.put(layers, row, ROW_KEY)
                if layers["rows"]:
                    results.write(layers_out, layers)
            report(f"{' '.join(pair)}: {'done' if done.returncode == 0 else f'ended with code {done.returncode}'}")
            return short or done.returncode != 0

        pairs = [(name, cls) for name in networks for cls in classes]
        with ThreadPoolExecutor(workers) as pool:
            again = list(itertools.compress(pairs, list(pool.map(measure, pairs))))
        for pair in again:
            report(f"{' '.join(pair)}: once more, alone")
            ended = f"{' '.join(pair)}: {ENDED}"
            document["failed"] = [text for text in document.get("failed", []) if not text.startswith(ended)]
            measure(pair, alone=True)
    results.write(out, document)
    return document


def _mark_memory(row: results.Row) -> bool:
    """Whether something had no memory; the reasons then say that it was beside others."""
    short = {name: f"{why}, {BESIDE_OTHERS}" for name, why in row["failures"].items() if NO_MEMORY in why}
    row["failures"] |= short
    return bool(short)
