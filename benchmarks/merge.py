"""The command `merge`: the result files of several GPUs, or of several runs, of one commit as one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness import results
from benchmarks.harness.runs import has_all_rivals, is_disturbed, is_final
from fastconv.cli.support import console

HEAD = ("schema", "suite", *results.MACHINE, "commit", "measured_choices")  # in which all files agree
PROBLEM = ("layer", "n", *results.GEOMETRY, "class", "pass")
TIME_OVER = "time was over"  # how an entry of `missing` ends that another run may have measured


def identity(row: results.Row) -> str:
    """What a row is of: rows that agree in it are one. The algorithm is what was asked for in rows of networks, of
    soaks, of launches and of counters, elsewhere what was found."""
    from benchmarks.host import suite as host
    from benchmarks.networks import suite as networks
    from benchmarks.soaks import weights

    if "network" in row:
        names: Sequence[str] = networks.KEY
    elif "form" in row:
        names = host.KEY
    elif "write" in row:
        names = weights.ROW_KEY
    else:
        asked = ("algorithm",) if {"kernels", "variant", "launches"} & row.keys() else ()
        names = (*PROBLEM, "layout", "part", "variant", *asked)
    return json.dumps([row.get(name) for name in names])


def _subject(row: results.Row) -> str:
    """What an entry of `failed` calls what the row is of: what failed in one run another may have measured."""
    if "network" in row:
        return f"{row['network']} {row['class']}"
    return f"{row.get('layer')}, batch {row.get('n')}, {row.get('class')}"


def _worth(row: results.Row) -> tuple[bool, bool]:
    return row.get("us") is not None, has_all_rivals(row) and not is_disturbed(row)


def _rank(row: results.Row) -> tuple[bool, bool, bool]:
    return *_worth(row), is_final(row)


def _check_alike(
    path: Path, document: results.Document, first_path: Path, first: results.Document, names: Sequence[str]
) -> None:  # fmt: skip
    for name in names:
        if document.get(name) != first.get(name):
            raise ValueError(f"{path}: {name} is {document.get(name)!r}; expected {first.get(name)!r}, as {first_path}")


def joined(paths: Sequence[Path]) -> results.Document:
    """The rows of files of one suite, machine and commit. Of a row that several have, one with a time is kept, of those
    one that lacks nothing for want of time or memory, and the last of them. Raises ValueError naming the file that
    differs from the first, and in what."""
    first, *others = [results.read(path) for path in paths]
    rows = {identity(row): row for row in first["rows"]}
    document = {**first, "rows": []}
    for path, other in zip(paths[1:], others, strict=True):
        _check_alike(path, other, paths[0], first, HEAD)
        for row in other["rows"]:
            held = rows.get(identity(row))
            if held is None or _rank(row) >= _rank(held):
                rows[identity(row)] = row
        document["date"] = max(document["date"], other["date"])
        for state in ("failed", "missing", "done"):
            if state in other:
                document[state] = list(dict.fromkeys((*document.get(state, []), *other[state])))
        if "banned" in other:
            document["banned"] = {**document.get("banned", {}), **other["banned"]}
    document["rows"] = list(rows.values())
    if "missing" in document:
        document["missing"] = [text for text in document["missing"] if not text.endswith(TIME_OVER)]
    if "failed" in document:
        timed = set(map(_subject, (row for row in document["rows"] if row.get("us") is not None)))
        document["failed"] = [text for text in document["failed"] if text.partition(":")[0] not in timed]
    return document


def _suite(name: str) -> str:
    return name.partition(".")[0]


def with_older(document: results.Document, older: results.Document) -> results.Document:
    """The document, and rows of an older one of its suite that it has not, or only without a time, without a rival
    that was not ready in time, or disturbed; each of these says its commit, if that is another."""
    new = {identity(row): row for row in document["rows"]}
    kept = []
    for row in older["rows"]:
        name = identity(row)
        if name not in new or _worth(row) > _worth(new[name]):
            new.pop(name, None)
            kept.append({"commit": older["commit"], **row})
            if kept[-1]["commit"] == document["commit"]:
                del kept[-1]["commit"]
    return {**document, "rows": [*new.values(), *kept]}


def merge(folders: Sequence[Path], into: Path, keep_older: bool = False) -> dict[str, results.Document]:
    """Joins the files of equal names in the folders, those that an ended run has left of its workers (`suite.0.json`)
    too, and what `into` has of them; suite -> what was written there. keep_older: what `into` has may be of another
    commit, and is kept where nothing newer is. Raises ValueError as `joined`, before anything is written, or if there
    is no file."""
    found: dict[str, list[Path]] = {}
    for folder in (into, *folders):
        for name, path in results.files(folder).items():
            found.setdefault(_suite(name), []).append(path)
    named = {_suite(name) for folder in folders for name in results.files(folder)}
    if not named:
        raise ValueError(f"no result file in {', '.join(map(str, folders)) or 'no folder'}")
    documents = {}
    for suite in sorted(named):
        held = results.path_of(into, suite)
        newer = [path for path in found[suite] if path != held]
        documents[suite] = document = joined(newer if keep_older and newer else found[suite])
        if keep_older and held in found[suite]:
            older = results.read(held)
            _check_alike(held, older, newer[0], document, [name for name in HEAD if name != "commit"])
            is_older = older["commit"] != document["commit"]
            documents[suite] = with_older(document, older) if is_older else joined(found[suite])
    for suite, document in documents.items():
        results.write(results.path_of(into, suite), document)
    return documents


def command(
    folders: Annotated[list[Path], typer.Argument(help="Folders of result files.", exists=True, file_okay=False)],
    into: Annotated[Path, typer.Option(help="The folder that gets all rows; what it holds of them counts, too.")],
    keep_older: Annotated[
        bool,
        typer.Option("--keep-older", help="Keep rows of other commits there, which then say so, if none is newer."),
    ] = False,
) -> None:
    """Several folders of result files, of several GPUs of one kind say, as one; of one machine and commit."""
    for suite, document in merge(folders, into, keep_older).items():
        console.print(f"{results.path_of(into, suite)}: {len(document['rows'])} rows", highlight=False)
