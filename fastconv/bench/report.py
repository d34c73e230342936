"""Tables and plots from result files: nothing in README or docs that a file does not hold.

A document marks where a table goes: `<!-- results:h200/layers/fp32/64 -->` ... `<!-- /results -->`; what stands between
is replaced. Names:

    <gpu>/layers/<class>/<batch>       a table, one row per layer, the losses in bold
    <gpu>/layers/summary               geometric means, losses and errors of every class and batch
    <gpu>/layers/algorithms/<class>/<batch>   microseconds of every algorithm of ours
    <gpu>/networks/<class>             whole networks
    <gpu>/megakernel/...               fastconv/bench/megakernel_report.py
    <gpu>/soak_megakernel              how many launches, how many of them differ
    <gpu>/machine/<suite>              what the file was measured on

<gpu> is the folder of `benchmarks/results`. Plots go to docs/figures/<gpu>_*.svg.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from fastconv.bench.layer_suite import geometric_mean, is_wrong, ratio
from fastconv.bench.results import CLASSES, Document, Row, read

RESULTS, FIGURES = Path("benchmarks/results"), Path("docs/figures")
REGION = re.compile(r"(<!-- results:(?P<name>[^ ]+) -->)(?P<old>.*?)(<!-- /results -->)", re.DOTALL)
REFUSED = re.compile(r"error (\S+) is beyond the class")  # layer_group's note
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
        ]
        for row in rows
    ]
    wide = [row for row in rows if row["c"] >= 64]
    error = _mean(_error_ratio(row) for row in wide)
    mean = ["geometric mean", "C >= 64", "", "", "", "", _times(_mean(ratio(row) for row in wide)), ""]
    mean += ["-" if error is None else f"{error:.2f}", ""]
    lines.append(mean + ([_times(_mean(against.get(row["layer"]) for row in wide))] if tf32 else []))
    return "\n\n".join([markdown_table(header, lines), _losses(rows), *_caveats(rows)])


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
    batches = [{**row, "batch": f"batch {row['n']}"} for row in document["rows"]]
    return "\n\n".join([markdown_table(header, lines), *_other_commits(document, batches, "class", "batch")])


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


def network_table(document: Document, accuracy: str) -> str:
    """Whole networks: ours and the fastest peer in milliseconds, the ratio, how far both are from float64.

    A row with a `commit` of its own is of another run; the line below the table says so. The files have every peer.
    """
    rows = [row for row in document["rows"] if row["class"] == accuracy]
    header = ["network", "batch", "mode", "swapped", "ours ms", "best PyTorch ms", "its form", "speedup"]
    header += ["logits error", "PyTorch's", "top-1 agreement", "PyTorch's"]
    lines = []
    for row in rows:
        peers = {name: value for name, value in row["peers"].items() if value is not None}
        best = min(peers, key=lambda name: peers[name], default=None)
        speedup = peers[best] / row["us"] if best and row["us"] else None
        line = [row["network"], str(row["batch"]), row["mode"], f"{row['swapped']} of {row['total']}", _ms(row["us"])]
        line += [_ms(peers.get(best or "")), f"`{best}`" if best else "-", _times(speedup)]
        line += [_scientific(row["logits_error"]), _scientific(row.get("peer_error"))]
        lines.append([*line, _percent(row["top1_agreement"]), _percent(row.get("peer_top1_agreement"))])
    return "\n\n".join([markdown_table(header, lines), *_other_commits(document, rows, "network", "mode")])


def _other_commits(document: Document, rows: Sequence[Row], name: str, part: str = "") -> list[str]:
    """A sentence for each commit other than the document's that rows name, with what it has measured: `name`, and which
    `part` of it where not all of its rows are of that commit."""
    found: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        commit = str(row.get("commit") or document["commit"])
        found.setdefault(commit, {}).setdefault(row[name], []).append(row.get(part, ""))
    count = collections.Counter(row[name] for row in rows)
    sentences = []
    for commit, names in found.items():
        if commit == document["commit"]:
            continue
        its = [
            each if not part or len(parts) == count[each] else f"{each} ({', '.join(dict.fromkeys(parts))})"
            for each, parts in names.items()
        ]
        sentences.append(f"Of commit {commit[:12]}: {', '.join(its)}.")
    return sentences


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _ms(us: float | None) -> str:
    return "-" if us is None else f"{us / 1e3:.2f}"


def machine_line(document: Document) -> str:
    """One line: what the file was measured on."""
    parts = [document["gpu"], f"driver {document['driver']}" if document["driver"] else ""]
    parts += [f"CUDA {document['cuda']}" if document["cuda"] else "", f"torch {document['torch']}"]
    parts += [f"cuDNN {document['cudnn']}" if document["cudnn"] else "", f"commit {document['commit'][:12]}"]
    return ", ".join(part for part in [*parts, document["date"][:10]] if part) + "."


def region(name: str, results: Path) -> str:
    """The Markdown of a region's name. Raises ValueError if the name or the file it needs does not exist."""
    from fastconv.bench import megakernel_report  # which draws with this module

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
        case ["networks", accuracy] if accuracy in CLASSES:
            return network_table(file("networks"), accuracy)
        case ["megakernel", *name_of]:
            if (text := megakernel_report.region(name_of, gpu, file("megakernel"))) is not None:
                return text
        case ["soak_megakernel"]:
            return megakernel_report.soak_line(file("soak_megakernel"))
        case ["machine", suite]:
            return machine_line(file(suite))
    raise ValueError(f"region {name!r}: expected one of the names in fastconv/bench/report.py")


