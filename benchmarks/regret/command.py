"""The command `regret` of the benchmarks' command line."""

from __future__ import annotations

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
)


def regret(
    network: NetworkOption = "all",
    problems: Annotated[
        Path | None, typer.Option(help="A JSON list of problems, in place of the networks' convolutions.")
    ] = None,
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
    if problems is not None:
        chosen = [each for each in source.read(problems) if not passes or each.direction in passes]
    else:
        names = list(MAIN_NETWORKS) if network == "all" else split(network, "network", list(NETWORKS))
        size = batch or (CPU_BATCH if where.type == "cpu" else None)
        chosen = source.of_networks(names, size, image, passes or ["forward"])
    splits = split(split_name, "split", list(source.SPLITS)) if split_name else source.SPLITS
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
