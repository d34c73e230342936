"""Tables, plots and sentences from result files: nothing in README or docs that a file does not hold.

A document marks where a table goes: `<!-- results:h200/layers/fp32/64 -->` ... `<!-- /results -->`; what stands between
is replaced, in a line of its own, or within a sentence where both marks stand in one line. Names:

    <gpu>/overview                     a row per kind of layer and per network, a column per class
    <gpu>/layers/<class>/<batch>       a table, one row per layer, the losses in bold
    <gpu>/layers/summary               geometric means, losses and errors of every class and batch
    <gpu>/layers/within                the same for what `auto` takes within a smaller limit on the error
    <gpu>/layers/algorithms/<class>/<batch>   microseconds of every algorithm of ours
    <gpu>/sets                         geometric means of all other sets and passes
    <gpu>/networks/<class>             whole networks, a row per mode
    <gpu>/networks/summary[/<class>]   a row per network: ours, PyTorch today, what cuDNN could do
    <gpu>/networks/best                a row per network: the fastest of ours and of PyTorch's by class
    <gpu>/networks/overhead            our time over that of the convolutions' kernels, beside the goal
    <gpu>/networks/rivals              against rivals that have runs of their own; or `(not measured)`
    <gpu>/networks/peers/<class>       every form of PyTorch
    <gpu>[+<gpu>]/energy               of an image, whole networks, of the first GPU that has it; or `(not measured)`
    <gpu>/training[/<class>]           training steps, a row per network, class and mode; or `(not measured)`
    <gpu>/training/groups[/<class>]    their kernels by group
    <gpu>/host                         the host's time of a call; or `(not measured)`
    <gpu>/regret[/<set>]               the choice of `auto` on the convolutions of networks, of file regret[_<set>]
    <gpu>/builds                       an older build's time over this one's
    <gpu>/megakernel/...               benchmarks/reports/megakernel.py
    <gpu>[+<gpu>]/paper/...            benchmarks/reports/papers: docs/papers, each experiment of the first GPU that has
                                       most of it; or `(not measured)`
    <gpu>/soak_megakernel              how many launches, how many of them differ
    <gpu>/machine/<suite>              what the file was measured on
    <gpu>/commits                      of which commits the tables are
    <gpu>/commits/short                of which the overview is
    <gpu>/said/<sentence>              benchmarks/reports/sentences.py: numbers within a sentence

<gpu> is the folder of `benchmarks/results`. Figures are drawn where a document shows one: docs/figures/<gpu>_*.svg.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from benchmarks.harness.results import CLASSES, TRAINING_CLASSES, Document, files, path_of, read
from benchmarks.reports import (
    builds,
    common,
    host,
    layers,
    megakernel,
    networks,
    overview,
    papers,
    regret,
    sentences,
    training,
)

RESULTS, FIGURES = Path("benchmarks/results"), Path("docs/figures")
REGION = re.compile(r"(<!-- results:(?P<name>[^ ]+) -->)(?P<old>.*?)(<!-- /results -->)", re.DOTALL)
SHOWN = re.compile(r"\]\((?:[./]*docs/|[./]*)figures/([\w.-]+)\)")


def commits(results: Path, gpu: str) -> dict[str, list[str]]:
    """Suite -> the commits of its rows, of every file of a device."""
    found = _documents(results, gpu)
    return {suite: common.commits_of(document) for suite, document in found.items() if document["rows"]}


def _documents(results: Path, gpu: str) -> dict[str, Document]:
    return {suite: _read(path) for suite, path in files(results / gpu).items()}


def _read(path: Path) -> Document:
    """To be drawn, not to be changed: many regions are of one file, which is parsed and judged once."""
    found = path.stat()
    return _content(path, found.st_ino, found.st_mtime_ns, found.st_size)


@cache
def _content(path: Path, *_: int) -> Document:
    return read(path)


def _paths(results: Path, gpu: str, suite: str) -> list[Path]:
    # The CPU's suites carry the device in their name.
    return [path_of(results / gpu, name) for name in (suite, f"{suite}_{gpu}")]


def _found(results: Path, gpu: str, suite: str) -> Document | None:
    return next((_read(path) for path in _paths(results, gpu, suite) if path.exists()), None)


def region(name: str, results: Path) -> str:
    """The Markdown of a region's name. Raises ValueError if the name or the file it needs does not exist."""
    gpu, _, rest = name.partition("/")

    found = partial(_found, results, gpu)

    def file(suite: str) -> Document:
        if (document := found(suite)) is None:
            raise ValueError(f"region {name!r}: {_paths(results, gpu, suite)[0]} does not exist")
        return document

    def rivals() -> dict[str, Document]:
        return {suite: document for suite in networks.RIVALS if (document := found(suite)) is not None}

    match rest.split("/"):
        case ["training" | "host" as suite, *_] | ["machine", "training" | "host" as suite] if not any(
            path.exists() for path in _paths(results, gpu, suite)
        ):
            return sentences.NOTHING
        case ["training"]:
            return training.table(file("training"))
        case ["training", "groups"]:
            return training.groups_table(file("training"))
        case ["training", "groups", accuracy] if accuracy in TRAINING_CLASSES:
            return training.groups_table(file("training"), accuracy)
        case ["training", accuracy] if accuracy in TRAINING_CLASSES:
            return training.table(file("training"), accuracy)
        case ["host"]:
            return host.table(file("host"))
        case ["energy"]:
            documents = (_found(results, each, "networks") for each in gpu.split("+"))
            drawn = ((networks.energy_table(its), common.machine_line(its)) for its in documents if its is not None)
            return "\n\n".join(next((both for both in drawn if both[0]), (sentences.NOTHING,)))
        case ["regret", *set_name] if len(set_name) < 2:
            return regret.table(file("_".join(["regret", *set_name])))
        case [suite, "summary"] if suite.startswith("layers"):
            return layers.layer_summary(file(suite))
        case [suite, "nchw"] if suite.startswith("layers"):
            return layers.nchw_table(file(suite))
        case ["layers", "algorithms", accuracy, n] if accuracy in CLASSES and n.isdigit():
            return layers.algorithm_table(file("layers"), accuracy, int(n))
        case [suite, accuracy, n] if suite.startswith("layers") and accuracy in CLASSES and n.isdigit():
            return layers.layer_table(file(suite), accuracy, int(n))
        case ["layers", "within"]:
            return layers.within_summary(file("layers"))
        case ["overview"]:
            return overview.table(_documents(results, gpu))
        case ["sets"]:
            return layers.sets_table(_documents(results, gpu))
        case ["networks", "summary"]:
            return networks.summary(file("networks"), None, rivals())
        case ["networks", "summary", accuracy] if accuracy in CLASSES:
            return networks.summary(file("networks"), accuracy, rivals())
        case ["networks" | "networks_others" as suite, "best"]:
            return networks.best_table(file(suite))
        case ["networks", "overhead"]:
            return networks.overhead_table(file("networks"))
        case ["networks", "rivals"]:
            return networks.rivals_table(its) if (its := rivals()) else sentences.NOTHING
        case ["networks", "peers", accuracy] if accuracy in CLASSES:
            return networks.peers_table(file("networks"), accuracy)
        case ["networks", accuracy] if accuracy in CLASSES:
            return networks.table(file("networks"), accuracy)
        case ["commits"]:
            return " ".join(common.mixed(commits(results, gpu)))
        case ["commits", "short"]:
            return overview.commits(commits(results, gpu))
        case ["said", sentence, *arguments]:
            if (text := sentences.said(sentence, arguments, file)) is not None:
                return text
        case ["paper", *name_of]:
            found_of = {each: partial(_found, results, each) for each in gpu.split("+")}
            if (text := papers.region(name_of, found_of)) is not None:
                return text
        case ["megakernel", *name_of]:
            if (text := megakernel.region(name_of, gpu, file("megakernel"))) is not None:
                return text
        case ["builds"]:
            return builds.table(file("builds"))
        case ["soak_megakernel"]:
            return megakernel.soak_line(file("soak_megakernel"))
        case ["machine", suite]:
            return common.machine_line(file(suite))
    raise ValueError(f"region {name!r}: expected one of the names in benchmarks/reports/documents.py")