def fill(text: str, results: Path) -> str:
    """`text` with every marked region drawn anew."""
    return REGION.sub(lambda found: f"{found[1]}\n\n{region(found['name'], results)}\n\n{found[4]}", text)


def plot_speedups(document: Document, accuracy: str, n: int, path: Path) -> None:
    """A bar per layer: times faster than the best peer; losses in another colour, below the line at one."""
    rows = [row for row in _rows(document, accuracy, n) if ratio(row) is not None]
    values = [ratio(row) or 0.0 for row in rows]
    figure, axes = _figure(9.0, 3.2)
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
    _save(figure, path)


def plot_channels(document: Document, n: int, path: Path) -> None:
    """Speedup over the best peer against C + K, a mark per class."""
    figure, axes = _figure(6.0, 3.6)
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
    _save(figure, path)


def plot_networks(document: Document, path: Path) -> None:
    """Whole networks: time of the fastest peer over ours, a bar per network, class and mode."""
    names, values = [], []
    for row in document["rows"]:
        peers = [value for value in row["peers"].values() if value is not None]
        if peers and row["us"]:
            names.append(f"{row['network']} {row['class']} {row['mode']}")
            values.append(min(peers) / row["us"])
    figure, axes = _figure(7.0, 0.6 + 0.22 * len(names))
    axes.barh(names, values, color=[OURS if value >= 1 else LOSS for value in values], height=0.7)
    for index, value in enumerate(values):
        axes.text(value, index, f" {value:.2f}", va="center", fontsize=7)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel("times faster than the best peer, whole network")
    axes.set_title(document["gpu"], loc="left", fontsize=10)
    axes.tick_params(axis="y", labelsize=7)
    axes.margins(x=0.1, y=0.02)
    _save(figure, path)


def _figure(width: float, height: float):  # type: ignore[no-untyped-def]
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # Text as text and a fixed salt: the same file from the same numbers.
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "fastconv", "font.size": 8})
    figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure, path: Path) -> None:  # type: ignore[no-untyped-def]
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {"Software": None}, dpi=150)
    plt.close(figure)


def figures(results: Path, folder: Path) -> list[Path]:
    """Draws every plot that the result files allow; the paths written."""
    from fastconv.bench import megakernel_report

    written = []

    def draw(plot: Callable[..., None], name: str, *arguments: object) -> None:
        path = folder / name
        plot(*arguments, path)
        written.append(path)

    for file in sorted(results.glob("*/*.json")):
        gpu, document = file.parent.name, read(file)
        if file.stem.startswith("networks"):
            if document["rows"]:
                draw(plot_networks, f"{gpu}_{file.stem}.svg", document)
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
