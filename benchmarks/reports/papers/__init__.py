"""Tables and sentences of docs/papers from the files of benchmarks/papers: `<gpu>/paper/<source>/<table>[/...]`.

index                               which source's idea is worth what; readme: in short
worth                               the same, idea by idea
cuconv/overall                      share of configurations won, mean and largest speedup there
cuconv/sizes/<algorithm>/<class>    the same by filter size and batch
cuconv/variants/<class>             every variant of cuDNN and of ours over the best of all
cuconv/memory                       workspace and packed filters of what `auto` takes
single_image/layers|kernels|statistic|blocks|networks
lenet5/layers/<class>, lenet5/ladder/<class>, lenet5/steps, lenet5/network, lenet5/sweep
textbook/model                      arithmetic alone: needs no rows
textbook/ladder/<class>, textbook/memory, textbook/kernels
megakernel/stages, megakernel/ceilings   arithmetic alone, the latter beside what is measured
megakernel/layers/<class>, megakernel/batches/<class>, megakernel/gains/<class>, megakernel/hidden,
megakernel/mapping/<class>, megakernel/fastest, megakernel/tasks/<class>, megakernel/best_maps,
megakernel/resnet2/<class>, megakernel/networks,
megakernel/filters, megakernel/counters, cuconv/counters
<source>/machine                    what the files that are drawn were measured on
<source>/said                       one sentence: what holds of the source's claim
<source>/said/<name>                others: SENTENCES of the source's module

Where a file does not exist yet: `(not measured)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.harness.results import CLASSES, Document
from benchmarks.reports import common
from benchmarks.reports.papers import cuconv, index, lenet5, megakernel, single_image, textbook
from benchmarks.reports.papers.shared import NOTHING, File, chosen, first, together

SOURCES = {"megakernel": megakernel, "textbook": textbook, "cuconv": cuconv, "single_image": single_image}
SOURCES |= {"lenet5": lenet5}


ALGORITHMS = ("two_stage", "auto")  # what a table's argument may be, beside a class


def region(rest: Sequence[str], files: Mapping[str, File]) -> str | None:
    """The Markdown of a region, for a document in docs/papers; None for a name that is none of these.

    files: GPU -> suite -> its document, None if there is none; of several GPUs `shared.chosen` says which is drawn.
    """
    files = chosen(files)
    match rest:
        case ["index"]:
            return index.table(files)
        case ["readme"]:
            return index.readme(files)
        case ["worth"]:
            return index.worth(files)
        case [source, "machine"] if source in SOURCES:
            return _machines(source, files)
        case [source, "said"] if source in SOURCES:
            return SOURCES[source].said(together(files)[0])
        case [source, "said", name] if source in SOURCES and name in SOURCES[source].SENTENCES:
            return SOURCES[source].SENTENCES[name](together(files)[0])
        case [source, table, *arguments] if source in SOURCES and table in SOURCES[source].TABLES:
            if any(argument not in (*CLASSES, *ALGORITHMS) for argument in arguments):
                return None
            return first(_drawn(source, table, arguments, gpu, file) for gpu, file in files.items())
    return None


def _drawn(source: str, table: str, arguments: Sequence[str], gpu: str, file: File) -> str:
    needed, draw = SOURCES[source].TABLES[table]  # arithmetic alone is of the GPU that has these rows
    document = file(needed)
    if document is None or not document["rows"]:
        return NOTHING
    text: str = draw(document, gpu, *arguments)
    return text


def _machines(source: str, files: Mapping[str, File]) -> str:
    """What the source's tables are of; a line for each machine and commit."""
    found: dict[str, list[str]] = {}
    for suite in dict.fromkeys(suite for suite, _ in SOURCES[source].TABLES.values()):
        for file in files.values():
            if (document := file(suite)) is not None and document["rows"]:
                found.setdefault(common.machine_line(document), []).append(f"`{suite}`")
    if len(found) == 1:
        return next(iter(found))
    return "\n".join(f"- {', '.join(its)}: {line}" for line, its in found.items()) or NOTHING


FIGURES = {
    "papers/cuconv/survey": cuconv.figures,
    "papers/textbook/ladder": textbook.figures,
    "papers/megakernel/layers": megakernel.figures,
    "papers/megakernel/resnet2": megakernel.resnet2_figures,
    "papers/single_image/layers": single_image.figures,
    "papers/lenet5/layers": lenet5.figures,
}


def figures(document: Document, gpu: str, suite: str) -> dict[str, Callable[[Path], None]]:
    """What a file of benchmarks/papers allows, for docs/papers: <gpu>_paper_<source>_*.svg."""
    _, source, _ = suite.split("/")
    return FIGURES[suite](document, f"{gpu}_paper_{source}") if suite in FIGURES else {}
