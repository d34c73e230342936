"""Which of the five ideas is worth what: a row per source, and one per idea of theirs, filled from the experiments'
rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.layers.suite import ratio
from benchmarks.papers.textbook import LAYERS, OWN_CONSTANT, OWN_DIRECT, OWN_UNROLL
from benchmarks.reports import common
from benchmarks.reports import megakernel as study
from benchmarks.reports.networks import speedup_of
from benchmarks.reports.papers import cuconv, lenet5, megakernel, single_image, textbook
from benchmarks.reports.papers.shared import NOTHING, File, of_class, rows_in, span, together, wins
from benchmarks.studies.ladder import HALF


def _megakernel(file: File) -> tuple[str, str]:
    document = megakernel.of_batch(file("papers/megakernel/layers") or {"rows": []}, megakernel.BATCH)
    parts: list[str] = []
    staged: dict[str, float | None] = {}
    for accuracy in ("ieee", "fp32"):
        rows = study.rows_of(document, "layers", accuracy)
        ratios = [common.mean(map(over, rows)) for over in (study.over_cudnn, study.over_series, study.over_staged)]
        staged[accuracy] = ratios[2]
        if not all(ratios):
            continue
        gains = [f"{gain:.2f}x" for gain in ratios if gain]
        named = ", ".join(f"{what} {gain}" for what, gain in zip(RIVALS, gains, strict=True))
        parts.append(f" (`{accuracy}` {', '.join(gains)})" if parts else f"over {named}")
    if not parts:
        return NOTHING, NOTHING
    behind = [f"`{accuracy}`" for accuracy, gain in staged.items() if gain and gain < 1]
    verdict = "Mixing pays" + (f"; in {', '.join(behind)} separate kernels win" if behind else "")
    return "".join(parts), verdict


RIVALS = ("cuDNN's", "tasks in series", "`winograd_f4`")


def _textbook(file: File) -> tuple[str, str]:
    document = file("papers/textbook/ladder") or {"rows": []}
    found = textbook._fastest(document, "ieee")
    gains = []
    for layer in dict.fromkeys(name for name, _ in found):
        direct, best = found.get((layer, "direct")), [us for (name, _), (_, us) in found.items() if name == layer]
        if direct:
            gains.append(direct[1] / min(best))
    if not gains:
        return NOTHING, NOTHING
    layers = dict.fromkeys(layer for layer, _ in found)
    fastest = [min((us, rung) for (name, rung), (_, us) in found.items() if name == layer)[1] for layer in layers]
    winners = ", ".join(f"`{name}`" for name in dict.fromkeys(fastest))
    here = f"{winners} {span(gains, '.1f', 'x')} over `direct`"
    behind = textbook.behind(document, "ieee")
    losses = [ratio for ratio in behind if ratio > 1]
    if not losses:
        return here, "Ahead of every rival"
    every = "" if len(losses) == len(behind) else f" on {len(losses)} of {len(behind)}"
    return here, f"{span(losses, '.1f')}x behind the best rival{every}"


def _cuconv(file: File) -> tuple[str, str]:
    document = file("papers/cuconv/survey") or {"rows": []}
    rows = of_class(document, "ieee", "nchw")
    if not rows:
        return NOTHING, NOTHING
    found, everyone = (wins(over(row, "two_stage") for row in rows) for over in (cuconv.over_source, cuconv.over_all))
    here = f"fastest in {found.share * 100:.1f} % of {found.count}"
    here += f", there by {found.mean:.2f}x" if found.mean else ""
    share = f"{everyone.share * 100:.1f} % against all rivals"
    how = "Rarely" if everyone.share < 0.1 else "Often"
    return here, f"{how} best: {share}" if everyone.won else "Never best against all rivals"


def _single_image(file: File) -> tuple[str, str]:
    document = file("papers/single_image/layers") or {"rows": []}
    rows = [row for row in single_image.best_rows(document) if row["class"] == "ieee"]
    gains = [gain for row in rows if (gain := speedup_of(row["us"], single_image.cudnn_us(row)))]
    if not gains:
        return NOTHING, NOTHING
    best = [gain for row in rows if (gain := ratio(row))]
    faster = sum(gain > 1 for gain in best)
    return (
        f"{span(gains, unit='x')} over cuDNN's fusion",
        f"Beats every rival on {faster} of {len(best)} layers",
    )


def _lenet5(file: File) -> tuple[str, str]:
    document = file("papers/lenet5/layers") or {"rows": []}
    network = rows_in(file, "papers/lenet5/network")
    first, parts = lenet5.totals(document, lenet5.FIRST), list[str]()
    n = max(first, default=0)
    for accuracy, arithmetic in lenet5.LADDERS.items():
        if (best := lenet5.best_of_each(document, n, accuracy)) and n in first:
            gain = f"{first[n] / best[1]:.2f}x"
            parts.append(f"{arithmetic} {gain}" if parts else f"best rungs {gain} over `{lenet5.FIRST}`")
    exact = [row for row in network if not row["mode"].startswith(HALF)]
    same = sum(row["accuracy"] == row["torch_accuracy"] for row in exact)
    kept = "Accuracy kept" + ("" if same == len(exact) else f" in {same} of {len(exact)} cases") if exact else NOTHING
    if exact and (beside := lenet5.verdict(document, "ieee")):
        kept += f"; {beside}"
    return ", ".join(parts) or NOTHING, kept


ROWS = (  # title, page, idea, claim, what the files say
    (
        "Winograd megakernel",
        "megakernel",
        "tasks of all stages mixed in one kernel",
        "over cuDNN's non-fused Winograd 1.25x",
        _megakernel,
    ),
    ("Textbook", "textbook", "tiles, then a product that unrolls inside", "each rung is faster", _textbook),
    ("cuConv", "cuconv", "two stages and no transformation", "fastest in 8.31 % of 602, by 1.46x there", _cuconv),
    (
        "Single-image ResNet",
        "single-image",
        "batch 1: Winograd and outer products, norm and ReLU inside",
        "1.18 to 2.09x over cuDNN",
        _single_image,
    ),
    (
        "LeNet-5",
        "lenet5",
        "unrolling inside the product, filter size a constant",
        "each rung is faster, accuracy unchanged",
        _lenet5,
    ),
)


HERE = "here, in class `ieee`"


def _here(found: Callable[[File], tuple[str, str]], files: Mapping[str, File]) -> tuple[str, str, str]:
    """The GPU or GPUs that it is of, the number, the verdict."""
    file, gave = together(files)
    number, verdict = found(file)
    return ", ".join(gpu.upper() for gpu in files if gpu in gave), number, verdict


def table(files: Mapping[str, File]) -> str:
    """A row per source: the idea, the source's claim, the same number here, and what follows."""
    lines = [[f"[{title}]({page}.md)", idea, claim, *_here(found, files)] for title, page, idea, claim, found in ROWS]
    return common.markdown_table(["source", "idea", "its claim", "GPU", HERE, "verdict"], lines)


