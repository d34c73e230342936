"""A suite by several processes on one GPU: each measures a part of it into a file of its own, in turns."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.harness import results, turns

PERIOD_S = 10.0  # how often the file of all gets what its parts have


def run(
    out: Path | str,
    head: results.Document,
    key: tuple[str, ...],
    workers: int,
    measure: Callable[[int, str], results.Document],
) -> results.Document:
    """measure(part, path): measures every workers-th item from `part` on, in a process that it starts, adds the rows to
    the file at `path`, which has what `out` has, and returns that file's content. Returns the content of `out`, which
    gets the rows of all every PERIOD_S seconds and in the end, and those that a run left in its parts that was ended
    from outside."""
    path = Path(out)
    document = results.merge(path, head, key)
    for left in sorted(path.parent.glob(f"{path.stem}.*.json")):
        _add(document, (row for row in results.merge(left, head, key)["rows"] if "commit" not in row), key)
        left.unlink()
    begun = list(document["rows"])
    held = {json.dumps(row) for row in begun}
    files = [path.with_suffix(f".{part}.json") for part in range(workers)]
    for file in files:
        results.write(file, document)

    def gather() -> None:
        document["rows"] = begun  # so that the order of the rows is not that of who was first
        for file in files:
            rows = json.loads(file.read_text())["rows"]
            _add(document, (row for row in rows if json.dumps(row) not in held), key)
        results.write(path, document)

    ended = threading.Event()

    def keep() -> None:
        while not ended.wait(PERIOD_S):
            gather()

    keeper = threading.Thread(target=keep, daemon=True)
    keeper.start()
    try:
        with turns.sharing(), ThreadPoolExecutor(workers) as pool:
            done = list(pool.map(measure, range(workers), map(str, files)))
    finally:
        ended.set()
        keeper.join()
    gather()
    for file, found in zip(files, done, strict=True):
        for state in ("failed", "missing"):
            if state in found:
                document[state] = document.get(state, []) + found[state]
        document.setdefault("banned", {}).update(found.get("banned", {}))
        file.unlink()
    results.write(path, document)
    return document


def _add(document: results.Document, rows: Iterable[results.Row], key: tuple[str, ...]) -> None:
    """As results.put for each of very many rows."""

    def of(row: results.Row) -> str:
        return json.dumps([row[name] for name in key])  # a value may be a pair

    found = {of(row): row for row in document["rows"]} | {of(row): row for row in rows}
    document["rows"] = list(found.values())
