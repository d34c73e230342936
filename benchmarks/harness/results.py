"""Result files, `benchmarks/results/<gpu>/<suite>.json`: what every row holds, reading, merging, writing."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from fastconv.environment import SCHEMA

Document = dict[str, Any]
Row = dict[str, Any]

MACHINE = ("gpu", "driver", "cuda", "torch", "cudnn")  # what a time depends on beside our own code
GEOMETRY = ("c", "h", "w", "k", "r", "s", "stride", "padding", "dilation", "groups")  # of a Layer, in its rows
CLASSES = ("ieee", "fp32", "tf32", "fp16", "bf16")
HEAD = {"schema": int, "suite": str, "gpu": str, "driver": str, "cuda": str, "torch": str, "cudnn": str}
HEAD |= {"commit": str, "date": str, "rows": list}
_MAYBE = (int, float, type(None))
LAYER_ROW: dict[str, Any] = {"layer": str, "stride": int, "padding": int, "dilation": int, "groups": int}
LAYER_ROW |= dict.fromkeys("nchwkrs", int)
LAYER_ROW |= {"class": str, "layout": str, "pass": str, "algorithm": str, "us": _MAYBE, "us_q25": _MAYBE}
LAYER_ROW |= {"us_q75": _MAYBE, "error": _MAYBE, "max_error": _MAYBE, "algorithms": dict, "peers": dict}
LAYER_ROW |= {"best_peer": (str, type(None)), "best_peer_us": _MAYBE, "peer_error": _MAYBE, "floor_us": _MAYBE}
NETWORK_ROW: dict[str, Any] = {"network": str, "batch": int, "class": str, "mode": str, "us": _MAYBE, "peers": dict}
NETWORK_ROW |= {"logits_error": _MAYBE, "top1_agreement": _MAYBE, "swapped": int, "total": int}
TRAINING_ROW: dict[str, Any] = {"network": str, "batch": int, "class": str, "mode": str, "us": _MAYBE, "peers": dict}
TRAINING_ROW |= {"kernels_us": _MAYBE, "groups": (dict, type(None)), "best_peer": (str, type(None))}
TRAINING_ROW |= dict.fromkeys(("best_peer_us", "peer_kernels_us", "peak_bytes", "peer_peak_bytes"), _MAYBE)
TRAINING_ROW |= {"loss_error": _MAYBE}
HOST_ROW: dict[str, Any] = {"call": str, "layer": str, "class": str, "form": str}
HOST_ROW |= dict.fromkeys(("us", "torch_us", "empty_operator_us"), _MAYBE)
_PAIR = (int, list)  # a number for both axes, or of height and width
REGRET_ROW: dict[str, Any] = {"layer": str, "stride": _PAIR, "padding": _PAIR, "dilation": _PAIR, "groups": int}
REGRET_ROW |= dict.fromkeys("nchwkrs", int) | {"class": str, "layout": str, "pass": str, "split": str}
REGRET_ROW |= {"us": _MAYBE, "algorithm": str, "best": (str, type(None)), "best_us": _MAYBE, "torch_us": _MAYBE}
REGRET_ROW |= {"algorithms": dict, "floor_us": _MAYBE}
WEIGHTS_ROW: dict[str, Any] = {"mode": str, "write": str, "class": str, "count": int, "failures": int, "old": int}
WEIGHTS_ROW |= {"error_over_bound": (int, float)}
BUILDS_ROW: dict[str, Any] = {"layer": str, "n": int, "class": str, "ratio": float, "old_us": float, "new_us": float}
BUILDS_ROW |= {"old_algorithm": str, "new_algorithm": str}
TRAINING_CLASSES = ("fp32", "tf32", "amp_fp16", "amp_bf16")


def _contract(suite: str, row: Row) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What a row of a suite holds, and the classes that it may be of."""
    match suite.removesuffix("_cpu"):
        case "training":
            return TRAINING_ROW, TRAINING_CLASSES
        case "host":
            return HOST_ROW, CLASSES
        case "regret":
            return REGRET_ROW, CLASSES
        case "builds":
            return BUILDS_ROW, CLASSES
        case "soak_weights":
            return WEIGHTS_ROW, CLASSES
    return (NETWORK_ROW if "network" in row else LAYER_ROW), CLASSES