def fill(text: str, results: Path) -> str:
    """`text` with every marked region drawn anew."""

    def drawn(found: re.Match[str]) -> str:
        gap = "\n\n" if "\n" in found["old"] else ""
        return f"{found[1]}{gap}{region(found['name'], results)}{gap}{found[4]}"

    return REGION.sub(drawn, text)


def figures(results: Path) -> dict[str, Callable[[Path], None]]:
    """Every figure that the result files allow: its file's name, and what draws it there."""
    found: dict[str, Callable[[Path], None]] = {}
    for folder in sorted(results.glob("*")):
        for suite, document in _documents(results, folder.name).items():
            prefix = f"{folder.name}_{suite}"
            if suite.startswith("networks"):
                found |= networks.figures(document, prefix)
            elif suite == "megakernel":
                found |= megakernel.figures(document, prefix)
            elif suite.startswith("papers/"):
                found |= papers.figures(document, folder.name, suite)
            elif suite.startswith("layers"):
                found |= layers.figures(document, prefix)
    return found


def main(root: Path | str = ".", results: Path | str | None = None, check: bool = False) -> list[Path]:
    """Fills the regions of README.md and docs/**/*.md below `root`, and draws the figures that they show and no others;
    the paths whose content changed, and those of all figures.

    check: writes no document and draws nothing; the paths are those of the documents that are out of date.
    Raises ValueError for a region or a figure whose name or file does not exist, or a result file that breaks the
    contract.
    """
    root = Path(root)
    source = Path(results) if results is not None else root / RESULTS
    changed, shown = [], set()
    for path in [root / "README.md", *sorted((root / "docs").glob("**/*.md"))]:
        if not path.exists():
            continue
        old = path.read_text()
        new = fill(old, source)
        shown |= set(SHOWN.findall(new))
        if new != old:
            changed.append(path)
            if not check:
                path.write_text(new)
    if not check:
        changed += _draw(shown, figures(source), root / FIGURES)
    _content.cache_clear()  # hundreds of megabytes
    return changed


def _draw(shown: set[str], known: dict[str, Callable[[Path], None]], folder: Path) -> list[Path]:
    if unknown := sorted(shown - set(known)):
        raise ValueError(f"figures {', '.join(unknown)}: expected some of {', '.join(sorted(known))}")
    for path in folder.glob("*.svg"):
        if path.name not in shown:
            path.unlink()
    for name in sorted(shown):
        known[name](folder / name)
    return [folder / name for name in sorted(shown)]


if __name__ == "__main__":
    for written in main():
        print(written)
