"""One table of all suites, for README: a row per kind of layer and per network, a column per class."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.harness.results import CLASSES, Document
from benchmarks.layers.sets import suite_of
from benchmarks.layers.suite import ratio
from benchmarks.reports import common, layers, networks

LAYERS = (  # title, set and pass as in layers.SETS and layers.PASSES, batch (None: the suite's largest)
    ("3x3 layers, batch 64", "layers", "forward", 64),
    ("3x3 layers, batch 1", "layers", "forward", 1),
    ("1x1", "pointwise", "forward", None),
    ("stride 2, 3x3 and 1x1", "strided", "forward", None),
    ("first layers, 5x5 and 7x7", "stems", "forward", None),
    ("grouped and depthwise", "groups", "forward", None),
    ("3x3, input gradient", "layers", "backward_input", None),
    ("3x3, weight gradient", "layers", "backward_weight", None),
)


def table(documents: Mapping[str, Document]) -> str:
    """Times faster than the best peer of the class: geometric means over the layers of a set; of whole networks the
    fastest form of ours over PyTorch's fastest. documents: suite -> its file."""
    classes = [accuracy for accuracy in CLASSES if accuracy != "ieee"]
    lines: list[list[str]] = []
    for title, set_name, pass_name, batch in LAYERS:
        if (document := documents.get(suite_of(set_name, pass_name))) is not None:
            n = batch or max((row["n"] for row in document["rows"]), default=0)
            of_class = [layers.rows_of(document, name, n) for name in classes]
            fewest = min((its for its in of_class if its), key=len, default=[])
            cells = [common.times(common.mean(map(ratio, its))) for its in of_class]
            lines.append([title + layers.share(set_name, fewest), *cells])
    if "networks" in documents:
        found = networks.speedups(documents["networks"], documents.get("networks_autotune"))
        for network, batch in dict.fromkeys((network, batch) for network, _, batch in found):
            cells = [common.times(found.get((network, name, batch))) for name in classes]
            lines.append([f"{networks.TITLES.get(network, network)}, batch {batch}", *cells])
    return common.markdown_table(["", *(f"`{name}`" for name in classes)], lines)
