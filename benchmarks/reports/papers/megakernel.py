"""The megakernel's own experiments: the series of all layers, by batch, and the networks with exchanged 3x3 layers."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.harness.results import CLASSES, Document, Row
from benchmarks.layers.sets import FFMA_FLOPS, TENSOR_FLOPS, bandwidth_of
from benchmarks.papers import megakernel_model as model
from benchmarks.reports import common
from benchmarks.reports import megakernel as study
from benchmarks.reports.networks import TITLES, speedup_of
from benchmarks.reports.papers import counters
from benchmarks.reports.papers.megakernel_plots import BATCH, contenders, figures, of_batch, resnet2_figures
from benchmarks.reports.papers.megakernel_said import SENTENCES
from benchmarks.reports.papers.shared import NOTHING, File, bytes_of, of_class, rates, without_empty
from benchmarks.studies.megakernel import FILTER_FORMS, MIN_CHANNELS, SERIES
from fastconv.models.layers import LAYERS

NAME = "megakernel"
__all__ = ["BATCH", "NAME", "SENTENCES", "TABLES", "figures", "of_batch", "resnet2_figures", "said"]


def layers(document: Document, gpu: str, accuracy: str) -> str:
    """All layers at the source's batch; docs/results-megakernel.md has the same of the wide ones."""
    its = of_batch(document, BATCH)
    if not study.rows_of(its, "layers", accuracy):
        return NOTHING
    image = _image(gpu, f"layers_{accuracy}", f"Layers, class {accuracy}")
    return f"{image}\n\n{study.layer_table(its, accuracy)}"


def batches(document: Document, gpu: str, accuracy: str) -> str:
    """A row per batch: geometric means of the ratios, and how many layers the mapping makes faster."""
    header = ["batch", "layers", *(f"over {label}" for label, _, _ in study.RATIOS), "over PyTorch"]
    header += ["faster than in series on"]
    lines = []
    for n in sorted({row["n"] for row in study.rows_of(document, "layers", accuracy)}):
        rows = study.rows_of(of_batch(document, n), "layers", accuracy)
        ratios = (*(ratio for _, ratio, _ in study.RATIOS), study.over_torch)
        means = [common.times(common.mean(map(ratio, rows))) for ratio in ratios]
        gains = [gain for row in rows if (gain := study.over_series(row))]
        lines.append([str(n), str(len(rows)), *means, f"{sum(gain > 1 for gain in gains)} of {len(gains)}"])
    return common.markdown_table(header, lines) if lines else NOTHING


def mapping(document: Document, gpu: str, accuracy: str) -> str:
    """Microseconds for each value of D_IG, D_GO and M, the others as planned."""
    if not study.rows_of(document, "mapping", accuracy):
        return NOTHING
    images = [_image(gpu, f"{name}_{accuracy}", f"{name}, class {accuracy}") for name in ("distances", "m")]
    return "\n\n".join([*images, study.mapping_table(document, accuracy)])


def tasks(document: Document, gpu: str, accuracy: str) -> str:
    """How many tasks of each kind run at a time: kind by kind, and as mapped."""
    if not study.rows_of(document, "distribution", accuracy):
        return NOTHING
    image = _image(gpu, f"tasks_{accuracy}", f"Tasks, class {accuracy}")
    return f"{image}\n\n{without_empty(study.tasks_table(document, accuracy))}"


def _image(gpu: str, figure: str, text: str) -> str:
    return f"![{text}](../figures/{gpu}_paper_megakernel_{figure}.svg)"


def stages(document: Document, gpu: str) -> str:
    """A row per layer: FLOP per byte of each stage in class `ieee`, in bold where memory bounds it."""
    ridge = FFMA_FLOPS / bandwidth_of(gpu)
    header = ["layer", "C->K @HxW", "GFLOP of the products", *("filter", "input", "gemm", "output")]
    lines = []
    for layer in LAYERS:
        its = model.stages(layer, BATCH)
        line = [layer.layer, f"{layer.c}->{layer.k} @{layer.h}x{layer.w}", f"{its['gemm'].flops / 1e9:.1f}"]
        for stage in its.values():
            shown = f"{stage.intensity:.2f}"
            line.append(shown if stage.intensity >= ridge else f"**{shown}**")
        lines.append(line)
    return f"{common.markdown_table(header, lines)}\n\n{rates(gpu)}"


