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

import collections
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.results import CLASSES, Document, Row, read
from benchmarks.layers.suite import geometric_mean, is_wrong, ratio
from fastconv.figures import new_figure, save_figure

RESULTS, FIGURES = Path("benchmarks/results"), Path("docs/figures")
REGION = re.compile(r"(<!-- results:(?P<name>[^ ]+) -->)(?P<old>.*?)(<!-- /results -->)", re.DOTALL)
REFUSED = re.compile(r"error (\S+) is beyond the class")  # a note of benchmarks.layers.group
OURS, LOSS, NEUTRAL = "#2a6f97", "#c44536", "#8d99ae"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all but the first column aligned to the right."""
    lines = ["| " + " | ".join(header) + " |", "|---|" + "---:|" * (len(header) - 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _us(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _times(value: float | None) -> str:
    """A ratio to the rival; below one it is a loss, and in bold."""
    if value is None:
        return "-"
    return f"{value:.2f}x" if value >= 1 else f"**{value:.2f}x**"


def _scientific(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _rows(document: Document, accuracy: str, n: int, layout: str = "nhwc") -> list[Row]:
    rows = [row for row in document["rows"] if row["class"] == accuracy and row["n"] == n]
    layouts = {row["layout"] for row in rows}
    shown = layout if layout in layouts else min(layouts, default="")
    return [row for row in rows if row["layout"] == shown]


def _error_ratio(row: Row) -> float | None:
    return row["error"] / row["peer_error"] if row["error"] is not None and row["peer_error"] else None


def _mean(values: Iterable[float | None]) -> float | None:
    return geometric_mean([value for value in values if value])


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
    rows = _rows(document, accuracy, n)
    # How an FP32-accurate time compares with the best TF32 one of the same layer.
    tf32 = {row["layer"]: row["best_peer_us"] for row in _rows(document, "tf32", n)} if accuracy == "fp32" else {}
    against = {row["layer"]: tf32[row["layer"]] / row["us"] for row in rows if tf32.get(row["layer"]) and row["us"]}
    if tf32:
        header.append("speedup over TF32")
    packing = any(row.get("us_with_packing") for row in rows)
    header += ["us with packing", "speedup with packing"] if packing else []
    lines = [
        [
            row["layer"],
            f"{row['c']}->{row['k']} @{row['h']}x{row['w']}",
            _us(row["us"]),
            _algorithm(row),
            _us(row["best_peer_us"]),
            f"`{row['best_peer']}`" if row["best_peer"] else "-",
            _times(ratio(row)),
            _scientific(row["error"]),
            "-" if _error_ratio(row) is None else f"{_error_ratio(row):.2f}",
            _us(row["floor_us"]),
            *([_times(against.get(row["layer"]))] if tf32 else []),
            *([_us(row.get("us_with_packing")), _times(_with_packing(row))] if packing else []),
        ]
        for row in rows
    ]
    wide = [row for row in rows if row["c"] >= 64]
    error = _mean(_error_ratio(row) for row in wide)
    mean = ["geometric mean", "C >= 64", "", "", "", "", _times(_mean(ratio(row) for row in wide)), ""]
    mean += ["-" if error is None else f"{error:.2f}", ""]
    mean += [_times(_mean(against.get(row["layer"]) for row in wide))] if tf32 else []
    lines.append(mean + (["", _times(_mean(_with_packing(row) for row in wide))] if packing else []))
    return "\n\n".join([markdown_table(header, lines), _losses(rows), *_caveats(rows), *_other_commits(document, rows)])


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
        said.append(
            f"Every time, ours and the peers', holds the replay of a CUDA graph: {statistics.median(empty):.1f} us "
            "for one that does next to nothing."
        )
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
            rows = _rows(document, accuracy, n)
            pairs = [(value, row["layer"]) for row in rows if (value := ratio(row)) is not None]
            errors = [value for row in rows if (value := _error_ratio(row)) is not None]
            worst = min(pairs, default=None)
            lines.append(
                [
                    f"`{accuracy}`",
                    str(n),
                    _times(_mean(ratio(row) for row in rows if row["c"] >= 64)),
                    _times(_mean(value for value, _ in pairs)),
                    "-" if worst is None else f"{worst[1]} {_times(worst[0])}",
                    f"{sum(value < 1 for value, _ in pairs)} of {len(rows)}",
                    "-" if not errors else f"{_mean(errors):.2f}",
                    "-" if not errors else f"{max(errors):.2f}",
                ]
            )
    return "\n\n".join([markdown_table(header, lines), *_other_commits(document, document["rows"])])


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


SETS = {"": "3x3", "pointwise": "1x1", "strided": "stride 2", "stems": "first layers, 5x5 and 7x7"}
SETS |= {"groups": "grouped and depthwise", "lenet5": "LeNet-5, 7x7"}
PASSES = {"": "", "bias_relu": "with bias and ReLU, ", "bias_residual_relu": "with bias, residual and ReLU, "}
PASSES |= {"backward_input": "input gradient, ", "backward_weight": "weight gradient, "}


def sets_table(documents: dict[str, Document]) -> str:
    """A row per set and pass but the forward 3x3: geometric mean over the set at its largest batch against the best
    peer of the class, in brackets the range over its layers. documents: suite -> its file."""
    classes = [accuracy for accuracy in CLASSES if accuracy != "ieee"]
    lines, shown = [], {}
    for pass_name, direction in PASSES.items():
        for set_name, title in SETS.items():
            suite = "_".join(filter(None, ("layers", set_name, pass_name)))
            if suite == "layers" or suite not in documents:
                continue
            document = shown[suite] = documents[suite]
            n = max((row["n"] for row in document["rows"]), default=0)
            cells = []
            for accuracy in classes:
                ratios = [value for row in _rows(document, accuracy, n) if (value := ratio(row))]
                text = f"{_mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "-"
                cells.append(f"**{text}**" if ratios and (_mean(ratios) or 0) < 1 else text)
            lines.append([direction + title, str(n), *cells])
    table = markdown_table(["set", "batch", *(f"`{accuracy}`" for accuracy in classes)], lines)
    return "\n\n".join([table, *_mixed({suite: _commits(document) for suite, document in shown.items()})])


def algorithm_table(document: Document, accuracy: str, n: int) -> str:
    """Microseconds of every algorithm of ours; the choice of `auto` marked, the fastest in bold."""
    rows = _rows(document, accuracy, n)
    names = sorted({name for row in rows for name in row["algorithms"]})
    lines = []
    for row in rows:
        timed = [value for value in row["algorithms"].values() if value is not None]
        cells = []
        for name in names:
            value = row["algorithms"].get(name)
            text = _us(value)
            text = f"**{text}**" if value is not None and value == min(timed) else text
            cells.append(text + (" (auto)" if name == row["algorithm"] else ""))
        lines.append([row["layer"], *cells])
    return markdown_table(["layer", *(f"`{name}`" for name in names)], lines)


def _commits(document: Document, rows: Sequence[Row] | None = None) -> list[str]:
    """The commits of the rows, the document's own first, each by twelve digits."""
    found = dict.fromkeys(str(row.get("commit") or document["commit"])[:12] for row in rows or document["rows"])
    own = document["commit"][:12]
    return sorted(found, key=lambda commit: commit != own)


