"""Which of the five ideas is worth what: a row per source, filled from the rows of its experiments."""

from __future__ import annotations

from benchmarks.layers.suite import ratio
from benchmarks.reports import common
from benchmarks.reports import megakernel as study
from benchmarks.reports.networks import speedup_of
from benchmarks.reports.papers import cuconv, lenet5, megakernel, single_image, textbook
from benchmarks.reports.papers.shared import NOTHING, File, of_class, wins
from benchmarks.studies.ladder import HALF, PREFIX


def _megakernel(file: File) -> tuple[str, str]:
    document = file("paper_megakernel") or {"rows": []}
    rows = {name: study.rows_of(megakernel._of_batch(document, 64), "layers", name) for name in ("ieee", "fp32")}
    gains = {name: common.mean(map(study.over_series, its)) for name, its in rows.items()}
    here = ", ".join(f"{gain:.2f}x over its tasks in series in `{name}`" for name, gain in gains.items() if gain)
    gain = gains["ieee"]
    verdict = NOTHING if gain is None else _verdict(gain, "The mapping pays where arithmetic is FP32's")
    if gains["fp32"] and gains["fp32"] < 1:
        verdict += "; on tensor cores the way of V and M through memory costs more than it hides"
    return here or NOTHING, verdict


def _verdict(gain: float, claim: str) -> str:
    return claim if gain > 1 else f"{claim}: not here"


def _textbook(file: File) -> tuple[str, str]:
    found = textbook._fastest(file("paper_textbook") or {"rows": []}, "ieee")
    gains = []
    for layer in dict.fromkeys(name for name, _ in found):
        direct, best = found.get((layer, "direct")), [us for (name, _), (_, us) in found.items() if name == layer]
        if direct:
            gains.append(direct[1] / min(best))
    if not gains:
        return NOTHING, NOTHING
    fastest = [min((us, rung) for (name, rung), (_, us) in found.items() if name == layer)[1] for layer, _ in found]
    winner = max(set(fastest), key=fastest.count)
    return f"{min(gains):.1f} to {max(gains):.1f}x over `direct`", f"The rung to stand on is most often `{winner}`"


def _cuconv(file: File) -> tuple[str, str]:
    document = file("paper_cuconv") or {"rows": []}
    rows = of_class(document, "ieee", "nchw")
    if not rows:
        return NOTHING, NOTHING
    found, everyone = (wins(over(row, "two_stage") for row in rows) for over in (cuconv.over_source, cuconv.over_all))
    here = f"fastest in {found.share * 100:.1f} % of {found.count}"
    here += f", by {found.mean:.2f}x there" if found.mean else ""
    share = f"{everyone.share * 100:.1f} % against all rivals in both layouts"
    return here, f"A niche of small batches: {share}" if everyone.won else "No niche is left against all rivals"


def _single_image(file: File) -> tuple[str, str]:
    document = file("paper_single_image") or {"rows": []}
    rows = [row for row in single_image.best_rows(document) if row["class"] == "ieee"]
    gains = [gain for row in rows if (gain := speedup_of(row["us"], single_image.cudnn_us(row)))]
    if not gains:
        return NOTHING, NOTHING
    best = [gain for row in rows if (gain := ratio(row))]
    faster = sum(gain > 1 for gain in best)
    return f"{min(gains):.2f} to {max(gains):.2f}x", f"Faster than the best of all rivals on {faster} of {len(best)}"


def _lenet5(file: File) -> tuple[str, str]:
    document = file("paper_lenet5") or {"rows": []}
    network = (file("paper_lenet5_network") or {"rows": []})["rows"]
    first = lenet5.totals(document, f"{PREFIX}direct")
    gains = [n_us / best[1] for n, n_us in first.items() if (best := lenet5.fastest_rung(document, n))]
    here = f"{min(gains):.1f} to {max(gains):.1f}x over its first rung" if gains else NOTHING
    exact = [row for row in network if not row["mode"].startswith(HALF)]
    same = sum(row["accuracy"] == row["torch_accuracy"] for row in exact)
    verdict = f"Accuracy unchanged for {same} of {len(exact)} rungs and classes" if exact else NOTHING
    n = max(first, default=0)
    worth = {step: its[n] for step, its in lenet5.step_gains(document).items() if n in its}
    if worth and exact:
        most = max(worth, key=lambda step: worth[step])
        verdict += f"; the step worth most is {most}, {worth[most]:.2f}x at batch {n}"
    return here, verdict


ROWS = (  # title, page, idea, claim, what the files say
    (
        "Winograd megakernel",
        "megakernel",
        "tasks of all stages mixed in one kernel",
        "1.25x over cuDNN's non-fused Winograd",
        _megakernel,
    ),
    ("Textbook ladder", "textbook", "tiles, then a product that unrolls inside", "each rung is faster", _textbook),
    ("cuConv", "cuconv", "two stages and no transformation", "fastest in 8.31 % of 602, by 1.46x there", _cuconv),
    (
        "Single-image ResNet",
        "single-image",
        "batch 1: Winograd and outer products, norm and ReLU inside",
        "1.18 to 2.09x over cuDNN",
        _single_image,
    ),
    (
        "LeNet-5 ladder",
        "lenet5",
        "unrolling inside the product, filter size a constant",
        "each rung is faster, accuracy unchanged",
        _lenet5,
    ),
)


def table(file: File) -> str:
    """A row per source: the idea, the source's claim, the same number here, and what follows."""
    lines = []
    for title, page, idea, claim, found in ROWS:
        here, verdict = found(file)
        lines.append([f"[{title}]({page}.md)", idea, claim, here, verdict])
    return common.markdown_table(
        ["source", "idea", "its claim", "here, class `ieee` unless it says another", "verdict"], lines
    )
