"""Tables and plots of the layer suites."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness.results import CLASSES, Document, Row
from benchmarks.layers.sets import suite_of
from benchmarks.layers.suite import is_wrong, ratio
from benchmarks.reports import common
from fastconv.figures import new_figure, save_figure
from fastconv.models import layers as known

REFUSED = re.compile(r"error (\S+) is beyond the class")  # a note of benchmarks.layers.group


def rows_of(document: Document, accuracy: str, n: int, layout: str = "nhwc") -> list[Row]:
    rows = [row for row in document["rows"] if row["class"] == accuracy and row["n"] == n]
    layouts = {row["layout"] for row in rows}
    shown = layout if layout in layouts else min(layouts, default="")
    return [row for row in rows if row["layout"] == shown]


def is_refused(row: Row, peer: str) -> bool:
    """Whether a peer of the row is no rival, since its error is beyond the class."""
    return REFUSED.search(row.get("notes", {}).get(peer, "")) is not None


def _error_ratio(row: Row) -> float | None:
    return row["error"] / row["peer_error"] if row["error"] is not None and row["peer_error"] else None


def over_tf32(document: Document, n: int) -> dict[str, float]:
    """Of each layer: how many times faster class fp32 is than the fastest TF32 of the same layer."""
    theirs = {row["layer"]: row["best_peer_us"] for row in rows_of(document, "tf32", n)}
    ours = {row["layer"]: row["us"] for row in rows_of(document, "fp32", n) if not is_wrong(row)}
    return {layer: theirs[layer] / us for layer, us in ours.items() if us and theirs.get(layer)}


def layer_table(document: Document, accuracy: str, n: int) -> str:
    """One row per layer: ours, the fastest peer, the ratio, both errors, the floor; then the means over C >= 64."""
    header = [
        "layer",
        "C->K @HxW",
        "ours us",
        "algorithm",
        "best peer us",
        "peer",
        "speedup",
        "error",
        "error / peer's",
    ]
    header += ["floor us"]
    rows = rows_of(document, accuracy, n)
    against = over_tf32(document, n) if accuracy == "fp32" else {}
    if against:
        header.append("speedup over TF32")
    packing = any(row.get("us_with_packing") for row in rows)
    header += ["us with packing", "speedup with packing"] if packing else []
    lines = [
        [
            row["layer"],
            f"{row['c']}->{row['k']} @{row['h']}x{row['w']}",
            common.us(row["us"]),
            _algorithm(row),
            common.us(row["best_peer_us"]),
            f"`{row['best_peer']}`" if row["best_peer"] else "-",
            common.times(ratio(row)),
            common.scientific(row["error"]),
            "-" if _error_ratio(row) is None else f"{_error_ratio(row):.2f}",
            common.us(common.floor_of(row, document)),
            *([common.times(against.get(row["layer"]))] if against else []),
            *([common.us(row.get("us_with_packing")), common.times(_with_packing(row))] if packing else []),
        ]
        for row in rows
    ]
    wide = [row for row in rows if row["c"] >= 64]
    error = common.mean(_error_ratio(row) for row in wide)
    mean = ["geometric mean", "C >= 64", "", "", "", "", common.times(common.mean(ratio(row) for row in wide)), ""]
    mean += ["-" if error is None else f"{error:.2f}", ""]
    mean += [common.times(common.mean(against.get(row["layer"]) for row in wide))] if against else []
    lines.append(mean + (["", common.times(common.mean(_with_packing(row) for row in wide))] if packing else []))
    return "\n\n".join(
        [common.markdown_table(header, lines), _losses(rows), *_caveats(rows), *common.other_commits(document, rows)]
    )


def nchw_table(document: Document) -> str:
    """A row per class and batch of NCHW in and out: times faster than PyTorch's in NCHW, by its search or among all of
    cuDNN's plans, and where slower by more than 3 %."""
    lines = []
    kinds = {(row["class"], row["n"]) for row in document["rows"] if row["layout"] == "nchw"}
    for accuracy, n in sorted(kinds, key=lambda kind: (CLASSES.index(kind[0]), -kind[1])):
        found = {}
        for row in rows_of(document, accuracy, n, "nchw"):
            theirs = [us for name in ("torch_nchw", "torch_nchw_all") if (us := row["peers"].get(name))]
            if row["us"] and theirs:
                found[row["layer"]] = min(theirs) / row["us"]
        in_order = sorted(found, key=lambda name: found[name])
        slower = ", ".join(f"{name} {found[name]:.2f}" for name in in_order if found[name] < 0.97)
        numbers = [common.times(common.mean(found.values())), str(len(found)), slower or "-"]
        lines.append([f"`{accuracy}`", str(n), *numbers])
    header = ["class", "batch", "over PyTorch's NCHW", "layers", "slower by more than 3 %"]
    return "\n\n".join([common.markdown_table(header, lines), *common.other_commits(document, document["rows"])])


