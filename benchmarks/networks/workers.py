"""The suite of networks by several processes: each has one network in one class; they compile beside each other, and
time one after the other (harness/turns.py)."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.harness import results, turns
from benchmarks.layers.suite import ROW_KEY
from benchmarks.networks import suite

# A worker imports the packages that this process has, wherever it found them.
_WORKER = """
import functools, json, sys
sys.path[:] = json.loads(sys.argv[1])
from benchmarks.networks import suite
suite.run(**json.loads(sys.argv[2]), report=functools.partial(print, flush=True))
"""


def run(
    networks: Sequence[str], classes: Sequence[str], workers: int, *, out: Path, report: suite.Report, **arguments: Any
) -> results.Document:
    """As suite.run, by so many processes at a time; arguments: its others, plain values. `failed` of the document names
    pairs whose process ended early."""
    head = suite.head_of(arguments.get("device"))
    document = results.merge(out, head, suite.KEY)
    pairs = [(name, cls) for name in networks for cls in classes]
    with tempfile.TemporaryDirectory() as folder, turns.sharing():

        def measure(pair: tuple[str, str]) -> Path:
            path = Path(folder) / "-".join(pair) / out.name
            results.write(path, document)  # for `resume`
            job = {**arguments, "networks": pair[:1], "classes": pair[1:], "out": str(path)}
            command = [sys.executable, "-c", _WORKER, json.dumps(sys.path), json.dumps(job)]
            done = subprocess.run(command)
            report(f"{' '.join(pair)}: {'done' if done.returncode == 0 else f'ended with code {done.returncode}'}")
            if done.returncode != 0:
                failed.append(f"{' '.join(pair)}: the process ended with code {done.returncode}")
            return path

        failed: list[str] = []
        with ThreadPoolExecutor(workers) as pool:
            found = list(pool.map(measure, pairs))
        layers_out = out.with_name("network_layers.json")
        layers = results.merge(layers_out, {**head, "suite": "network_layers"}, ROW_KEY)
        for (name, cls), path in zip(pairs, found, strict=True):
            for row in json.loads(path.read_text())["rows"]:
                if (row["network"], row["class"]) == (name, cls):
                    results.put(document, row, suite.KEY)
            if (its := path.with_name(layers_out.name)).exists():
                for row in json.loads(its.read_text())["rows"]:
                    results.put(layers, row, ROW_KEY)
    if failed:
        document["failed"] = failed
    results.write(out, document)
    if layers["rows"]:
        results.write(layers_out, layers)
    return document
