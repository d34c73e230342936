"""The command `fastconv trace`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastconv.cli.support import (
    DeviceOption,
    JsonOption,
    Precision,
    PrecisionOption,
    device_named,
    say,
    write_json,
)

if TYPE_CHECKING:
    from fastconv import _C
    from fastconv.instrumented import Options
    from fastconv.models.layers import Layer
    from fastconv.trace import Run

MAPPED, SERIES = "task map", "kinds in series"


def trace(
    layer: Annotated[str, typer.Option(help="A layer of the set (fastconv bench layers): 3x3, stride 1.")] = "res2",
    batch: Annotated[int, typer.Option(min=1)] = 64,
    device: DeviceOption = "auto",
    precision: PrecisionOption = Precision.fp32,
    out: Annotated[Path | None, typer.Option(metavar="PATH", help="The trace, for ui.perfetto.dev.")] = None,
    figure: Annotated[Path | None, typer.Option(metavar="PATH", help="Tasks over time, before and after.")] = None,
    d_ig: Annotated[int | None, typer.Option(min=0, help="D_IG, in tasks; default as planned.")] = None,
    d_go: Annotated[int | None, typer.Option(min=0, help="D_GO, in tasks; default as planned.")] = None,
    m: Annotated[int | None, typer.Option(min=1, help="M; default as planned.")] = None,
    blocks: Annotated[int, typer.Option(min=0, help="GPU: of the grid; 0: all that fit.")] = 0,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Simulated: blocks or threads at the same time; default 132.")
    ] = None,
    group_tiles: Annotated[int | None, typer.Option(min=1, help="Simulated: t; default as planned.")] = None,
    filter_tasks: Annotated[bool, typer.Option("--filter-tasks", help="Simulated: filters in the map.")] = False,
    costs: Annotated[
        str | None,
        typer.Option(help="Simulated: microseconds of a filter, input, gemm, output task; default an even H200's."),
    ] = None,
    json_path: JsonOption = None,
) -> None:
    """What the tasks of winograd_megakernel do over time, in the order of its map and kind by kind: a trace to look at.

    Recorded by the kernel on a GPU; without one, or where something simulated is asked for, played through in simulated
    time.
    """
    from fastconv import trace as traces
    from fastconv.instrumented import Options
    from fastconv.models.layers import LAYERS

    known = {item.layer: item for item in LAYERS}
    if layer not in known:
        raise ValueError(f"layer is {layer!r}; expected one of {', '.join(known)}")
    asked = {"--workers": workers, "--group-tiles": group_tiles, "--filter-tasks": filter_tasks or None}
    simulated = [name for name, value in (asked | {"--costs": costs}).items() if value is not None]
    where = device_named("cpu" if device == "auto" and simulated else device)
    if where.type == "cuda" and simulated:
        raise ValueError(f"{', '.join(simulated)}: only of a simulated run; expected --device cpu, or without")
    if where.type == "cpu" and blocks:
        raise ValueError(f"blocks is {blocks}, but the run is simulated; expected --workers")
    if where.type == "cuda":
        options = Options(d_ig, d_go, m, blocks)
        task_map, runs, detail = _record(known[layer], batch, precision.value, where, options)
    else:
        shape = {"d_ig": d_ig, "d_go": d_go, "m": m, "group_tiles": group_tiles}
        task_map, runs, detail = _play(known[layer], batch, workers or 132, shape, filter_tasks, costs)
    say(
        f"{layer}, batch {batch}: {task_map.groups} groups, {len(task_map)} tasks (S_I {task_map.s_i}, "
        f"S_G {task_map.s_g}, S_O {task_map.s_o}, N_F {task_map.n_f}), V of {task_map.v_groups} and M of "
        f"{task_map.m_groups} groups in memory"
    )
    for name, run in runs.items():
        say(f"{name}: {run.us:.0f} us, busy {run.busy:.1%}, waiting {run.waiting:.1%}")
        for pool, title in enumerate(run.pools if len(run.pools) > 1 else ()):
            say(f"  {title}: " + ", ".join(f"{what} {share:.1%}" for what, share in run.of_pool(pool).items()))
        if run.overlap is not None:
            say(f"  {run.overlap:.1%} of the transforms' time beside GEMM tasks of the same multiprocessor")
    if "unrecorded_us" in detail:
        say(f"the launch takes {detail['unrecorded_us']:.1f} us, {detail['recorded_us']:.1f} us while recording")
        say(f"the clock's step is {detail['resolution_ns']} ns")
    if "no_series" in detail:
        say(f"not recorded: {SERIES}: {detail['no_series']}")
    if out is not None:
        traces.write_chrome(out, runs)
        say(f"written: {out}")
    if figure is not None:
        from fastconv.figures import save_figure

        save_figure(traces.draw([traces.panel(name, run) for name, run in runs.items()]), figure)
        say(f"written: {figure}")
    found = {name: run.summary() for name, run in runs.items()}
    write_json(json_path, {"layer": layer, "batch": batch, **detail, **task_map.arguments(), **found})


def _play(
    item: Layer, batch: int, workers: int, wanted: dict[str, int | None], filter_tasks: bool, costs: str | None
) -> tuple[_C.TaskMap, dict[str, Run], dict[str, Any]]:
    """The map of `workers` threads in simulated time."""
    from fastconv import _C
    from fastconv import trace as traces

    padding, stride = (item.padding, item.padding), (item.stride, item.stride)
    problem = _C.ConvProblem(batch, item.c, item.h, item.w, item.k, item.r, item.s, stride=stride, padding=padding)
    planned = _C.task_map(problem, _C.cpu_device(workers)).arguments()
    arguments = planned | {name: value for name, value in wanted.items() if value is not None}
    task_map = _C.TaskMap(**(arguments | ({"filter": (64, 64)} if filter_tasks else {})))
    each = traces.default_costs(task_map, workers)
    if costs is not None:
        try:
            each = tuple(float(cost) for cost in costs.split(","))  # type: ignore[assignment]
        except ValueError:
            raise ValueError(f"costs is {costs!r}; expected four numbers with commas between") from None
    runs = {
        SERIES: traces.play(traces.staged(task_map), workers, each),
        MAPPED: traces.play(traces.mapped(task_map), workers, each),
    }
    return task_map, runs, {"clock": "simulated", "workers": workers, "costs": each}


def _record(
    item: Layer, batch: int, precision: str, device: Any, options: Options
) -> tuple[_C.TaskMap, dict[str, Run], dict[str, Any]]:
    """Two launches on the GPU, with random data: in the order of the map, and kind by kind."""
    import torch

    from fastconv import trace as traces
    from fastconv.instrumented import random_kernel

    with torch.cuda.device(device):
        kernel = random_kernel(item, batch, precision, device)
        found = traces.record(kernel, options)
    titles = {"series": SERIES, "mapped": MAPPED}
    return kernel.task_map(options), {titles[name]: run for name, run in found.runs.items()}, found.detail
