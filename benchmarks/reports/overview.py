"""One table of all suites, for README: a row per kind of layer and per network, a column per class."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.harness.results import CLASSES, Document
from benchmarks.layers.sets import suite_of
from benchmarks.layers.suite import ratio
from benchmarks.reports import common, layers, networks

BATCH = 64
LAYERS = {"layers": "3x3 layers", "pointwise": "1x1 layers", "strided": "stride 2, 3x3 and 1x1"}  # set -> title
SUITES = (*(suite_of(set_name, "forward") for set_name in LAYERS), "networks")  # that the table is of


def table(documents: Mapping[str, Document]) -> str:
    """Times faster than the best peer of the class: geometric means over the layers of a set at batch 64; of whole
    networks the fastest form of ours over PyTorch's fastest. Last, class fp32 over the fastest TF32. documents: suite
    -> its file."""
    classes = [accuracy for accuracy in CLASSES if accuracy != "ieee"]
    lines: list[list[str]] = []
    for set_name, title in LAYERS.items():
        if (document := documents.get(suite_of(set_name, "forward"))) is not None:
            of_class = [layers.rows_of(document, name, BATCH) for name in classes]
            fewest = min((its for its in of_class if its), key=len, default=[])
            cells = [common.times(common.mean(map(ratio, its))) for its in of_class]
            cells.append(common.times(common.mean(layers.over_tf32(document, BATCH).values())))
            lines.append([f"{title}, batch {BATCH}" + layers.share(set_name, fewest), *cells])
    if "networks" in documents:
        found = networks.speedups(documents["networks"], documents.get("networks_autotune"))
        tf32, rows = networks.over_tf32(documents["networks"]), networks.by_network(documents["networks"], None)
        for network, batch in dict.fromkeys((network, batch) for network, name, batch in found if name == "fp32"):
            keys = [(network, name, batch) for name in classes]
            cells = [networks.times(found.get(key), rows.get(key, {}).values()) for key in keys]
            cells.append(common.times(tf32.get((network, batch))))
            lines.append([f"{networks.TITLES.get(network, network)}, batch {batch}", *cells])
    return common.markdown_table(["", *(f"`{name}`" for name in classes), "`fp32` over TF32"], lines)


def commits(found: Mapping[str, list[str]]) -> str:
    """Of which commits the table and the others are. found: suite -> those of its rows."""
    shown = sorted({commit for suite in SUITES for commit in found.get(suite, ())})
    if len(shown) != 1:
        return "**Of several commits**: docs/results.md says which."
    others = {commit for its in found.values() for commit in its} - set(shown)
    rest = " Others are of other commits: docs/results.md." if others else ""
    return f"This table is of one commit, {shown[0]}.{rest}"