def readme(files: Mapping[str, File]) -> str:
    """The same in short, for a document that stands above docs."""
    lines = [[f"[{title}](docs/papers/{page}.md)", *_here(found, files)[1:]] for title, page, _, _, found in ROWS]
    return common.markdown_table(["source", HERE, "verdict"], lines)


def _rung_gains(file: File, accuracy: str, before: str, after: str) -> list[float]:
    """Of the textbook's layers: how many times as fast one rung is as another, each in its faster layout."""
    found = textbook._fastest(file("papers/textbook/ladder") or {"rows": []}, accuracy)
    times = [(found.get((layer.layer, before)), found.get((layer.layer, after))) for layer in LAYERS]
    return [first[1] / second[1] for first, second in times if first and second]


def _step_gains(file: File, step: str) -> list[float]:
    return list(lenet5.step_gains(file("papers/lenet5/layers") or {"rows": []}).get(step, {}).values())


def _series_gains(file: File, accuracy: str) -> list[float]:
    document = megakernel.of_batch(file("papers/megakernel/layers") or {"rows": []}, megakernel.BATCH)
    return [gain for row in study.rows_of(document, "layers", accuracy) if (gain := study.over_series(row))]


def _two_stage_gains(file: File) -> list[float]:
    rows = of_class(file("papers/cuconv/survey") or {"rows": []}, "ieee", "nchw")
    return [gain for row in rows if (gain := cuconv.over_source(row, "two_stage"))]