def _with_packing(row: Row) -> float | None:
    """Times faster than the best peer where the filter is packed in every call."""
    us = row.get("us_with_packing")
    return row["best_peer_us"] / us if us and row["best_peer_us"] else None


def _algorithm(row: Row) -> str:
    """The algorithm timed; said so where it failed, or where it is not what `auto` takes."""
    text = f"`{row['algorithm']}`"
    if row["us"] is None or is_wrong(row):
        return f"{text} ({'failed' if row['us'] is None else '**wrong**'})"
    return text if row.get("auto", row["algorithm"]) == row["algorithm"] else f"{text} (`auto`: `{row['auto']}`)"


def _losses(rows: Sequence[Row]) -> str:
    lost = [(row, ratio(row)) for row in rows]
    names = [f"{row['layer']} ({value:.2f}x, `{row['algorithm']}`)" for row, value in lost if value and value < 1]
    failed = [row["layer"] for row in rows if row["us"] is None]
    text = f"Slower than the best peer: {', '.join(names) or 'none'}."
    wrong = [row["layer"] for row in rows if is_wrong(row)]
    text += f" Failed: {', '.join(failed)}." if failed else ""
    return text + (f" Wrong: {', '.join(wrong)}." if wrong else "")


def _caveats(rows: Sequence[Row]) -> list[str]:
    """What a reader of the ratios must know: times of too few rounds, and rivals that were refused for their error."""
    said = []
    empty = [row["timer_us"] for row in rows if row.get("timer_us")]
    if empty and rows[0]["n"] == 1:
        replayed = "the replay of a CUDA graph: {} us for one that does next to nothing"
        called = "a call behind a flush of the caches: {} us for one that does nothing"
        what = replayed if rows[0]["floor_us"] is not None else called  # a CPU has no floor
        said.append(f"Every time, ours and the peers', holds {what.format(f'{statistics.median(empty):.1f}')}.")
    few = [row["layer"] for row in rows if {row["algorithm"], row["best_peer"]} & set(row.get("few_rounds", []))]
    if few:
        said.append(f"Of fewer than 20 rounds: {'all' if len(few) == len(rows) else ', '.join(few)}.")
    refused: dict[str, list[str]] = {}
    for row in rows:
        for name, text in row.get("notes", {}).items():
            if found := REFUSED.search(text):
                us = row["peers"].get(name)
                seen = found[1] if us is None else f"{found[1]}, {us:.0f} us"
                refused.setdefault(f"`{name}`", []).append(f"{row['layer']} ({seen})")
    if refused:
        its = "; ".join(f"{name} on {', '.join(layers)}" for name, layers in refused.items())
        said.append(f"No rival, since its error is beyond the class: {its}.")
    return said


def layer_summary(document: Document) -> str:
    """A row per class and batch: geometric means over C >= 64, worst layer, number of losses, error."""
    header = ["class", "batch", "speedup, C >= 64", "speedup, all", "worst layer", "slower than the best peer"]
    header += ["error / peer's", "worst error / peer's"]
    lines = []
    for accuracy in CLASSES:
        for n in sorted({row["n"] for row in document["rows"] if row["class"] == accuracy}, reverse=True):
            rows = rows_of(document, accuracy, n)
            pairs = [(value, row["layer"]) for row in rows if (value := ratio(row)) is not None]
            errors = [value for row in rows if (value := _error_ratio(row)) is not None]
            worst = min(pairs, default=None)
            lines.append(
                [
                    f"`{accuracy}`",
                    str(n),
                    common.times(common.mean(ratio(row) for row in rows if row["c"] >= 64)),
                    common.times(common.mean(value for value, _ in pairs)),
                    "-" if worst is None else f"{worst[1]} {common.times(worst[0])}",
                    f"{sum(value < 1 for value, _ in pairs)} of {len(rows)}",
                    "-" if not errors else f"{common.mean(errors):.2f}",
                    "-" if not errors else f"{max(errors):.2f}",
                ]
            )
    return "\n\n".join([common.markdown_table(header, lines), *common.other_commits(document, document["rows"])])


def within_summary(document: Document) -> str:
    """`layer_summary` of what `auto` takes where `max_error` is a smaller limit than the default (rows' `within`)."""
    rows = [row | _strict(row["within"]) for row in document["rows"] if row.get("within")]
    if not rows:
        return "The file has no such rows."
    limits = sorted({row["within"]["max_error"] for row in rows})
    head = f"`max_error` {', '.join(f'{limit:g}' for limit in limits)}:"
    return "\n\n".join([head, layer_summary({**document, "rows": rows})])


def _strict(within: dict[str, Any]) -> dict[str, Any]:
    return {"us": within["us"], "error": within["error"], "algorithm": within["auto"], "auto": within["auto"]}


