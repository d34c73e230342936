"""`python -m benchmarks fit`: on times that models with other constants would have, so that the best fit is known."""

import re
from pathlib import Path

import pytest
import torch

from benchmarks.regret import fit, problems
from fastconv import _C

TIMES = ("launch", "term", "products", "input", "output")
DEFINITION = Path(__file__).parent.parent / fit.DEFINITION
POINTWISE = [(c, k, hw) for c in (64, 256, 1024) for k in (32, 256) for hw in (7, 28, 112)]


def device_head(kind):
    if kind == "cuda":
        return {"cuda": "13.0", "gpu": "NVIDIA H200"}
    return {"cuda": "", "gpu": "a CPU", "threads": 2, "instruction_set": kind}


def rows_of(kind, direction="forward", classes=("fp32",), kernel=1):
    """A row of each layer in both layouts, whose times are the costs as they are now."""
    head, found = device_head(kind), []
    for accuracy in classes:
        dtype = {"fp16": torch.float16}.get(accuracy, torch.float32)
        precision = "tf32" if accuracy == "tf32" else "fp32"
        # Half of them for a GPU, whose models have more constants to be fitted: with each the planner is asked again.
        for c, k, hw in POINTWISE[:: 2 if kind == "cuda" else 1]:
            pad = kernel // 2
            problem = problems.Problem(
                64 if kind == "cuda" else 2, c, hw, hw, k, kernel, kernel, padding=(pad, pad), direction=direction
            )
            for layout in ("nchw", "nhwc"):
                planned = [problem.planned(dtype, precision, layout)]
                costs = {
                    row["name"]: _C.costs_us(row["name"], planned, fit.device_of(head), direction)[0]
                    for row in _C.algorithms()
                }
                us = {name: cost for name, cost in costs.items() if cost < 1e9}
                row = {**problem.fields(), "class": accuracy, "layout": layout, "torch_us": us.pop("torch")}
                found.append({**row, "algorithms": us})
    return {**head, "rows": found}


def worst(rows):
    return max(row["us"] / row["best_us"] for row in rows)


def values(kind):
    return {(row["algorithm"], row["name"]): row["value"] for row in _C.fitted() if row["kind"] == kind}


def changed(kind, **factors):
    """Sets the planner's constants to so many times what they are."""
    for name, value in values(kind).items():
        if ".".join(name) in factors:
            _C.set_fitted(*name, kind, factors[".".join(name)] * value)


