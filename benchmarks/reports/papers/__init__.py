"""Tables and sentences of docs/papers from the files of benchmarks/papers: `<gpu>/paper/<source>/<table>[/...]`.

index                               which source's idea is worth what; readme: in short
worth                               the same, idea by idea
cuconv/overall                      share of configurations won, mean and largest speedup there
cuconv/sizes/<algorithm>/<class>    the same by filter size and batch
cuconv/variants/<class>             every variant of cuDNN and of ours over the best of all
single_image/layers|kernels|statistic|blocks|networks
lenet5/layers/<class>, lenet5/ladder/<class>, lenet5/steps, lenet5/network
textbook/model                      arithmetic alone: needs no rows
textbook/ladder/<class>, textbook/kernels
megakernel/stages                   arithmetic alone
megakernel/layers/<class>, megakernel/batches/<class>, megakernel/gains/<class>, megakernel/hidden,
megakernel/resnet2/<class>, megakernel/networks,
megakernel/filters, megakernel/counters, cuconv/counters
<source>/machine[/<part>]           what the file was measured on
<source>/said                       one sentence: what holds of the source's claim

Where a file does not exist yet: `(not measured)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.harness.results import CLASSES, Document
from benchmarks.reports import common
from benchmarks.reports.papers import cuconv, index, lenet5, megakernel, single_image, textbook
from benchmarks.reports.papers.shared import NOTHING, File

SOURCES = {"megakernel": megakernel, "textbook": textbook, "cuconv": cuconv, "single_image": single_image}
SOURCES |= {"lenet5": lenet5}


def region(rest: Sequence[str], gpu: str, file: File) -> str | None:
    """The Markdown of a region, for a document in docs/papers; None for a name that is none of these.

    file: suite -> its document, None if there is none.
    """
    match rest:
        case ["index"]:
            return index.table(file)
        case ["readme"]:
            return index.readme(file)
        case ["worth"]:
            return index.worth(file)
        case [source, "machine", *part] if source in SOURCES and len(part) < 2:
            document = file("_".join(["paper", source, *part]))
            return NOTHING if document is None else common.machine_line(document)
        case [source, "said"] if source in SOURCES:
            return SOURCES[source].said(file)
        case [source, table, *arguments] if source in SOURCES and table in SOURCES[source].TABLES:
            needed, draw = SOURCES[source].TABLES[table]
            if any(argument not in CLASSES and argument not in ("two_stage", "auto") for argument in arguments):
                return None
            document = None if needed is None else file(needed)
            if needed is not None and (document is None or not document["rows"]):
                return NOTHING
            return draw(document or {"rows": []}, gpu, *arguments)
    return None


def figures(document: Document, prefix: str) -> dict[str, Callable[[Path], None]]:
    """What a file of benchmarks/papers allows, for docs/papers."""
    found: dict[str, Callable[[Path], None]] = {}
    for source in (cuconv, textbook, megakernel):
        if prefix.endswith(f"_paper_{source.NAME}"):
            found |= source.figures(document, prefix)
    return found