def _hidden(row: Row, gpu: str) -> tuple[float, float, float | None, float]:
    """Microseconds by (8), by (9), of the tasks in series, and of the megakernel."""
    layer = common.layer_of(row)
    predicted = model.predicted(layer, row["n"], bandwidth_of(gpu))
    return predicted.series, predicted.mixed, row["algorithms"].get(SERIES), row["us"]


def hidden(document: Document, gpu: str) -> str:
    """A row per layer in class `ieee`: what the source's model predicts of both orders, and what they take."""
    header = ["layer", "in series: (8) us", "measured us", "mixed: (9) us", "measured us", "hidden by the model us"]
    header += ["measured us", "gain by the model", "measured"]
    lines, gains = [], []
    for row in study.rows_of(of_batch(document, BATCH), "layers", "ieee"):
        series, mixed, series_us, us = _hidden(row, gpu)
        line = [row["layer"], *map(common.us, (series, series_us, mixed, us, series - mixed))]
        if series_us is None:
            lines.append([*line, "-", common.times(series / mixed), "-"])
            continue
        gains.append((series / mixed, series_us / us))
        lines.append([*line, f"{series_us - us:.1f}", *map(common.times, gains[-1])])
    if not gains:
        return NOTHING
    means = [common.times(common.mean(its)) for its in zip(*gains, strict=True)]
    return common.markdown_table(header, [*lines, ["geometric mean", *[""] * 6, *means]])


