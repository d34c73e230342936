"""Sentences of the megakernel's page: what holds of what the source says, drawn from the rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter

from benchmarks.harness.results import Document, Row
from benchmarks.reports import common
from benchmarks.reports import megakernel as study
from benchmarks.reports.papers import counters
from benchmarks.reports.papers.megakernel_plots import BATCH, of_batch, tiles_of
from benchmarks.reports.papers.shared import NOTHING, File, rows_in, span
from benchmarks.studies.megakernel import FILTER_FORMS

CLASSES = ("ieee", "fp32")
FUSED = "cudnn_winograd"  # and _nhwc; the non-fused one has a longer name
CHANNELS, TILES = (96, 257, 513, 1 << 20), (0, 10_000, 40_000, 1 << 40)  # C + K and tiles: where a group begins


def _document(file: File) -> Document:
    return file("papers/megakernel/layers") or {"rows": []}


def _layers(file: File, accuracy: str, n: int = BATCH) -> list[Row]:
    return study.rows_of(of_batch(_document(file), n), "layers", accuracy)


def series(file: File) -> str:
    """Its non-fused version, our tasks in series, against cuDNN's non-fused Winograd: 6 % slower there."""
    parts = []
    for accuracy in CLASSES:
        pairs = ((study.over_cudnn(row), study.over_series(row)) for row in _layers(file, accuracy))
        gains = [over_cudnn / over_series for over_cudnn, over_series in pairs if over_cudnn and over_series]
        if gains:
            lost = f"slower on {sum(gain < 1 for gain in gains)} of {len(gains)}"
            parts.append(f"{common.mean(gains):.2f} times as fast as cuDNN's in `{accuracy}`, {lost}")
    return "; ".join(parts) or NOTHING


def cudnn(file: File) -> str:
    """Its three numbers over cuDNN's Winograd: layers won over the non-fused one, the fused one, the faster of both."""
    parts = []
    for accuracy in CLASSES:
        gains = [gain for row in _layers(file, accuracy) if (gain := study.over_cudnn(row))]
        if gains:
            won = sum(gain > 1 for gain in gains)
            parts.append(f"{won} of {len(gains)} layers in `{accuracy}`")
    if not parts:
        return NOTHING
    text = f"faster than cuDNN's non-fused Winograd on {', '.join(parts)} (the source: 12 of 13)"
    rows = rows_in(file, "papers/megakernel/resnet2")
    timed = [row["peers"][name] / own for row in rows for name in (FUSED, f"{FUSED}_nhwc")
             if row["peers"].get(name) and (own := row["algorithms"].get(study.NAME))]  # fmt: skip
    refused = any("NOT_SUPPORTED" in note for row in rows for name, note in row["notes"].items() if name == FUSED)
    if timed:
        return f"{text}; over its fused one on 2_x {span(timed)} times (1.7)"
    if refused:
        text += "; cuDNN does not support its fused one here (`NOT_SUPPORTED`), over which the source has 1.7, so that "
        text += "the faster of both, over which it has 1.13, is the non-fused one"
    return text


def _grouped(rows: Iterable[Row], size: Callable[[Row], int], limits: Sequence[int], form: str) -> str:
    """Geometric means of the mapping's gain in groups of layers, from the first limit on."""
    pairs = [(size(row), gain) for row in rows if (gain := study.over_series(row))]
    parts = []
    for low, high in itertools.pairwise(limits):
        its = [pair for pair in pairs if low <= pair[0] < high]
        if gain := common.mean(gain for _, gain in its):
            sizes = span((at for at, _ in its), ",d").replace(",", " ")
            parts.append(f"{gain:.2f} at {form.format(sizes)}")
    return ", ".join(parts)


def sizes(file: File) -> str:
    """The gain of the mapping by C + K and by tiles."""
    parts = []
    for accuracy in CLASSES:
        rows = _layers(file, accuracy)
        by = [
            _grouped(rows, lambda row: row["c"] + row["k"], CHANNELS, "C + K of {}"),
            _grouped(rows, tiles_of, TILES, "{} tiles"),
        ]
        if all(by):
            parts.append(f"in `{accuracy}` {by[0]}; {by[1]}")
    return "; ".join(parts) or NOTHING


def overlap(file: File) -> str:
    """How much of the transforms' time products run beside them, as mapped."""
    parts = []
    for accuracy in CLASSES:
        rows = [row for row in study.rows_of(_document(file), "distribution", accuracy) if row["variant"] == "mapped"]
        shares = ", ".join(f"{row['overlap']:.0%} on {row['layer']}".replace("%", " %") for row in rows)
        parts += [f"{shares} in `{accuracy}`"] if shares else []
    return "; ".join(parts) or NOTHING