CASES = {
    "avx2": ("avx2", "forward", 1, {"im2col_gemm.product": 0.4, "torch.nhwc_1x1": 1.4}),
    "avx512": ("avx512", "forward", 3, {"winograd_staged.products": 2.0, "winograd_megakernel.products": 0.5}),
    "cuda": ("cuda", "forward", 3, {"torch.half_nhwc_products": 0.4, "torch.half_nchw_products": 0.4}),
    "cuda, weight gradient": ("cuda", "backward_weight", 3, {"torch.wgrad_half_products": 2.0}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_fit_finds_what_is_the_fastest(case):
    kind, direction, kernel, factors = CASES[case]
    classes = ("fp16",) if kind == "cuda" else ("fp32",)
    with fit.restored():
        before = values(kind)
        changed(kind, **factors)
        document = rows_of(kind, direction, classes, kernel)
        for name, value in before.items():
            _C.set_fitted(*name, kind, value)
        outcome = fit.fit([document], folds=0)
        assert worst(outcome.before) > 1.1
        assert worst(outcome.after) < 1.1
        # The planner has them now, and the outcome says which.
        for name, (was, found) in outcome.constants.items():
            assert was == before[name]
            assert values(kind)[name] == found == float(f"{found:.3g}")
    assert values(kind) == before


def test_rows_to_judge_by_are_not_fitted_and_every_problem_is_held_out_once():
    with fit.restored():
        document = rows_of("avx2")
        for row in document["rows"][::3]:
            row["split"], row["torch_us"] = "judge", 1.0  # no fit to the others makes PyTorch the choice of all these
        judged = [row for row in document["rows"] if row["split"] == "judge"]
        one = fit.fit([document], ["torch", "im2col_gemm"], folds=3)
        constants = values("avx2")
    with fit.restored():
        document["rows"] = [row for row in document["rows"] if row["split"] == "fit"]
        other = fit.fit([document], ["torch", "im2col_gemm"], folds=0)
        assert values("avx2") == constants
    assert one.constants == other.constants
    assert {name for name, _ in one.constants} == {"torch", "im2col_gemm"}
    assert len(one.before) == len(one.after) == len(other.after) + len(judged)
    keys = [(row["layer"], row["layout"]) for row in one.held_out]
    assert sorted(keys) == sorted((row["layer"], row["layout"]) for row in other.after)


def test_what_was_given_up_counts_as_hopeless():
    document = rows_of("avx2")
    row = document["rows"][0]
    row["algorithms"], row["torch_us"] = {"direct": 10.0}, None
    (rows,) = [fit.Rows(document["rows"][:1], fit.device_of(document), "forward")]
    assert rows.chosen_rows()[0]["us"] == fit.timing.HOPELESS * 10.0


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ([], "files are of nothing"),
        (["avx2", "avx512"], "avx2, avx512"),
        (["generic"], "instruction_set"),
        (["avx2"], "no row of split fit"),
    ],
)
def test_files_without_anything_to_fit_are_refused(heads, message):
    with pytest.raises(ValueError, match=message):
        fit.fit([{**device_head(kind), "rows": []} for kind in heads])


def test_a_gpu_without_rates_is_refused():
    with pytest.raises(ValueError, match="'NVIDIA Nothing'"):
        fit.device_of({**device_head("cuda"), "gpu": "NVIDIA Nothing"})


def test_the_planner_has_what_the_file_says(tmp_path):
    listed = re.findall(r"^FASTCONV_(CPU|CUDA|TIMES)\((\w+), (\w+), (.*)\)$", DEFINITION.read_text(), re.MULTILINE)
    said = {}
    for device, algorithm, name, numbers in listed:
        if device == "TIMES":
            its = list(map(float, numbers.split(", ")))
            for part, start, value in zip(TIMES, its[:5], its[5:], strict=True):
                assert start / 8 <= value <= (8 * start or 10)
                said[algorithm, f"{name}_{part}", "cuda"] = value
            continue
        lower, upper, *its = map(float, numbers.split(", "))
        for kind, value in zip(("avx2", "avx512") if device == "CPU" else ("cuda",), its, strict=True):
            assert lower <= value <= upper
            said[algorithm, name, kind] = value
    assert said == {(row["algorithm"], row["name"], row["kind"]): row["value"] for row in _C.fitted()}
    assert {algorithm for algorithm, *_ in said} - {row["name"] for row in _C.algorithms()} == {"winograd_staged"}

    path = tmp_path / "fitted.def"
    path.write_text(DEFINITION.read_text())
    first = next(name for *name, kind in said if kind == "avx512")
    fit.write(path, "avx512", {tuple(first): 3.25})
    before, after = DEFINITION.read_text().splitlines(), path.read_text().splitlines()
    differing = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert len(differing) == 1
    assert differing[0][1] == re.sub(r"[^ ]+\)$", "3.25)", differing[0][0])

    before = path.read_text()
    fit.write(path, "cuda", {("torch", "plain_1x1_nhwc_products"): 2.25})
    line = next(line for line in before.splitlines() if line.startswith("FASTCONV_TIMES(torch, plain_1x1_nhwc, "))
    numbers = line.split(", ")
    numbers[2 + len(TIMES) + TIMES.index("products")] = "2.25"
    assert path.read_text() == before.replace(line, ", ".join(numbers))
