"""The commands `megakernel`, `builds`, `stages` and `floors` of the benchmarks' command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fastconv.cli.support import (
    DeviceOption,
    JsonOption,
    Precision,
    PrecisionOption,
    device_named,
    fail,
    numbers,
    say,
    split,
)


def megakernel(
    parts: Annotated[str, typer.Option(help="layers, mapping, rivals, distribution.")] = "all",
    layers: Annotated[str | None, typer.Option(help="Of part layers; default all with C, K >= 128.")] = None,
    classes: Annotated[str, typer.Option(help="Accuracy classes.")] = "fp32,ieee",
    batch: Annotated[int, typer.Option(min=1)] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Times each contender runs.")] = 20,
    budget: Annotated[float, typer.Option(metavar="SECONDS", help="Nothing begins after.")] = 60.0,
    resume: Annotated[bool, typer.Option("--resume", help="Keep what the file has of this commit.")] = False,
    json_path: JsonOption = None,
) -> None:
    """winograd_megakernel against our own series, cuDNN's non-fused Winograd, and with other maps (GPU)."""
    import torch

    from benchmarks.studies import megakernel as study

    chosen = split(parts, "parts", list(study.PARTS))
    wanted = split(classes, "classes", [each.value for each in Precision])
    if not torch.cuda.is_available():
        raise fail("no CUDA GPU on this machine: nothing was measured")
    document = study.run(
        chosen, layers=layers, classes=wanted, batch=batch, rounds=rounds, budget_s=budget, out=json_path,
        resume=resume, report=say,
    )  # fmt: skip
    if not document["rows"]:
        raise fail("nothing was measured")


def builds(
    old: Annotated[Path, typer.Argument(help="Another checkout, with its library built in place.")],
    layers: Annotated[str | None, typer.Option(help="Some of the layers, with commas between; default all.")] = None,
    classes: Annotated[str, typer.Option(help="Accuracy classes; default all.")] = "",
    batch: Annotated[str, typer.Option(help="Batch sizes.")] = "64",
    blocks: Annotated[int, typer.Option(min=1, help="Turns of either build.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Calls in a turn.")] = 8,
    budget: Annotated[float | None, typer.Option(metavar="SECONDS", help="Begin no layer after.")] = None,
    old_commit: Annotated[str | None, typer.Option(help="Of the other checkout; default what git says.")] = None,
    device: DeviceOption = "auto",
    json_path: JsonOption = None,
) -> None:
    """The layer set by this build and by another checkout's, in turns: what a change of the code has cost."""
    from benchmarks.studies import builds as study
    from fastconv.models.compare import CLASS_DTYPE

    study.run(
        old.resolve(),
        split(classes, "classes", list(CLASS_DTYPE)) if classes else list(CLASS_DTYPE),
        numbers(batch, "batch"),
        layers.split(",") if layers else None,
        out=json_path,
        old_commit=old_commit,
        blocks=blocks,
        rounds=rounds,
        budget_s=budget,
        device=device_named(device),
        say=say,
    )


def stages(
    layers: Annotated[str | None, typer.Option(help="Some of the layers, with commas between; default all.")] = None,
    batch: Annotated[int, typer.Option(min=1)] = 64,
    precision: PrecisionOption = Precision.fp32,
    algorithm: Annotated[str, typer.Option(help="A staged Winograd algorithm, as winograd_f2.")] = "winograd_f4",
    layouts: Annotated[str, typer.Option(help="nchw, nhwc.")] = "nhwc",
    rounds: Annotated[int, typer.Option(min=1, help="Times each layer runs.")] = 10,
    json_path: JsonOption = None,
) -> None:
    """The stages of staged Winograd one by one: how close the transforms come to the speed of memory (GPU)."""
    import torch

    from benchmarks.studies import stages as study

    orders = split(layouts, "layouts", ["nchw", "nhwc"])
    if algorithm not in study.TILES:
        raise ValueError(f"algorithm is {algorithm!r}; expected one of {', '.join(study.TILES)}")
    if not torch.cuda.is_available():
        raise fail("no CUDA GPU on this machine: nothing was measured")
    study.run(
        layers, batch=batch, accuracy=precision.value, algorithm=algorithm, layouts=tuple(orders), rounds=rounds,
        out=json_path, report=say,
    )  # fmt: skip


def floors(
    folder: Annotated[Path, typer.Argument(help="Of results of one GPU.")] = Path("benchmarks/results/h100"),
) -> None:
    """What is not built, and what it could save at most: from committed rows and bytes, nothing is timed."""
    from benchmarks.studies import floors as study

    study.run(folder, say)
