"""Tables, plots and sentences from result files: nothing in README or docs that a file does not hold.

A document marks where a table goes: `<!-- results:h200/layers/fp32/64 -->` ... `<!-- /results -->`; what stands between
is replaced, in a line of its own, or within a sentence where both marks stand in one line. Names:

    <gpu>/layers/<class>/<batch>       a table, one row per layer, the losses in bold
    <gpu>/layers/summary               geometric means, losses and errors of every class and batch
    <gpu>/layers/within                the same for what `auto` takes within a smaller limit on the error
    <gpu>/layers/algorithms/<class>/<batch>   microseconds of every algorithm of ours
    <gpu>/sets                         geometric means of all other sets and passes
    <gpu>/networks/<class>             whole networks, a row per mode
    <gpu>/networks/summary[/<class>]   a row per network: ours, PyTorch today, what cuDNN could do
    <gpu>/networks/peers/<class>       every form of PyTorch
    <gpu>/megakernel/...               benchmarks/reports/megakernel.py
    <gpu>/soak_megakernel              how many launches, how many of them differ
    <gpu>/machine/<suite>              what the file was measured on
    <gpu>/commits[/short]              of which commits the tables are
    <gpu>/said/<sentence>              benchmarks/reports/sentences.py: numbers within a sentence

<gpu> is the folder of `benchmarks/results`. Plots go to docs/figures/<gpu>_*.svg.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness.results import CLASSES, Document, read
from benchmarks.reports import common, layers, megakernel, networks, sentences

RESULTS, FIGURES = Path("benchmarks/results"), Path("docs/figures")
REGION = re.compile(r"(<!-- results:(?P<name>[^ ]+) -->)(?P<old>.*?)(<!-- /results -->)", re.DOTALL)


def commits(results: Path, gpu: str) -> dict[str, list[str]]:
    """Suite -> the commits of its rows, of every file of a device."""
    return {
        path.stem: common.commits_of(document) for path, document in _files(results, gpu).items() if document["rows"]
    }


def _files(results: Path, gpu: str) -> dict[Path, Document]:
    return {path: read(path) for path in sorted((results / gpu).glob("*.json"))}


def region(name: str, results: Path) -> str:
    """The Markdown of a region's name. Raises ValueError if the name or the file it needs does not exist."""
    gpu, _, rest = name.partition("/")

    def file(suite: str) -> Document:
        # The CPU's suites carry the device in their name.
        paths = [results / gpu / f"{suite}.json", results / gpu / f"{suite}_{gpu}.json"]
        for path in paths:
            if path.exists():
                return read(path)
        raise ValueError(f"region {name!r}: {paths[0]} does not exist")

    match rest.split("/"):
        case [suite, "summary"] if suite.startswith("layers"):
            return layers.layer_summary(file(suite))
        case ["layers", "algorithms", accuracy, n] if accuracy in CLASSES and n.isdigit():
            return layers.algorithm_table(file("layers"), accuracy, int(n))
        case [suite, accuracy, n] if suite.startswith("layers") and accuracy in CLASSES and n.isdigit():
            return layers.layer_table(file(suite), accuracy, int(n))
        case ["layers", "within"]:
            return layers.within_summary(file("layers"))
        case ["sets"]:
            return layers.sets_table({path.stem: document for path, document in _files(results, gpu).items()})
        case ["networks", "summary"]:
            return networks.summary(file("networks"))
        case ["networks", "summary", accuracy] if accuracy in CLASSES:
            return networks.summary(file("networks"), accuracy)
        case ["networks", "peers", accuracy] if accuracy in CLASSES:
            return networks.peers_table(file("networks"), accuracy)
        case ["networks", accuracy] if accuracy in CLASSES:
            return networks.table(file("networks"), accuracy)
        case ["commits"]:
            return " ".join(common.mixed(commits(results, gpu)))
        case ["commits", "short"]:
            (said,) = common.mixed(commits(results, gpu))
            return "**Of several commits**: docs/results.md says which." if said.startswith("**") else said
        case ["said", sentence, *arguments]:
            if (text := sentences.said(sentence, arguments, file)) is not None:
                return text
        case ["megakernel", *name_of]:
            if (text := megakernel.region(name_of, gpu, file("megakernel"))) is not None:
                return text
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


def figures(results: Path, folder: Path) -> list[Path]:
    """Draws every plot that the result files allow; the paths written."""

    written = []

    def draw(plot: Callable[..., None], name: str, *arguments: object) -> None:
        path = folder / name
        plot(*arguments, path)
        written.append(path)

    for file in sorted(results.glob("*/*.json")):
        gpu, document = file.parent.name, read(file)
        if file.stem.startswith("networks"):
            if document["rows"]:
                draw(networks.plot, f"{gpu}_{file.stem}.svg", document)
        elif file.stem == "megakernel":
            written += megakernel.figures(document, f"{gpu}_megakernel", folder)
        elif file.stem.startswith("layers"):
            for n in sorted({row["n"] for row in document["rows"]}):
                draw(layers.plot_channels, f"{gpu}_{file.stem}_channels_n{n}.svg", document, n)
                for accuracy in CLASSES:
                    if any(row["class"] == accuracy and row["n"] == n for row in document["rows"]):
                        draw(layers.plot_speedups, f"{gpu}_{file.stem}_{accuracy}_n{n}.svg", document, accuracy, n)
    return written


def main(root: Path | str = ".", results: Path | str | None = None, check: bool = False) -> list[Path]:
    """Draws the plots and fills the regions of README.md and docs/*.md below `root`; the paths whose content changed.

    check: writes no document and draws nothing; the paths are those of the documents that are out of date.
    Raises ValueError for a region whose name or file does not exist, or a result file that breaks the contract.
    """
    root = Path(root)
    source = Path(results) if results is not None else root / RESULTS
    changed = [] if check else figures(source, root / FIGURES)
    for path in [root / "README.md", *sorted((root / "docs").glob("**/*.md"))]:
        if not path.exists():
            continue
        old = path.read_text()
        new = fill(old, source)
        if new != old:
            changed.append(path)
            if not check:
                path.write_text(new)
    return changed


if __name__ == "__main__":
    for written in main():
        print(written)