def _other_commits(document: Document, rows: Sequence[Row]) -> list[str]:
    """A loud sentence where the rows are not all of one commit; the files say which row is of which."""
    counts = collections.Counter(str(row.get("commit") or document["commit"])[:12] for row in rows)
    if len(counts) < 2:
        return [] if document["commit"][:12] in counts or not counts else [f"Of commit {next(iter(counts))}."]
    said = ", ".join(f"{count} rows of {commit}" for commit, count in counts.most_common())
    return [f"**Of several commits, not to be compared row by row: {said}.**"]


def _mixed(commits: dict[str, list[str]]) -> list[str]:
    """The same for several files. commits: file -> those of its rows."""
    found: dict[str, list[str]] = {}
    for suite, its in commits.items():
        for commit in its:
            found.setdefault(commit, []).append(suite)
    if len(found) < 2:
        return [f"All of commit {commit}." for commit in found]
    said = "; ".join(f"{commit}: {', '.join(suites)}" for commit, suites in found.items())
    return [f"**Of several commits: {said}.**"]


def commits(results: Path, gpu: str) -> dict[str, list[str]]:
    """Suite -> the commits of its rows, of every file of a device."""
    return {path.stem: _commits(document) for path, document in _files(results, gpu).items() if document["rows"]}


def _files(results: Path, gpu: str) -> dict[Path, Document]:
    return {path: read(path) for path in sorted((results / gpu).glob("*.json"))}


def machine_line(document: Document) -> str:
    """One line: what the file was measured on."""
    parts = [document["gpu"], f"driver {document['driver']}" if document["driver"] else ""]
    parts += [f"CUDA {document['cuda']}" if document["cuda"] else "", f"torch {document['torch']}"]
    parts += [f"cuDNN {document['cudnn']}" if document["cudnn"] else "", f"commit {document['commit'][:12]}"]
    return ", ".join(part for part in [*parts, document["date"][:10]] if part) + "."