def _fused_gains(file: File, accuracy: str) -> list[float]:
    rows = single_image.best_rows(file("papers/single_image/layers") or {"rows": []})
    found = (speedup_of(row["us"], single_image.cudnn_us(row)) for row in rows if row["class"] == accuracy)
    return [gain for gain in found if gain]


def _fusion_gains(file: File) -> list[float]:
    rows = of_class(file("papers/single_image/layers") or {"rows": []}, "ieee", "nhwc")
    found = (speedup_of(single_image.cudnn_us(row), single_image.eager_us(row)) for row in rows)
    return [gain for gain in found if gain]


def _ideas(file: File) -> list[tuple[str, str, list[float]]]:
    """Idea, what is compared with what, gains."""
    return [
        ("Filters in constant memory", "`direct` in blocks, the textbook's layers",
         _rung_gains(file, "ieee", OWN_DIRECT, OWN_CONSTANT)),
        ("Tiles in shared memory", "`direct_tiled` over `direct`", _rung_gains(file, "ieee", "direct", "direct_tiled")),
        ("A product of the unrolled input", "the textbook's own over `direct_tiled`",
         _rung_gains(file, "ieee", "direct_tiled", OWN_UNROLL)),
        ("cuBLAS's product", "`im2col_gemm` over the textbook's own product",
         _rung_gains(file, "ieee", OWN_UNROLL, "im2col_gemm")),
        ("Unrolling inside the product", "`fused_unroll` over the textbook's own product",
         _rung_gains(file, "ieee", OWN_UNROLL, "fused_unroll")),
        ("The same on tensor cores", "`implicit_gemm` over `fused_unroll`, `fp32`",
         _rung_gains(file, "fp32", "fused_unroll", "implicit_gemm")),
        *((f"LeNet-5, {step}", "both layers, with over without", _step_gains(file, step)) for step in lenet5.ALL_STEPS),
        ("Tasks of all stages in one kernel", "the megakernel over its tasks in series, `ieee`",
         _series_gains(file, "ieee")),
        ("The same on tensor cores", "the megakernel over its tasks in series, `fp32`", _series_gains(file, "fp32")),
        ("Two stages, no transformation", "`two_stage` over cuDNN's best in NCHW, where it was timed",
         _two_stage_gains(file)),
        ("Norm and ReLU inside, batch 1", "cuDNN's fused convolution over PyTorch's passes, `ieee`",
         _fusion_gains(file)),
        ("Our kernels, which fuse as cuDNN's do", "over cuDNN's fused convolution, batch 1, `ieee`",
         _fused_gains(file, "ieee")),
        ("The same on tensor cores", "over cuDNN's fused convolution, batch 1, `fp32`", _fused_gains(file, "fp32")),
    ]  # fmt: skip


def worth(files: Mapping[str, File]) -> str:
    """A row per idea: what is compared with what, and how many times as fast it is, in the geometric mean, at least and
    at most over the layers (or batches) of its experiment."""
    lines = []
    for same in zip(*(_ideas(file) for file in files.values()), strict=True):  # idea by idea, of every GPU
        idea, compared, _ = same[0]
        gpu, gains = next(((gpu, its[2]) for gpu, its in zip(files, same, strict=True) if its[2]), ("", []))
        numbers = (
            [common.times(value) for value in (common.mean(gains), min(gains), max(gains))] if gains else [NOTHING]
        )
        lines.append([idea, compared, gpu.upper(), *numbers, *[""] * (3 - len(numbers)), str(len(gains))])
    return common.markdown_table(["idea", "what over what", "GPU", "mean", "least", "most", "of"], lines)