def _counted(file: File, accuracy: str) -> dict[str, dict[str, Row]]:
    """Layer -> map, or "" of winograd_f4, -> counters."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows_in(file, "papers/megakernel/counters"):
        if row.get("us") and row["class"] == accuracy:
            found.setdefault(row["layer"], {})[row["variant"]] = row
    return found


def _memory(row: Row) -> float:
    read: float = row["dram_read_bytes"] + row["dram_write_bytes"]
    return read


SMALL, PLANNED, IN_SERIES = "D_IG, D_GO 0, M 1", "as planned", "in series"


def moved(file: File) -> str:
    """Bytes of memory and time with the smallest map, over the planned one."""
    parts = []
    for accuracy in CLASSES:
        its = []
        for layer, maps in _counted(file, accuracy).items():
            if SMALL in maps and PLANNED in maps:
                share, slower = (each(maps[SMALL]) / each(maps[PLANNED]) for each in (_memory, itemgetter("us")))
                its.append(f"{share:.2f} of the bytes in {slower:.1f} times the time on {layer}")
        parts += [f"in `{accuracy}` {', '.join(its)}"] if its else []
    return "; ".join(parts) or NOTHING


def staged(file: File) -> str:
    """Bytes of winograd_f4 over those of the tasks in series."""
    parts = []
    for accuracy in CLASSES:
        pairs = [
            (maps[""], maps[IN_SERIES]) for maps in _counted(file, accuracy).values() if {"", IN_SERIES} <= {*maps}
        ]
        if pairs:
            memory = span(_memory(own) / _memory(series) for own, series in pairs)
            l2 = span(own["l2_bytes"] / series["l2_bytes"] for own, series in pairs)
            parts.append(f"in `{accuracy}` {memory} of the bytes of memory and {l2} of those of the L2 cache")
    return "; ".join(parts) or NOTHING


def filters(file: File) -> str:
    """Filter tasks over packing in every call, by batch."""
    parts = []
    rows = study.rows_of(_document(file), "filters", "ieee")
    for n in sorted({row["n"] for row in rows}):
        times = [[row["algorithms"].get(name) for name in FILTER_FORMS[1:]] for row in rows if row["n"] == n]
        gains = [packing / tasks for packing, tasks in times if packing and tasks]
        if gains:
            text = f"at batch {n} tasks are {span(gains)} times as fast as packing in every call"
            parts.append(f"{text}, slower on {sum(gain < 1 for gain in gains)} of {len(gains)} layers")
    return "; ".join(parts) or NOTHING


def contest(file: File) -> str:
    """The fastest map of the sweep against winograd_f4, on the layers that were swept."""
    parts = []
    for accuracy in CLASSES:
        found: dict[int, list[Row]] = {}
        for row in study.rows_of(_document(file), "mapping", accuracy):
            found.setdefault(row["c"], []).append(row)
        gains = {c: study.over_staged(min(rows, key=lambda row: row["us"])) for c, rows in sorted(found.items())}
        its = ", ".join(f"{gain:.2f} times on {c}" for c, gain in gains.items() if gain)
        parts += [f"in `{accuracy}` {its} channels"] if its else []
    return "; ".join(parts) or NOTHING


ALIKE = 1.02  # times the fastest value's time: what no sweep of this length can tell apart


def ranges(file: File) -> str:
    """Of each number of the map, the values that are as good as the fastest, with the fewest and the most channels."""
    parts = []
    for accuracy in CLASSES:
        its = []
        for name, title in study.SWEPT.items():
            by_channels = {rows[0]["c"]: rows for rows in study._swept(_document(file), accuracy, name).values()}
            ends = dict.fromkeys((min(by_channels), max(by_channels))) if by_channels else ()
            shown = [f"{span(_alike(by_channels[c], name), ',d').replace(',', ' ')} on {c}" for c in ends]
            its += [f"{title} {' and '.join(shown)} channels"] if shown else []
        parts += [f"in `{accuracy}` {', '.join(its)}"] if its else []
    return "; ".join(parts) or NOTHING


def _alike(rows: Sequence[Row], name: str) -> list[int]:
    least = min(row["us"] for row in rows)
    return [row[name] for row in rows if row["us"] <= ALIKE * least]


def caches(file: File) -> str:
    return counters.caches(rows_in(file, "papers/megakernel/counters"))


SENTENCES: dict[str, Callable[[File], str]] = {"cudnn": cudnn, "sizes": sizes, "overlap": overlap}
SENTENCES |= {
    "moved": moved,
    "staged": staged,
    "filters": filters,
    "contest": contest,
    "ranges": ranges,
    "caches": caches,
    "series": series,
}