def region(name: str, results: Path) -> str:
    """The Markdown of a region's name. Raises ValueError if the name or the file it needs does not exist."""
    from benchmarks.reports import megakernel as megakernel_report  # which draw with this module
    from benchmarks.reports import networks as network_report
    from benchmarks.reports import sentences

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
            return layer_summary(file(suite))
        case ["layers", "algorithms", accuracy, n] if accuracy in CLASSES and n.isdigit():
            return algorithm_table(file("layers"), accuracy, int(n))
        case [suite, accuracy, n] if suite.startswith("layers") and accuracy in CLASSES and n.isdigit():
            return layer_table(file(suite), accuracy, int(n))
        case ["layers", "within"]:
            return within_summary(file("layers"))
        case ["sets"]:
            return sets_table({path.stem: document for path, document in _files(results, gpu).items()})
        case ["networks", "summary"]:
            return network_report.summary(file("networks"))
        case ["networks", "summary", accuracy] if accuracy in CLASSES:
            return network_report.summary(file("networks"), accuracy)
        case ["networks", "peers", accuracy] if accuracy in CLASSES:
            return network_report.peers_table(file("networks"), accuracy)
        case ["networks", accuracy] if accuracy in CLASSES:
            return network_report.table(file("networks"), accuracy)
        case ["commits"]:
            return " ".join(_mixed(commits(results, gpu)))
        case ["commits", "short"]:
            (said,) = _mixed(commits(results, gpu))
            return "**Of several commits**: docs/results.md says which." if said.startswith("**") else said
        case ["said", sentence, *arguments]:
            if (text := sentences.said(sentence, arguments, file)) is not None:
                return text
        case ["megakernel", *name_of]:
            if (text := megakernel_report.region(name_of, gpu, file("megakernel"))) is not None:
                return text
        case ["soak_megakernel"]:
            return megakernel_report.soak_line(file("soak_megakernel"))
        case ["machine", suite]:
            return machine_line(file(suite))
    raise ValueError(f"region {name!r}: expected one of the names in benchmarks/reports/report.py")


def fill(text: str, results: Path) -> str:
    """`text` with every marked region drawn anew."""

    def drawn(found: re.Match[str]) -> str:
        gap = "\n\n" if "\n" in found["old"] else ""
        return f"{found[1]}{gap}{region(found['name'], results)}{gap}{found[4]}"

    return REGION.sub(drawn, text)


def plot_speedups(document: Document, accuracy: str, n: int, path: Path) -> None:
    """A bar per layer: times faster than the best peer; losses in another colour, below the line at one."""
    rows = [row for row in _rows(document, accuracy, n) if ratio(row) is not None]
    values = [ratio(row) or 0.0 for row in rows]
    figure, axes = new_figure(9.0, 3.2)
    axes.bar(
        [row["layer"] for row in rows], values, color=[OURS if value >= 1 else LOSS for value in values], width=0.7
    )
    for index, value in enumerate(values):
        axes.text(index, value, f"{value:.2f}", ha="center", va="bottom", fontsize=7)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylabel("times faster than\nthe best peer")
    axes.set_title(f"{document['gpu']}, class {accuracy}, batch {n}", loc="left", fontsize=10)
    axes.tick_params(axis="x", rotation=60)
    axes.margins(x=0.01, y=0.12)
    save_figure(figure, path)


def plot_channels(document: Document, n: int, path: Path) -> None:
    """Speedup over the best peer against C + K, a mark per class."""
    figure, axes = new_figure(6.0, 3.6)
    marks = dict(zip(CLASSES, "s^ovD", strict=True))
    present = [accuracy for accuracy in CLASSES if _rows(document, accuracy, n)] if document["rows"] else []
    for index, accuracy in enumerate(present):
        rows = [row for row in _rows(document, accuracy, n) if ratio(row) is not None]
        channels, values = [row["c"] + row["k"] for row in rows], [ratio(row) or 0.0 for row in rows]
        axes.scatter(channels, values, s=22, marker=marks[accuracy], label=accuracy, color=f"C{index}", alpha=0.85)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("C + K")
    axes.set_ylabel("times faster than the best peer")
    axes.set_title(f"{document['gpu']}, batch {n}", loc="left", fontsize=10)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    save_figure(figure, path)


def figures(results: Path, folder: Path) -> list[Path]:
    """Draws every plot that the result files allow; the paths written."""
    from benchmarks.reports import megakernel as megakernel_report
    from benchmarks.reports import networks as network_report

    written = []

    def draw(plot: Callable[..., None], name: str, *arguments: object) -> None:
        path = folder / name
        plot(*arguments, path)
        written.append(path)

    for file in sorted(results.glob("*/*.json")):
        gpu, document = file.parent.name, read(file)
        if file.stem.startswith("networks"):
            if document["rows"]:
                draw(network_report.plot, f"{gpu}_{file.stem}.svg", document)
        elif file.stem == "megakernel":
            written += megakernel_report.figures(document, f"{gpu}_megakernel", folder)
        elif file.stem.startswith("layers"):
            for n in sorted({row["n"] for row in document["rows"]}):
                draw(plot_channels, f"{gpu}_{file.stem}_channels_n{n}.svg", document, n)
                for accuracy in CLASSES:
                    if any(row["class"] == accuracy and row["n"] == n for row in document["rows"]):
                        draw(plot_speedups, f"{gpu}_{file.stem}_{accuracy}_n{n}.svg", document, accuracy, n)
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
