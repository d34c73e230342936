"""Numbers within a sentence of README or docs, from the result files: `<gpu>/said/<name>[/<argument>...]`.

speedup/<suite>/<class>/<batch>       geometric mean over the suite's layers against the best peer, two digits
range/<suite>/<class>/<batch>         the least and the largest of them
tf32/<batch>                          class fp32 against the fastest TF32 peers of the same layers
worst_error/<suite>/<class>/<batch>   the largest multiple of the best peer's error among the layers
error/<suite>/<class>/<batch>         the largest relative L2 error of ours; bias/...: the largest signed one
torch_error/<suite>/<class>/<batch>   the largest multiple of PyTorch's error in its worse layout, and on which layer
peer_error/<suite>/<class>/<batch>/<peer>     the largest relative L2 error of a peer
error_of/<suite>/<class>/<batch>/<algorithm>  the range of an algorithm's errors over PyTorch's in channels_last
any_error/<suite>/<class>/<batch>     the time of the fastest of ours, whatever its error, over that of auto's choice
vgg16/<class>/<batch>                 the convolutions of VGG-16, summed over the layers' rows: PyTorch's, rivals', ours
logits/<class>                        the range over networks and modes of logits' errors over PyTorch's
clocks/<suite>                        the SM clock while the rows were measured
replay/<suite>                        microseconds of the replay of a graph that does next to nothing
commit/<suite>                        of which commits the rows are
few_rounds/<suite>                    how many rows are of fewer than 20 rounds
network/<network>/<class>/<mode>      times faster than the fastest form of PyTorch
best_network/<class>                  the range over the networks of the fastest of ours against PyTorch's fastest
rival/<suite>/<class>                 network by network, ours against a rival that has a run of its own
convolutions/<class>                  the kernels of the convolutions, ours against PyTorch's least
training/<class>                      the range over networks of training steps against PyTorch's fastest
training/<class>/losses               the networks whose steps take longer than PyTorch's, and their ratios
host/<layer>/<class>                  microseconds of the host by form and call, ours and, in brackets, PyTorch's
megakernel/<series|staged|cudnn>/<class>   geometric mean over the layers of part `layers`
megakernel/layers                     how many layers of the set these are
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence

from benchmarks.harness.results import CLASSES, TRAINING_CLASSES, Document, Row
from benchmarks.layers.suite import ratio
from benchmarks.reports import common, host, layers, megakernel, networks, training
from fastconv.models.layers import LAYERS

FULL_CLOCK = 0.97  # of the highest clock of the file: less is told
# How often VGG-16 has each layer.
VGG16 = {"vgg1_1": 1, "vgg1_2": 1, "vgg2_1": 1, "vgg2_2": 1, "vgg3_1": 1, "vgg3_2": 2, "vgg4_1": 1, "vgg4_2": 2}
VGG16 |= {"vgg5": 3}
TORCH = ("torch_nchw", "torch_nhwc")  # with the search that its users have

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


def _torch_error(rows: Sequence[Row]) -> str:
    found = []
    for row in rows:
        theirs = [row["peer_errors"][name] for name in TORCH if row.get("peer_errors", {}).get(name)]
        if theirs and row["error"] is not None:
            found.append((row["error"] / max(theirs), row["layer"]))
    return f"{max(found)[0]:.1f} times on {max(found)[1]}" if found else NOTHING


def _error_of(rows: Sequence[Row], algorithm: str) -> str:
    found = []
    for row in rows:
        ours, theirs = row.get("errors", {}).get(algorithm), row.get("peer_errors", {}).get("torch_nhwc")
        found += [ours["l2"] / theirs] if ours and theirs else []
    return f"{min(found):.1f} to {max(found):.1f}" if found else NOTHING


def _any_error(rows: Sequence[Row]) -> str:
    found = []
    for row in rows:
        times = [us for name, us in row["algorithms"].items() if us and name != "null"]
        found += [min(times) / row["us"]] if times and row["us"] else []
    return _number(common.mean(found))


def _vgg16(rows: Sequence[Row]) -> str:
    of_layer = {row["layer"]: row for row in rows if row["layer"] in VGG16}

    def total(us_of: Callable[[Row], float | None]) -> float | None:
        its = {layer: us_of(row) for layer, row in of_layer.items()}
        return sum(VGG16[layer] * us for layer, us in its.items() if us) if all(its.values()) else None

    def least(*prefixes: str) -> Callable[[Row], float | None]:
        def us_of(row: Row) -> float | None:
            rivals = {name: us for name, us in row["peers"].items() if us and not layers.is_refused(row, name)}
            return min((us for name, us in rivals.items() if name.startswith(prefixes)), default=None)

        return us_of

    def torch_us(row: Row) -> float | None:
        return min((us for name in TORCH if (us := row["peers"].get(name))), default=None)

    torch, cudnn = total(torch_us), total(least("cudnn_"))
    best, ours = total(lambda row: row["best_peer_us"]), total(lambda row: row["us"])
    if of_layer.keys() != VGG16.keys() or None in (torch, cudnn, best, ours):
        return NOTHING
    text = f"PyTorch {common.ms(torch)} ms, the fastest of cuDNN's on each layer {common.ms(cudnn)}"
    return f"{text}, the fastest of all rivals {common.ms(best)}, ours {common.ms(ours)}"


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


def _rival(document: Document, suite: str, accuracy: str) -> str:
    found = networks.against(networks.RIVALS[suite][1], document)
    of_class = {name: its.speedup for (name, cls, _), its in found.items() if cls == accuracy}
    return ", ".join(f"{networks.TITLES.get(name, name)} {speedup:.2f}" for name, speedup in of_class.items())


def _best_network(document: Document, accuracy: str) -> str:
    values = []
    for its in networks.by_network(document, accuracy).values():
        if speedup := networks.speedup_of(*networks.fastest(its)):
            values.append(speedup)
    return _span(values)


def _convolutions(document: Document, accuracy: str) -> str:
    parts = []
    for (name, _, _), its in networks.by_network(document, accuracy).items():
        ours = networks.convolutions_us(its)
        theirs = [groups["convolution"] for row in its.values() for groups in row.get("peer_groups", {}).values()]
        if ours and theirs:
            title = networks.TITLES.get(name, name)
            parts.append(f"{title} {ours / 1e3:.1f} ms instead of {min(theirs) / 1e3:.1f}")
    return ", ".join(parts) or NOTHING


def _training(document: Document, accuracy: str, losses: bool) -> str:
    its = training.ordered(document, accuracy)
    found = [(row, value) for row in its if (value := networks.speedup_of(row["us"], row["best_peer_us"]))]
    if not losses:
        return _span([value for _, value in found])
    modes = {row["mode"] for row in its}
    lost = sorted((value, training.name_of(row), row["mode"]) for row, value in found if value < 1)
    names = [f"{name}{f' ({mode})' if len(modes) > 1 else ''} {value:.2f}" for value, name, mode in lost]
    return ", ".join(names) or ("none" if found else NOTHING)


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
        case ["torch_error", suite, accuracy, n] if accuracy in CLASSES and n.isdigit():
            return _torch_error(layers.rows_of(file(suite), accuracy, int(n)))
        case ["peer_error", suite, accuracy, n, peer] if accuracy in CLASSES and n.isdigit():
            its = layers.rows_of(file(suite), accuracy, int(n))
            return _largest((row.get("peer_errors", {}).get(peer) for row in its), ".0e")
        case ["error_of", suite, accuracy, n, algorithm] if accuracy in CLASSES and n.isdigit():
            return _error_of(layers.rows_of(file(suite), accuracy, int(n)), algorithm)
        case ["any_error", suite, accuracy, n] if accuracy in CLASSES and n.isdigit():
            return _any_error(layers.rows_of(file(suite), accuracy, int(n)))
        case ["vgg16", accuracy, n] if accuracy in CLASSES and n.isdigit():
            return _vgg16(layers.rows_of(file("layers"), accuracy, int(n)))
        case ["logits", accuracy] if accuracy in CLASSES:
            return _logits(file("networks"), accuracy)
        case ["tf32", n] if n.isdigit():
            return _tf32(file("layers"), n)
        case ["clocks", suite]:
            return _clocks(file(suite))
        case ["replay", suite]:
            return _replay(file(suite))
        case ["commit", suite]:
            return ", ".join(common.commits_of(file(suite)))
        case ["few_rounds", suite]:
            return _few_rounds(file(suite))
        case ["network", network, accuracy, mode]:
            return _network(file("networks"), network, accuracy, mode)
        case ["best_network", accuracy] if accuracy in CLASSES:
            return _best_network(file("networks"), accuracy)
        case ["rival", suite, accuracy] if suite in networks.RIVALS and accuracy in CLASSES:
            return _rival(file(suite), suite, accuracy)
        case ["convolutions", accuracy] if accuracy in CLASSES:
            return _convolutions(file("networks"), accuracy)
        case ["training", accuracy] if accuracy in TRAINING_CLASSES:
            return _training(file("training"), accuracy, losses=False)
        case ["training", accuracy, "losses"] if accuracy in TRAINING_CLASSES:
            return _training(file("training"), accuracy, losses=True)
        case ["host", layer, accuracy] if accuracy in CLASSES:
            return host.sentence(file("host"), layer, accuracy) or NOTHING
        case ["megakernel", "layers"]:
            rows = megakernel.rows_of(file("megakernel"), "layers")
            return f"{len({row['layer'] for row in rows})} of the {len(LAYERS)} layers"
        case ["megakernel", over, accuracy] if over in _OVER and accuracy in CLASSES:
            return _megakernel(file("megakernel"), over, accuracy)
    return None