SETS = {"layers": "3x3", "pointwise": "1x1", "strided": "stride 2", "stems": "first layers, 5x5 and 7x7"}
SETS |= {"groups": "grouped and depthwise", "lenet5": "LeNet-5, 7x7", "narrow": "few channels", "ragged": "odd maps"}
SETS |= {"deep": "maps of 4x4 to 16x16", "sequences": "one-dimensional", "transposed": "as transposed layers"}
PASSES = {"forward": "", "bias_relu": "with bias and ReLU, ", "bias_residual_relu": "with bias, residual and ReLU, "}
PASSES |= {"backward_input": "input gradient, ", "backward_weight": "weight gradient, "}


def share(set_name: str, rows: Sequence[Row]) -> str:
    """Of rows of a class: ", 6 of 14" if they are of so many of a set's layers, "" if of all."""
    found, every = len({row["layer"] for row in rows}), len(known.SETS[set_name])
    return "" if found == every else f", {found} of {every}"


def sets_table(documents: dict[str, Document]) -> str:
    """A row per set and pass but the forward 3x3: geometric mean over the set at its largest batch against the best
    peer of the class, in brackets the range over its layers, how many these are if not all, and how many have an error
    of ours beyond the class. documents: suite -> its file."""
    classes = [accuracy for accuracy in CLASSES if accuracy != "ieee"]
    lines, shown = [], {}
    for pass_name, direction in PASSES.items():
        for set_name, title in SETS.items():
            suite = suite_of(set_name, pass_name)
            if suite == "layers" or suite not in documents:
                continue
            document = shown[suite] = documents[suite]
            n = max((row["n"] for row in document["rows"]), default=0)
            cells = []
            for accuracy in classes:
                rows = rows_of(document, accuracy, n)
                ratios = [value for row in rows if (value := ratio(row))]
                wrong = sum(map(is_wrong, rows))
                among = share(set_name, rows) + (f", {wrong} wrong" if wrong else "")
                span = f" ({min(ratios):.2f} to {max(ratios):.2f}{among})" if ratios else ""
                text = f"{common.mean(ratios):.2f}{span}" if ratios else "-"
                cells.append(f"**{text}**" if ratios and (common.mean(ratios) or 0) < 1 else text)
            lines.append([direction + title, str(n), *cells])
    table = common.markdown_table(["set", "batch", *(f"`{accuracy}`" for accuracy in classes)], lines)
    return "\n\n".join(
        [table, *common.mixed({suite: common.commits_of(document) for suite, document in shown.items()})]
    )


def algorithm_table(document: Document, accuracy: str, n: int) -> str:
    """Microseconds of every algorithm of ours; the choice of `auto` marked, the fastest in bold."""
    rows = rows_of(document, accuracy, n)
    names = sorted({name for row in rows for name in row["algorithms"]})
    lines = []
    for row in rows:
        timed = [value for value in row["algorithms"].values() if value is not None]
        cells = []
        for name in names:
            value = row["algorithms"].get(name)
            text = common.us(value)
            text = f"**{text}**" if value is not None and value == min(timed) else text
            cells.append(text + (" (auto)" if name == row["algorithm"] else ""))
        lines.append([row["layer"], *cells])
    return common.markdown_table(["layer", *(f"`{name}`" for name in names)], lines)


def figures(document: Document, prefix: str) -> dict[str, Callable[[Path], None]]:
    """One for each class and batch that the file holds: <prefix>_<class>_n<batch>.svg."""
    return {
        f"{prefix}_{accuracy}_n{n}.svg": partial(plot_speedups, document, accuracy, n)
        for accuracy, n in sorted({(row["class"], row["n"]) for row in document["rows"]})
    }


def plot_speedups(document: Document, accuracy: str, n: int, path: Path) -> None:
    """A bar per layer: times faster than the best peer; losses below the line at one."""
    rows = [row for row in rows_of(document, accuracy, n) if ratio(row) is not None]
    values = [ratio(row) or 0.0 for row in rows]
    figure, axes = new_figure(9.0, 3.2)
    names = [row["layer"] for row in rows]
    axes.bar(names, values, color=[common.win_or_loss(value) for value in values], width=0.7)
    for index, value in enumerate(values):
        axes.text(index, value, f"{value:.2f}", ha="center", va="bottom", fontsize=7)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylabel("times faster than\nthe best peer")
    slower = sum(value < 1 for value in values)
    message = f"Class {accuracy}, batch {n}: {common.mean(values) or 0:.2f} times as fast as the best peer"
    common.title(figure, f"{message}, slower on {slower} of {len(values)} layers", document)
    axes.tick_params(axis="x", rotation=60)
    axes.margins(x=0.01, y=0.12)
    save_figure(figure, path)
