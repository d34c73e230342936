"""The command `paper` of the benchmarks' command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.papers import NAMES
from fastconv.cli.support import DeviceOption, console, device_named, fail, numbers, say, split


def paper(
    name: Annotated[str, typer.Argument(help=f"The source: {', '.join(NAMES)}.")],
    parts: Annotated[str, typer.Option(help="Some of its experiments; default all.")] = "",
    classes: Annotated[str, typer.Option(help="Accuracy classes; default the experiment's.")] = "",
    batch: Annotated[str, typer.Option(help="Batch sizes; default the experiment's.")] = "",
    layers: Annotated[str | None, typer.Option(help="Some of the layers, by how they begin.")] = None,
    network: Annotated[str, typer.Option(help="Some of the networks.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Times each contender runs, at most.")] = 10,
    workers: Annotated[int, typer.Option(min=1, help="Processes: several prepare while one times.")] = 1,
    budget: Annotated[float | None, typer.Option(metavar="SECONDS", help="Begin nothing after.")] = None,
    compile_limit: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.0, help="What is not compiled by then is given up.")
    ] = 60.0,
    image: Annotated[int | None, typer.Option(min=32, help="Side of the networks' pictures.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep what the files have of this commit.")] = False,
    folder: Annotated[Path | None, typer.Option(help="Where the files go; default benchmarks/results/<gpu>.")] = None,
    device: DeviceOption = "auto",
) -> None:
    """A source's experiments (docs/papers), one after the other, into a file each."""
    from benchmarks import papers
    from fastconv.models import NETWORKS
    from fastconv.models.compare import CLASS_DTYPE

    options = papers.Options(
        device=str(device_named(device)),
        parts=parts.split(",") if parts else None,
        classes=split(classes, "classes", list(CLASS_DTYPE)) if classes else None,
        batches=numbers(batch, "batch") if batch else None,
        layers=layers,
        networks=split(network, "network", list(NETWORKS)) if network else None,
        rounds=rounds,
        workers=workers,
        budget_s=budget,
        compile_limit_s=compile_limit,
        image=image,
        resume=resume,
        folder=folder,
        report=say,
    )
    documents: dict[str, dict[str, Any]] = papers.run(name, options)
    wrong = []
    for part, document in documents.items():
        console.print(f"{part}: {len(document['rows'])} rows", highlight=False)
        wrong += [f"{part}: nothing was measured"] if not document["rows"] else []
        wrong += [f"{part}: {text}" for text in document.get("failed", [])]
    if wrong:
        raise fail("; ".join(wrong))
