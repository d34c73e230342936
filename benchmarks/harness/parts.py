"""A suite by several processes on one GPU: each measures a part of it into a file of its own, in turns."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.harness import results, turns


def run(
    out: Path | str,
    head: results.Document,
    key: tuple[str, ...],
    workers: int,
    measure: Callable[[int, str], results.Document],
) -> results.Document:
    """measure(part, path): measures every workers-th item from `part` on, in a process that it starts, adds the rows to
    the file at `path`, which has what `out` has, and returns that file's content. Returns the content of `out`, which
    has the rows of all in the end, and those that a run left in its parts that was ended from outside."""
    path = Path(out)
    document = results.merge(path, head, key)
    for left in sorted(path.parent.glob(f"{path.stem}.*.json")):
        for row in results.merge(left, head, key)["rows"]:
            if "commit" not in row:
                results.put(document, row, key)
        left.unlink()
    held = {json.dumps(row) for row in document["rows"]}
    files = [path.with_suffix(f".{part}.json") for part in range(workers)]
    for file in files:
        results.write(file, document)
    with turns.sharing(), ThreadPoolExecutor(workers) as pool:
        done = list(pool.map(measure, range(workers), map(str, files)))
    for file, found in zip(files, done, strict=True):
        for row in found["rows"]:
            if json.dumps(row) not in held:
                results.put(document, row, key)
        for state in ("failed", "missing"):
            if state in found:
                document[state] = document.get(state, []) + found[state]
        document.setdefault("banned", {}).update(found.get("banned", {}))
        file.unlink()
    results.write(path, document)
    return document
