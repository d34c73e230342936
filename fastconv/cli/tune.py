"""The command `fastconv tune`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastconv.cli.support import (
    BatchOption,
    DeviceOption,
    ImageOption,
    JsonOption,
    MaxErrorOption,
    MaxWorkspaceOption,
    NetworkOption,
    console,
    device_named,
    fail,
    split,
    write_json,
)

if TYPE_CHECKING:
    from fastconv.tuning import Convolution, TuneRow

_BENCHMARK = True  # as in `fastconv bench`: PyTorch's convolutions with cudnn.benchmark=True


def tune(
    network: NetworkOption = "all",
    layer_set: Annotated[
        str | None, typer.Option("--set", help="Not networks but a set of `bench layers`: layers, pointwise, ...")
    ] = None,
    batch: BatchOption = None,
    image: ImageOption = None,
    classes: Annotated[str, typer.Option(help="Accuracy classes.")] = "fp32",
    layouts: Annotated[str, typer.Option(help="nchw, nhwc; default nhwc, on the CPU nchw.")] = "",
    passes: Annotated[
        str, typer.Option(help="forward, backward_input, backward_weight, or all: what training runs, too.")
    ] = "forward",
    rounds: Annotated[int, typer.Option(min=1, help="Times each candidate runs.")] = 20,
    max_error: MaxErrorOption = None,
    max_workspace: MaxWorkspaceOption = None,
    clear: Annotated[bool, typer.Option("--clear", help="Only forget what was measured on this device.")] = False,
    device: DeviceOption = "auto",
    json_path: JsonOption = None,
) -> None:
    """Measure which algorithm is the fastest on this device; algorithm="auto" takes it from then on.

    For the convolutions of whole networks, or of a layer set. For a model of your own: fastconv.tune(model, input).
    """
    from fastconv import measured, selection, settings, tuning
    from fastconv.models import MAIN_NETWORKS, NETWORKS
    from fastconv.models.compare import CLASS_DTYPE

    where = device_named(device)
    file = measured.path()
    if clear:
        name = measured.device_name(where)
        count = measured.forget(name)
        console.print(f"{count} choices of {name} forgotten ({file or 'no file'})", markup=False, highlight=False)
        write_json(json_path, {"device": name, "forgotten": count, "path": None if file is None else str(file)})
        return
    on_gpu = where.type == "cuda"
    orders = split(layouts, "layouts", ["nchw", "nhwc"]) if layouts else ["nhwc" if on_gpu else "nchw"]
    names = list(MAIN_NETWORKS) if network == "all" else split(network, "network", list(NETWORKS))
    if layer_set is not None and network != "all":
        raise ValueError(f"network is {network!r} beside --set {layer_set}; expected one of the two")
    asked = split(passes, "passes", list(selection.PASSES))
    measured.require_writable()
    found: Counter[Convolution] = Counter()
    for accuracy in split(classes, "classes", list(CLASS_DTYPE)):
        for order in orders:
            if layer_set is not None:
                layers = _of_layers(layer_set, batch or (64 if on_gpu else 1), accuracy, order, where)
                found.update(layer.in_pass(pass_) for layer in layers for pass_ in asked)
                continue
            for name in names:
                with console.status(f"{name}: its convolutions in class {accuracy}, {order}"):
                    found.update(_of_network(name, batch, image, accuracy, order, where, asked))
    found = tuning.limited(found, settings.resolve_limits(max_error, max_workspace, "torch"))
    report = tuning.measure(found, rounds, _say)
    console.print(str(report), markup=False, highlight=False, soft_wrap=True)
    write_json(json_path, json.loads(report.to_json()))
    if report.failed:
        raise fail(f"{len(report.failed)} of {len(report.rows)} problems could not be measured")


def _say(row: TuneRow, done: int, total: int) -> None:
    times = f"{row.algorithm} {row.us[row.algorithm]:.1f} us" if row.algorithm else "FAILED"
    if row.changed and row.gain is not None:
        times += f", {row.gain:.2f} times as fast as {row.planned}"
    console.print(f"{done}/{total} {row}: {times}", markup=False, highlight=False, soft_wrap=True)


def _of_network(
    name: str, batch: int | None, image: int | None, accuracy: str, order: str, device: Any, passes: Sequence[str]
) -> Counter[Convolution]:
    import torch

    import fastconv
    from fastconv import tuning
    from fastconv.demo import CPU_BATCH
    from fastconv.models import build, network
    from fastconv.models.compare import CLASS_DTYPE, precision_of, pytorch_class

    entry = network(name, image)
    batch = batch or (entry.batch if device.type == "cuda" else CPU_BATCH)
    to: dict[str, Any] = {"device": device, "dtype": CLASS_DTYPE[accuracy], "memory_format": _format(order)}
    model = build(name, calibrate=False).to(**to)
    fastconv.swap_(model, precision=precision_of(accuracy))
    side = image or entry.image
    with pytorch_class(accuracy, benchmark=_BENCHMARK):
        return tuning.record(model, torch.randn(batch, 3, side, side).to(**to), passes=passes)


def _of_layers(layer_set: str, batch: int, accuracy: str, order: str, device: Any) -> Sequence[Convolution]:
    from fastconv.models import layers
    from fastconv.models.compare import CLASS_DTYPE, precision_of, pytorch_class
    from fastconv.tuning import Convolution

    with pytorch_class(accuracy, benchmark=_BENCHMARK):
        return [
            Convolution(
                device, CLASS_DTYPE[accuracy], (batch, item.c, item.h, item.w),
                (item.k, item.c // item.groups, item.r, item.s), (item.stride,) * 2, (item.padding,) * 2,
                (item.dilation,) * 2, item.groups, precision_of(accuracy) or "fp32", _format(order), _format(order),
            )
            for item in layers.select(None, layer_set)
        ]  # fmt: skip


def _format(order: str) -> Any:
    import torch

    return torch.channels_last if order == "nhwc" else torch.contiguous_format