def ceilings(document: Document, gpu: str) -> str:
    """A row per layer: what the model lets the mapping gain in class `ieee`, in `fp32`, there with U, V and M in half
    types, and with V and M on the chip; beside it what is measured in `fp32`."""
    header = ["layer", "C->K @HxW", "`ieee`", "`fp32`", "`fp32`, V and M in half", "`fp32`, V and M on the chip"]
    header += ["measured, `fp32`: over its series", "over `winograd_f4`"]
    rows = {row["layer"]: row for row in study.rows_of(of_batch(document, BATCH), "layers", "fp32")}
    lines, columns = [], []
    for layer in LAYERS:
        own = model.predicted(layer, BATCH, bandwidth_of(gpu))
        tensor, half = (
            model.predicted(layer, BATCH, bandwidth_of(gpu), products=TENSOR_FLOPS / 3, stored=stored)
            for stored in (model.ELEMENT, model.ELEMENT // 2)
        )
        row = rows.get(layer.layer)
        measured = [ratio(row) if row else None for ratio in (study.over_series, study.over_staged)]
        gains = [round(its.series / its.mixed, 6) for its in (own, tensor, half)]  # 1 is no loss
        columns.append([*gains, tensor.series / tensor.on_chip, *measured])
        lines.append([layer.layer, f"{layer.c}->{layer.k} @{layer.h}x{layer.w}", *map(common.times, columns[-1])])
    means = [common.times(common.mean(column)) for column in zip(*columns, strict=True)]
    return common.markdown_table(header, [*lines, ["geometric mean", f"{len(LAYERS)} layers", *means]])


def fastest(document: Document, gpu: str) -> str:
    """A row per class and parameter of the map: by channels, its fastest value, and what that gains over the least."""
    lines, channels = [], sorted({row["c"] for row in study.rows_of(document, "mapping")})
    for accuracy in CLASSES:
        for name, title in study.SWEPT.items():
            swept = {rows[0]["c"]: rows for rows in study._swept(document, accuracy, name).values()}
            cells = []
            for rows in map(swept.get, channels):
                best = min(rows, key=lambda row: row["us"]) if rows else None
                cells.append(f"{best[name]}, {common.times(rows[0]['us'] / best['us'])}" if rows and best else "-")
            lines += [[f"`{accuracy}`", title, *cells]] if swept else []
    header = ["class", "parameter", *(f"{c} channels" for c in channels)]
    return common.markdown_table(header, lines) if lines else NOTHING


def best_maps(document: Document, gpu: str) -> str:
    """A row per swept layer and class: as planned, the fastest map of the sweep, `winograd_f4`."""
    header = ["layer", "class", "as planned us", "fastest map", "us", "`winograd_f4` us", "fastest over `winograd_f4`"]
    lines = []
    for accuracy in CLASSES:
        found: dict[str, list[Row]] = {}
        for row in study.rows_of(document, "mapping", accuracy):
            found.setdefault(row["layer"], []).append(row)
        for layer, rows in found.items():
            best = min(rows, key=lambda row: row["us"])
            planned = next((row["us"] for row in rows if row["variant"] == "planned"), None)
            line = [
                layer,
                f"`{accuracy}`",
                common.us(planned),
                best["variant"].replace("=", " = "),
                common.us(best["us"]),
            ]
            lines.append([*line, common.us(best["algorithms"][study.STAGED]), common.times(study.over_staged(best))])
    return common.markdown_table(header, lines) if lines else NOTHING


def gains_of(document: Document, gpu: str, accuracy: str) -> str:
    """The figure of `plot_gains`."""
    if not study.rows_of(document, "layers", accuracy):
        return NOTHING
    return _image(gpu, f"gains_{accuracy}", f"Gain of the mapping, class {accuracy}")


def _peer_groups(row: Row) -> dict[str, float]:
    return next(iter(row.get("peer_groups", {}).values()), {})


def exchanged(row: Row) -> tuple[float | None, float | None]:
    """Microseconds of the exchanged layers: the megakernel's, and PyTorch's, whose other convolutions are the same."""
    own, all_of_them, theirs = row.get("own_us"), row.get("layers_us"), _peer_groups(row).get("convolution")
    if own is None or all_of_them is None or theirs is None:
        return own, None
    return own, theirs - (all_of_them - own)


def networks(document: Document, gpu: str) -> str:
    """A row per network and class: the whole, and the exchanged layers alone."""
    header = ["network", "batch", "class", "exchanged", "ours ms", "PyTorch ms", "gain", "3x3 layers: ours ms"]
    header += ["PyTorch ms", "gain", "error of logits", "PyTorch's"]
    lines: list[list[str]] = []
    for accuracy in CLASSES:
        for row in of_class(document, accuracy):
            name: str = row["network"]
            own, theirs = exchanged(row)
            line = [TITLES.get(name, name), str(row["batch"]), f"`{accuracy}`"]
            line += [f"{row['swapped']} of {row['total']}", common.ms(row["us"]), common.ms(row["best_peer_us"])]
            line += [common.times(speedup_of(row["us"], row["best_peer_us"])), common.ms(own), common.ms(theirs)]
            line += [common.times(speedup_of(own, theirs)), common.scientific(row["logits_error"])]
            lines.append([*line, common.scientific(row.get("peer_error"))])
    return common.markdown_table(header, lines)


def filters(document: Document, gpu: str) -> str:
    """A row per layer and batch: U made beforehand, by a kernel of its own in each call, and by tasks."""
    header = ["layer", "batch", *FILTER_FORMS, "tasks over packing in each call", "error"]
    found = study.rows_of(document, "filters", "ieee")
    if not found:
        return NOTHING
    lines, gains = [], []
    for row in found:
        beforehand, packing, tasks = (row["algorithms"].get(name) for name in FILTER_FORMS)
        gains.append(speedup_of(tasks, packing))
        times = [common.us(us) for us in (beforehand, packing, tasks)]
        lines.append([row["layer"], str(row["n"]), *times, common.times(gains[-1]), common.scientific(row["error"])])
    means = [common.times(common.mean([gain for gain in gains if gain]))]
    return common.markdown_table(header, [*lines, ["geometric mean", "", "", "", "", *means, ""]])


def resnet2(document: Document, gpu: str, accuracy: str) -> str:
    """A row per contender, the fastest first; ours in its faster layout. Whoever has no time says why in the file."""
    found = contenders(document, accuracy)
    if not found:
        return NOTHING
    own = next((us for name, us, _ in found if name == f"ours: `{study.NAME}`"), None)
    lines = [
        [name, common.us(us), common.times(us / own) if own else "-", common.scientific(error)]
        for name, us, error in found
    ]
    table = common.markdown_table(["contender", "us", "the megakernel over it", "error"], lines)
    kept = [
        f"`{row['algorithm']}` in {row['layout'].upper()} {bytes_of(row)}"
        + (f" ({common.us(row['us_with_packing'])} us with packing)" if row.get("us_with_packing") else "")
        for row in of_class(document, accuracy)
        if row.get("workspace_bytes") is not None
    ]
    image = f"![2_x, class {accuracy}](../figures/{gpu}_paper_megakernel_resnet2_{accuracy}.svg)"
    memory = [f"Workspace and packed filters, MiB, of our fastest: {'; '.join(kept)}."] if kept else []
    return "\n\n".join([image, table, *memory])


TABLES: dict[str, tuple[str, Callable[..., str]]] = {
    "layers": ("papers/megakernel/layers", layers),
    "batches": ("papers/megakernel/layers", batches),
    "gains": ("papers/megakernel/layers", gains_of),
    "mapping": ("papers/megakernel/layers", mapping),
    "tasks": ("papers/megakernel/layers", tasks),
    "stages": ("papers/megakernel/layers", stages),
    "hidden": ("papers/megakernel/layers", hidden),
    "ceilings": ("papers/megakernel/layers", ceilings),
    "fastest": ("papers/megakernel/layers", fastest),
    "best_maps": ("papers/megakernel/layers", best_maps),
    "filters": ("papers/megakernel/layers", filters),
    "counters": ("papers/megakernel/counters", counters.table),
    "resnet2": ("papers/megakernel/resnet2", resnet2),
    "networks": ("papers/megakernel/networks", networks),
}


def _narrow(rows: list[Row]) -> str:
    """The same on those with at least 128 channels and filters alone: the source's best cases are the others."""
    wide = [row for row in rows if min(row["c"], row["k"]) >= MIN_CHANNELS]
    gain = common.mean(map(study.over_series, wide))
    return "" if gain is None or len(wide) == len(rows) else f" ({gain:.2f} on the {len(wide)} wide ones)"


def _alone(document: Document, accuracy: str) -> str:
    """At batch 1, where a launch has few tiles: over the same tasks in series, and over our staged kernels."""
    rows = study.rows_of(of_batch(document, 1), "layers", accuracy)
    series, staged = (common.mean(map(ratio, rows)) for ratio in (study.over_series, study.over_staged))
    if not series or not staged:
        return ""
    return f", at batch 1 {series:.2f} times its series and {staged:.2f} times `winograd_f4`"


def said(file: File) -> str:
    """What holds of the claim: 1.25 over its own kernels in series, 1.13 over the best of cuDNN's Winograd."""
    document = file("papers/megakernel/layers") or {"rows": []}
    parts = []
    for accuracy in ("ieee", "fp32"):
        rows = study.rows_of(of_batch(document, BATCH), "layers", accuracy)
        ratios = [common.mean(map(ratio, rows)) for ratio in (study.over_series, study.over_cudnn)]
        if ratios[0]:
            text = f"the mapping is worth {ratios[0]:.2f} times over the same tasks in series on {len(rows)} layers"
            cudnn = (
                "" if ratios[1] is None else f", and the megakernel {ratios[1]:.2f} times cuDNN's non-fused Winograd"
            )
            parts.append(f"in class `{accuracy}` {text}{_narrow(rows)}{cudnn}{_alone(document, accuracy)}")
    gains = [
        (row["network"], gain)
        for row in (file("papers/megakernel/networks") or {"rows": []})["rows"]
        if row["class"] == "ieee" and (gain := speedup_of(*exchanged(row)))
    ]
    if gains:
        shown = ", ".join(f"{TITLES.get(name, name)} {gain:.2f}" for name, gain in gains)
        parts.append(f"the 3x3 layers of whole networks in class `ieee` run {shown} times as fast as PyTorch's")
    if not parts:
        return NOTHING
    return f"The source: 1.25 over cuDNN's non-fused Winograd. Here {'; '.join(parts)}."
