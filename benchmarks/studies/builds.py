"""`fastconv bench builds`: the layer set by two builds of fastconv, this one and an older checkout's, in one run.

Each build is imported by a worker process of its own, since two libraries cannot register the same operators in one;
the workers are asked in turns, so that both see the same clocks. What a worker uses of its fastconv has been the same
since the first version: `explain`, and the operators `pack_weight`, `conv2d` and `conv2d_packed`.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import results
from benchmarks.harness.ours import dtype_of, precision_of
from fastconv import environment, timing
from fastconv.models.layers import Layer, select

NAMES = ("old", "new")
KEY = ("layer", "n", "class")
_WORKER = """
import importlib.util, json, sys
root, timer, device = sys.argv[1:]
sys.path.insert(0, root)
import torch, fastconv
spec = importlib.util.spec_from_file_location("timer_of_both", timer)
timing = sys.modules["timer_of_both"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(timing)
operators = fastconv.ops
print(json.dumps(fastconv.__file__), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    if "shape" in job:
        run = y = None
        torch.cuda.empty_cache()
        generator = torch.Generator(device).manual_seed(0)
        dtype = getattr(torch, job["dtype"])
        x = torch.randn(job["shape"], generator=generator, device=device).to(dtype)
        x = x.to(memory_format=torch.channels_last)
        weight = torch.randn(job["filters"], generator=generator, device=device).to(dtype)
        weight *= weight[0].numel() ** -0.5
        geometry = ([job["stride"]] * 2, [job["padding"]] * 2, [job["dilation"]] * 2, job["groups"])
        said = fastconv.explain(job["shape"], job["filters"], stride=job["stride"], padding=job["padding"],
            dilation=job["dilation"], groups=job["groups"], dtype=dtype, device=device,
            precision=job["precision"], layout="nhwc")
        name, precision, filters = said.choice, job["precision"], job["filters"]
        if name == "torch":
            weight = weight.contiguous(memory_format=torch.channels_last)
            run = lambda: operators.conv2d_op(x, weight, None, None, *geometry, name, precision, "none", 0.0, 5)
        else:
            packed = operators.pack_weight_op(weight, job["groups"], name, precision)
            run = lambda: operators.conv2d_packed_op(x, packed, filters, None, None, *geometry, True, name, precision,
                "none", 0.0)
        y = run()
        checksum = y.view(torch.int16 if y.element_size() == 2 else torch.int32).sum(dtype=torch.int64).item()
        answer = {"algorithm": name, "bits": checksum}
    else:
        found = timing.measure({"run": run}, device=device, rounds=job["rounds"])
        answer = {"failures": found.failures} if found.failures else {"us": found.timings["run"].us}
    print(json.dumps(answer), flush=True)
"""


class _Build:
    """A worker with the fastconv of one checkout; begins to import it."""

    def __init__(self, root: Path, device: torch.device) -> None:
        command = [sys.executable, "-c", _WORKER, str(root), str(Path(timing.__file__).resolve()), str(device)]
        self._root = root.resolve()
        self._worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)

    def check(self) -> None:
        """Waits until it has imported it. Raises RuntimeError if that is another checkout's."""
        imported = Path(self._answer()).resolve()
        if self._root not in imported.parents:
            raise RuntimeError(f"the worker for {self._root} imported {imported}")

    def _answer(self) -> Any:
        assert self._worker.stdout is not None
        line = self._worker.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker ended with code {self._worker.wait()}")
        return json.loads(line)

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        assert self._worker.stdin is not None
        self._worker.stdin.write(json.dumps(job) + "\n")
        self._worker.stdin.flush()
        answer = self._answer()
        if answer.get("failures"):
            raise RuntimeError(str(answer["failures"]))
        return answer

    def close(self) -> None:
        self._worker.kill()
        self._worker.wait()


@contextlib.contextmanager
def _builds(roots: Sequence[Path], device: torch.device) -> Iterator[list[_Build]]:
    with contextlib.ExitStack() as stack:
        builds = []
        for root in roots:
            builds.append(_Build(root, device))
            stack.callback(builds[-1].close)
        for build in builds:
            build.check()
        yield builds


def _job(layer: Layer, n: int, accuracy: str) -> dict[str, Any]:
    return {
        "shape": [n, layer.c, layer.h, layer.w],
        "filters": [layer.k, layer.c // layer.groups, layer.r, layer.s],
        "dtype": str(dtype_of(accuracy)).removeprefix("torch."),
        "precision": precision_of(accuracy),
        "stride": layer.stride,
        "padding": layer.padding,
        "dilation": layer.dilation,
        "groups": layer.groups,
    }


def run(
    old: Path,
    classes: Sequence[str],
    batches: Sequence[int],
    layers: Sequence[str] | None = None,
    out: Path | None = None,
    old_commit: str | None = None,
    blocks: int = 3,
    rounds: int = 8,
    budget_s: float | None = None,
    device: torch.device | str = "cuda",
    say: Callable[[str], None] = print,
) -> results.Document:
    """Times what `auto` takes of either build, `blocks` times `rounds` calls each, in turns; returns the document.

    old: a checkout with its library built in place, of `old_commit` (None: what its git says); the other one is that of
    this file. A row has the median of the
    blocks of both in us, `ratio` (old over new: above 1 the new one is faster), and whether the first outputs have the
    same bits (by their sum as integers). budget_s: no layer begins after so many seconds; `missing` names those.
    """
    end = time.monotonic() + (float("inf") if budget_s is None else budget_s)
    device = torch.device(device)
    document: results.Document = {**environment.describe("builds", device), "rows": [], "missing": []}
    document["old_commit"] = old_commit or environment.commit_of(old)
    path = out or results.default_path(document)
    with _builds([old, Path(__file__).resolve().parents[2]], device) as builds:
        for n in batches:
            for layer in select(list(layers) if layers else None):
                if time.monotonic() > end:
                    document["missing"].append(f"{layer.layer} n{n}")
                    continue
                for accuracy in classes:
                    job = _job(layer, n, accuracy)
                    first = [build.ask(job) for build in builds]
                    times: list[list[float]] = [[], []]
                    for block in range(blocks):
                        order = (0, 1) if block % 2 == 0 else (1, 0)
                        for which in order:
                            times[which].append(builds[which].ask({"rounds": rounds})["us"])
                    us = [statistics.median(each) for each in times]
                    row = {**layer.fields(), "n": n, "class": accuracy, "ratio": us[0] / us[1]}
                    row |= {f"{name}_us": value for name, value in zip(NAMES, us, strict=True)}
                    row |= {f"{name}_algorithm": each["algorithm"] for name, each in zip(NAMES, first, strict=True)}
                    row["same_bits"] = first[0]["bits"] == first[1]["bits"]
                    results.put(document, row, KEY)
                    names = " ".join(dict.fromkeys(each["algorithm"] for each in first))
                    bits = "" if row["same_bits"] else "  other bits"
                    times_of_both = f"{us[0]:8.1f} {us[1]:8.1f} {row['ratio']:.3f}"
                    say(f"{layer.layer:8} n{n:<3} {accuracy:4} {times_of_both} {names}{bits}")
                results.write(path, document)
    for its in summary(document):
        say(str(its))
    if document["missing"]:
        results.write(path, document)
        say(f"no time was left for {', '.join(document['missing'])}")
    return document


@dataclass(frozen=True)
class Summary:
    """Of a class and batch. Ratios are old over new, (ratio, layer) of one layer, in order."""

    n: int
    accuracy: str
    mean: float
    ratios: list[tuple[float, str]]
    same_bits: int

    def __str__(self) -> str:
        (least, slowest), (most, fastest) = self.ratios[0], self.ratios[-1]
        return (
            f"batch {self.n} {self.accuracy}: old over new {self.mean:.3f}, least {least:.3f} ({slowest}), "
            f"most {most:.3f} ({fastest}), same bits in {self.same_bits} of {len(self.ratios)}"
        )


def summary(document: results.Document) -> list[Summary]:
    """One for each class and batch."""
    found = []
    for n, accuracy in dict.fromkeys((row["n"], row["class"]) for row in document["rows"]):
        rows = [row for row in document["rows"] if (row["n"], row["class"]) == (n, accuracy)]
        ratios = sorted((row["ratio"], row["layer"]) for row in rows)
        mean = statistics.geometric_mean([ratio for ratio, _ in ratios])
        found.append(Summary(n, accuracy, mean, ratios, sum(row["same_bits"] for row in rows)))
    return found
