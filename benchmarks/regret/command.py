"""The command `regret` of the benchmarks' command line."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fastconv.cli.support import (
    BatchOption,
    DeviceOption,
    ImageOption,
    JsonOption,
    NetworkOption,
    console,
    device_named,
    fail,
    say,
    split,
    write_json,
)


def regret(
    network: NetworkOption = "all",
    problems: Annotated[
        Path | None, typer.Option(help="A JSON list of problems, in place of the networks' convolutions.")
    ] = None,
    sample: Annotated[
        int | None, typer.Option(min=1, metavar="COUNT", help="So many of the corpus, at random, in their place.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the sample.")] = 0,
    split_name: Annotated[str, typer.Option("--split", help="Of the problems: fit, judge; default both.")] = "",
    direction: Annotated[str, typer.Option("--pass", help="forward, backward_weight, backward_input.")] = "",
    classes: Annotated[str, typer.Option(help="Accuracy classes; default all, on the CPU fp32.")] = "",
    layouts: Annotated[str, typer.Option(help="nchw, nhwc.")] = "nchw,nhwc",
    batch: BatchOption = None,
    image: ImageOption = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Times each contender runs.")] = None,
    budget: Annotated[float | None, typer.Option(metavar="SECONDS", help="Begin no problem after.")] = None,
    workers: Annotated[
        int, typer.Option(min=1, help="Processes that take turns on the GPU, and load their kernels together.")
    ] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Keep what the file has of this commit.")] = False,
    device: DeviceOption = "auto",
    json_path: JsonOption = None,
) -> None:
    """The choice of auto: its time over that of the best of all our algorithms and PyTorch's."""
    from benchmarks.regret import problems as source
    from benchmarks.regret import suite, summary
    from fastconv.demo import CPU_BATCH
    from fastconv.models import MAIN_NETWORKS, NETWORKS
    from fastconv.models.compare import CLASS_DTYPE

    where = device_named(device)
    passes = split(direction, "pass", list(source.PASSES)) if direction else []
    splits = split(split_name, "split", list(source.SPLITS)) if split_name else list(source.SPLITS)
    if sample is not None:
        if problems is not None:
            raise fail("--problems and --sample both name the problems; expected one of them")
        chosen = source.of_corpus(sample, seed, passes or ["forward"], splits)
    elif problems is not None:
        chosen = [each for each in source.read(problems) if not passes or each.direction in passes]
    else:
        names = list(MAIN_NETWORKS) if network == "all" else split(network, "network", list(NETWORKS))
        size = batch or (CPU_BATCH if where.type == "cpu" else None)
        chosen = source.of_networks(names, size, image, passes or ["forward"])
    document = suite.run(
        [each for each in chosen if each.split in splits],
        classes=split(classes, "classes", list(CLASS_DTYPE)) if classes else None,
        layouts=split(layouts, "layouts", ["nchw", "nhwc"]),
        rounds=rounds,
        budget_s=budget,
        resume=resume,
        workers=workers,
        device=where,
        out=json_path,
        report=say,
    )
    if document["rows"]:
        console.print(summary.table(document["rows"]))
    for text in document.get("missing", []):
        console.print(f"missing: {text}", markup=False, highlight=False)
    if not document["rows"]:
        raise fail("nothing was measured")
    if document.get("failed"):
        raise fail("; ".join(document["failed"]))


def fit(
    files: Annotated[list[Path], typer.Argument(help="Result files of `regret`, of one kind of device.")],
    algorithms: Annotated[str, typer.Option(help="Whose constants may move; default all.")] = "",
    folds: Annotated[int, typer.Option(min=0, help="Parts of the problems, each judged by a fit to the others.")] = 5,
    write: Annotated[bool, typer.Option("--write", help="Put the constants into csrc/core/fitted.def.")] = False,
    json_path: JsonOption = None,
) -> None:
    """Fit the cost models' constants to measured times, so that auto takes what is the fastest."""
    from benchmarks.harness import results
    from benchmarks.regret import fit as fitting
    from benchmarks.regret import summary
    from fastconv import _C

    known = list(dict.fromkeys(row["algorithm"] for row in _C.fitted()))
    documents = [results.read(path) for path in files]
    wanted = split(algorithms, "algorithms", known) if algorithms else []
    with fitting.restored():
        outcome = fitting.fit(documents, wanted, folds, say)
    for title, rows in (
        ("before", outcome.before), ("after, in sample but for split judge", outcome.after),
        ("by constants fitted without the problem", outcome.held_out),
    ):  # fmt: skip
        if rows:
            console.print(summary.table(rows, title))
    if outcome.left_out:
        console.print(f"{outcome.left_out} rows were left out: input gradients, or no time")
    for (algorithm, name), (before, after) in outcome.constants.items():
        console.print(f"{algorithm}.{name}: {before:g} -> {after:g}", highlight=False)
    for algorithm, name in outcome.idle:
        console.print(f"{algorithm}.{name}: matters in none of these rows", highlight=False)
    write_json(
        json_path, asdict(outcome) | {"constants": {".".join(name): pair for name, pair in outcome.constants.items()}}
    )
    if write:
        kind, values = fitting.kind_of(documents[0]), {name: pair[1] for name, pair in outcome.constants.items()}
        fitting.write(fitting.DEFINITION, kind, values)
        console.print(f"written: {fitting.DEFINITION}; build again", highlight=False)