def problems(document: Document) -> list[str]:
    """Everything that is wrong with a result file's content; empty if it keeps the contract. Extra keys are allowed."""
    found = _fields(document, HEAD, "head")
    if document.get("schema") != SCHEMA:
        found.append(f"head: schema is {document.get('schema')!r}; expected {SCHEMA}")
    for index, row in enumerate(document.get("rows") or []):
        where = f"row {index}"
        fields, classes = _contract(str(document.get("suite")), row)
        found += _fields(row, fields, where)
        if row.get("class") not in classes:
            found.append(f"{where}: class is {row.get('class')!r}; expected one of {classes}")
        for name in ("algorithms", "peers", "groups"):
            its = row.get(name)  # "groups" of a layer are a number
            for key, value in (its if isinstance(its, dict) else {}).items():
                if not isinstance(value, _MAYBE) or isinstance(value, bool):
                    found.append(f"{where}: {name}[{key!r}] is {value!r}; expected microseconds or null")
        best = row.get("best_peer")
        if best is not None and best not in (row.get("peers") or {}):
            found.append(f"{where}: best_peer is {best!r}, which is not among its peers")
    return found


def _fields(values: dict[str, Any], expected: dict[str, Any], where: str) -> list[str]:
    found = []
    for name, types in expected.items():
        if name not in values:
            found.append(f"{where}: {name} is missing")
        elif not isinstance(values[name], types) or (isinstance(values[name], bool)):
            found.append(f"{where}: {name} is {values[name]!r}")
    return found


def slug(gpu: str) -> str:
    """The folder of a device's results, without what names its memory: "NVIDIA H100 80GB HBM3" -> "h100"."""
    words = "".join(letter.lower() if letter.isalnum() else " " for letter in gpu).split()
    noise = re.compile(r"nvidia|r|tm|\d+gb|hbm\d*\w?")
    return "-".join(word for word in words if not noise.fullmatch(word)) or "unknown"


def path_of(folder: Path | str, suite: str) -> Path:
    """A suite is named as its file in the folder of a device: `layers`, `papers/<source>/<experiment>`."""
    return Path(folder) / f"{suite}.json"


def files(folder: Path | str) -> dict[str, Path]:
    """Suite -> its file, of all in the folder of a device; what its workers write is `<suite>.<part>`."""
    paths = sorted(path for pattern in ("*.json", "papers/*/*.json") for path in Path(folder).glob(pattern))
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in paths}


def default_path(head: Document, root: Path | str = "benchmarks/results") -> Path:
    """`benchmarks/results/<gpu>/<suite>.json` below the working directory; every CPU is `cpu`."""
    return path_of(Path(root) / (slug(head["gpu"]) if head["cuda"] else "cpu"), head["suite"])


def read(path: Path | str) -> Document:
    """Raises ValueError naming the file and what is wrong with it."""
    document = json.loads(Path(path).read_text())
    found = problems(document)
    if found:
        raise ValueError(f"{path}: {'; '.join(found[:5])}")
    return document


def write(path: Path | str, document: Document) -> None:
    """Writes through a temporary file: a killed run leaves the last complete file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n  ".join(json.dumps(_rounded(row)) for row in document["rows"])
    head = json.dumps({name: value for name, value in document.items() if name != "rows"}, indent=1)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(f'{head[:-2]},\n "rows": [\n  {rows}\n ]\n}}\n')
    os.replace(temporary, path)


def _rounded(value: Any) -> Any:
    """Five significant digits: more is noise, and makes every diff unreadable."""
    if isinstance(value, bool) or not isinstance(value, float | dict | list):
        return value
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value]


def merge(path: Path | str, head: Document, key: tuple[str, ...]) -> Document:
    """A document to add rows to: `head`, and the rows of the file at `path` if one machine and commit made both, with
    the commands of which these are all that there is to measure (`done`: benchmarks/everything.py).

    Rows are then replaced with `put`, which takes two rows for the same one if they agree in every name of `key`.
    """
    path = Path(path)
    document = {**head, "rows": []}
    if path.exists():
        old = json.loads(path.read_text())
        if all(old.get(name) == head.get(name) for name in ("schema", "suite", *MACHINE, "commit", "measured_choices")):
            document["rows"] = [row for row in old["rows"] if all(name in row for name in key)]
            document |= {"done": old["done"]} if "done" in old else {}
    return document


def own_rows(document: Document) -> list[Row]:
    """The rows that its commit has made: not those that another one's are kept of, which say so."""
    return [row for row in document["rows"] if "commit" not in row]


def put(document: Document, row: Row, key: tuple[str, ...]) -> None:
    """Adds `row`, in the place of the one that it replaces."""
    for index, old in enumerate(document["rows"]):
        if all(old[name] == row[name] for name in key):
            document["rows"][index] = row
            return
    document["rows"].append(row)
