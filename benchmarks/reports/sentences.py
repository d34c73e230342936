"""Numbers within a sentence of README or docs, from the result files: `<gpu>/said/<name>[/<argument>...]`.

speedup/<suite>/<class>/<batch>       geometric mean over the suite's layers against the best peer, two digits
range/<suite>/<class>/<batch>         the least and the largest of them
tf32/<batch>                          class fp32 against the fastest TF32 peers of the same layers
worst_error/<suite>/<class>/<batch>   the largest multiple of the best peer's error among the layers
error/<suite>/<class>/<batch>         the largest relative L2 error of ours; bias/...: the largest signed one
logits/<class>                        the range over networks and modes of logits' errors over PyTorch's
clocks/<suite>                        the SM clock while the rows were measured
replay/<suite>                        microseconds of the replay of a graph that does next to nothing
few_rounds/<suite>                    how many rows are of fewer than 20 rounds
network/<network>/<class>/<mode>      times faster than the fastest form of PyTorch
best_network/<class>                  the range over the networks of the fastest of ours against PyTorch's fastest
convolutions/<class>                  time inside the convolutions alone, ours against PyTorch's
megakernel/<series|staged|cudnn>/<class>   geometric mean over the layers of part `layers`
megakernel/layers                     how many layers of the set these are
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence

from benchmarks.harness.results import CLASSES, Document, Row
from benchmarks.layers.suite import ratio
from benchmarks.reports import common, layers, megakernel, networks
from fastconv.models.layers import LAYERS

FULL_CLOCK = 0.97  # of the highest clock of the file: less is told

NOTHING = "(not measured)"
File = Callable[[str], Document]


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def _span(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}" if values else NOTHING


def _ratios(document: Document, accuracy: str, n: str) -> list[float]:
    return [value for row in layers.rows_of(document, accuracy, int(n)) if (value := ratio(row))]


def _tf32(document: Document, n: str) -> str:
    ratios = layers.over_tf32(document, int(n)).values()
    if not ratios:
        return NOTHING
    faster = sum(value > 1 for value in ratios)
    return f"{faster} of {len(ratios)} layers are faster, {common.mean(ratios):.2f} times in geometric mean"


def _largest(values: Iterable[float | None], form: str) -> str:
    found = [abs(value) for value in values if value is not None]
    return f"{max(found):{form}}" if found else NOTHING


def _logits(document: Document, accuracy: str) -> str:
    rows = [
        row for row in document["rows"] if row["class"] == accuracy and row["logits_error"] and row.get("peer_error")
    ]
    ratios = [row["logits_error"] / row["peer_error"] for row in rows]
    return _span([ratio for ratio in ratios if not math.isnan(ratio)])  # of values beyond float16's range


def _clocks(document: Document) -> str:
    found = [row["sm_mhz"] for row in document["rows"] if row.get("sm_mhz")]
    if not found:
        return NOTHING
    low = sum(clock < FULL_CLOCK * max(found) for clock in found)
    median, most = statistics.median(found), max(found)
    share = f"{low} of {len(found)} rows"
    return f"{median:.0f} MHz in the median, below {FULL_CLOCK:.0%} of the highest ({most:.0f}) in {share}"


def _replay(document: Document) -> str:
    found = [row["timer_us"] for row in document["rows"] if row.get("timer_us")]
    return f"{statistics.median(found):.1f} us" if found else NOTHING


def _few_rounds(document: Document) -> str:
    few = [row for row in document["rows"] if {row["algorithm"], row["best_peer"]} & set(row.get("few_rounds", []))]
    return f"{len(few)} of {len(document['rows'])}"


def _network(document: Document, name: str, accuracy: str, mode: str) -> str:
    rows = [r for r in document["rows"] if (r["network"], r["class"], r["mode"]) == (name, accuracy, mode)]
    return _number(networks.speedup_of(rows[0]["us"], networks.best_peer(rows[0])[1]) if rows else None)


def _best_network(document: Document, accuracy: str) -> str:
    values = []
    for its in networks.by_network(document, accuracy).values():
        if speedup := networks.speedup_of(*networks.fastest(its)):
            values.append(speedup)
    return _span(values)


def _convolutions(document: Document, accuracy: str) -> str:
    parts = []
    for (name, _, _), its in networks.by_network(document, accuracy).items():
        row = its.get("fused") or its.get("eager")
        theirs = [groups["convolution"] for groups in (row or {}).get("peer_groups", {}).values()]
        if row and row.get("layers_us") and theirs:
            parts.append(
                f"{networks.TITLES.get(name, name)} {row['layers_us'] / 1e3:.1f} ms instead of {min(theirs) / 1e3:.1f}"
            )
    return ", ".join(parts) or NOTHING


_OVER: dict[str, Callable[[Row], float | None]] = {
    "series": megakernel.over_series,
    "staged": megakernel.over_staged,
    "cudnn": megakernel.over_cudnn,
}


def _megakernel(document: Document, over: str, accuracy: str) -> str:
    return _number(common.mean(_OVER[over](row) for row in megakernel.rows_of(document, "layers", accuracy)))


def said(name: str, arguments: Sequence[str], file: File) -> str | None:
    """The words of a sentence's marked part; None for a name that is none of these."""
    match [name, *arguments]:
        case ["speedup", suite, accuracy, n] if accuracy in CLASSES and n.isdigit():
            return _number(common.mean(_ratios(file(suite), accuracy, n)))
        case ["range", suite, accuracy, n] if accuracy in CLASSES and n.isdigit():
            return _span(_ratios(file(suite), accuracy, n))
        case [("worst_error" | "error" | "bias") as what, suite, accuracy, n] if accuracy in CLASSES and n.isdigit():
            rows = layers.rows_of(file(suite), accuracy, int(n))
            if what == "worst_error":
                return _largest(map(layers._error_ratio, rows), ".1f")
            return _largest((row.get(what) for row in rows), ".0e")
        case ["logits", accuracy] if accuracy in CLASSES:
            return _logits(file("networks"), accuracy)
        case ["tf32", n] if n.isdigit():
            return _tf32(file("layers"), n)
        case ["clocks", suite]:
            return _clocks(file(suite))
        case ["replay", suite]:
            return _replay(file(suite))
        case ["few_rounds", suite]:
            return _few_rounds(file(suite))
        case ["network", network, accuracy, mode]:
            return _network(file("networks"), network, accuracy, mode)
        case ["best_network", accuracy] if accuracy in CLASSES:
            return _best_network(file("networks"), accuracy)
        case ["convolutions", accuracy] if accuracy in CLASSES:
            return _convolutions(file("networks"), accuracy)
        case ["megakernel", "layers"]:
            rows = megakernel.rows_of(file("megakernel"), "layers")
            return f"{len({row['layer'] for row in rows})} of the {len(LAYERS)} layers"
        case ["megakernel", over, accuracy] if over in _OVER and accuracy in CLASSES:
            return _megakernel(file("megakernel"), over, accuracy)
    return None
