"""Packing as a part of a call's time: where the weight is not packed before, `auto` counts it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from choices import activate, choice
from torch import nn

import fastconv
from benchmarks.harness import ours, results
from benchmarks.regret import fit
from fastconv import _C, ops

pytestmark = pytest.mark.usefixtures("full_precision")
CPU = torch.device("cpu")
RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
PACKED = {"implicit_gemm", "winograd_f2", "winograd_f4", "winograd_megakernel", "winograd_fused"}


def square(c: int, size: int, **more: Any) -> _C.ConvProblem:
    return _C.ConvProblem(1, c, size, size, c, 3, 3, padding=(1, 1), **more)


def test_what_packs_takes_longer_and_the_rest_does_not():
    h200 = _C.h200_device()
    for device in (h200, _C.cpu_device(2)):
        rows = zip(
            _C.candidates(square(64, 28), device), _C.candidates(square(64, 28, packs=True), device), strict=True
        )
        for before, packing in rows:
            assert before["packing_us"] == 0
            assert packing["cost_us"] == pytest.approx(before["cost_us"] + packing["packing_us"])
            assert (packing["packing_us"] > 0) == (packing["ok"] and packing["algorithm"] in PACKED)
    row = _C.choose("winograd_f4", square(64, 28, packs=True), h200)
    moved = 4 * 64 * 64 * 9 + row["packed_bytes"]
    assert row["packing_us"] == pytest.approx(3.0 + 1e6 * moved / (0.8 * h200.bandwidth_bytes_per_s))


def test_the_problem_and_its_explanation_say_so():
    assert square(8, 9) != square(8, 9, packs=True)
    assert repr(square(8, 9, packs=True)) == f"{square(8, 9)!r} packed in the call"
    sizes = (1, 64, 7, 7), (64, 64, 3, 3)
    explained = [fastconv.explain(*sizes, padding=1, device="cpu", packs=packs) for packs in (False, True)]
    costs = [{row.algorithm: row.cost_us for row in each.rows} for each in explained]
    assert costs[1]["winograd_f4"] > costs[0]["winograd_f4"]
    assert costs[1]["direct"] == costs[0]["direct"]


# What rows say of packing on a CPU is of before it was written anew, sixteen filters at a time: half of it, and less,
# by now. Those of an H100 have the clearing of what is packed in it, which calls do not do.
@pytest.mark.parametrize(
    ("file", "share", "rows", "as_packed_before", "left"),
    [
        ("cpu/layers_cpu", 0.5, 40, 8, 0),
        ("h100/layers", 1.0, 208, 44, 1),
        ("h100/layers_strided", 1.0, 53, 26, 0),
        ("h100/layers_pointwise", 1.0, 25, 9, 0),
        ("h100/layers_stems", 1.0, 24, 6, 0),
    ],
)
def test_with_packing_in_the_call_the_choice_is_not_slower_than_pytorch(file, share, rows, as_packed_before, left):
    """Layers at batch 1 whose choice packs, if the weight was packed before: of so many rows how many would be slower
    than 1.1 times PyTorch's if the packing were not counted, and how many are left (docs/log/137-one-commit.md)."""
    document = results.read(RESULTS / f"{file}.json")
    device, chosen, unaware = fit.device_of(document), [], []
    for row in document["rows"]:
        if row["us_with_packing"] is None or row["algorithm"] not in PACKED:
            continue
        pair = lambda name, row=row: (row[name], row[name])  # noqa: E731
        problem = _C.ConvProblem(
            row["n"], row["c"], row["h"], row["w"], row["k"], row["r"], row["s"], pair("stride"), pair("padding"),
            pair("dilation"), row["groups"], ops.dtype_name(ours.dtype_of(row["class"])),
            ours.precision_of(row["class"]), row["layout"], packs=True,
        )  # fmt: skip
        packing, pytorch = share * (row["us_with_packing"] - row["us"]), row["peers"][f"torch_{row['layout']}"]
        plan = _C.choose("auto", problem, device)
        took = row["algorithms"] | {row["algorithm"]: row["us"] + packing, "torch": pytorch}
        if row["class"] == "tf32":  # these rows' is in FP32 arithmetic; in TF32 it takes what PyTorch does (log 143)
            took["im2col_gemm"] = pytorch
        expected = 0.0 if plan["algorithm"] == row["algorithm"] else plan["packing_us"]
        chosen.append((took[plan["algorithm"]] + expected) / pytorch)
        unaware.append(took[row["algorithm"]] / pytorch)
    assert len(chosen) == rows
    assert sum(ratio > 1.1 for ratio in unaware) == as_packed_before
    assert sum(ratio > 1.1 for ratio in chosen) == left


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def layer(two_threads):
    """With an input of which packing decides what is the fastest."""
    device = ops.device_info(CPU)
    for c, size in ((64, 14), (128, 14), (256, 7)):
        kept, packed = (_C.choose("auto", square(c, size, packs=packs), device)["algorithm"] for packs in (False, True))
        if kept in PACKED and packed not in PACKED:
            conv = nn.Conv2d(c, c, 3, padding=1, bias=False)
            return conv, torch.randn(1, c, size, size), kept, packed
    pytest.fail("packing decides nowhere")


def test_compiled_code_packs_in_the_call_unless_it_is_frozen(layer):
    conv, x, kept, packed = layer
    conv.requires_grad_(False)
    expected = conv(x)
    for frozen, algorithm in ((False, packed), (True, kept)):
        torch._dynamo.reset()
        compiled = fastconv.compile(conv, frozen=frozen)
        with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):  # else the report may be empty
            torch.testing.assert_close(compiled(x), expected, rtol=1e-3, atol=1e-3)
        assert [row.algorithm for row in compiled.report.rows] == [algorithm]


def test_the_operator_packs_in_the_call(layer):
    conv, x, _, packed = layer
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: fastconv.conv2d(x, w, padding=1), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, conv.weight.detach()), conv(x), rtol=1e-3, atol=1e-3)
    assert fastconv.last_call()["algorithm"] == packed


def test_a_layer_keeps_its_packing_until_it_is_trained(layer):
    conv, x, kept, packed = layer
    fastconv.swap_(conv)
    with torch.no_grad():
        conv(x)
    assert conv.last_algorithm == kept
    conv(x.requires_grad_()).sum().backward()
    assert conv.last_algorithm == packed
    conv.weight.requires_grad_(False)
    for _ in range(2):  # what the first call left to be packed is the layer's choice, too
        conv(x)
        assert conv.last_algorithm == kept


def test_an_input_gradient_packs_in_the_call():
    device = _C.cpu_device(2)
    small, large = (_C.choose_input_gradient("auto", square(64, size), device) for size in (7, 112))
    assert (small["name"], small["code"]) == ("torch", "cost")
    assert large["method"] == "phases"
    assert "packed in the call" in repr(large["convolution"])
    assert _C.is_left_to_torch("auto", square(64, 7), device)
    assert not _C.is_left_to_torch("auto", square(64, 112), device)
    # On a GPU that was measured with the flipping.
    assert "packed" not in repr(_C.choose_input_gradient("auto", square(64, 56), _C.h200_device())["convolution"])


def test_what_was_measured_of_packed_weights_holds_where_packing_is_nothing():
    device = ops.device_info(CPU)
    small, large = square(64, 7), square(8, 150)
    for problem in (small, large):
        activate(choice("winograd_f2", problem))
        packing = square(problem.c, problem.h, packs=True)
        found = _C.choose("auto", packing, device)
        assert (found["algorithm"] == "winograd_f2" and found["measured"]) == (problem == large)
        activate(choice("winograd_f2", problem), choice("winograd_f4", packing))
        assert _C.choose("auto", packing, device)["algorithm"] == "winograd_f4"
        assert _C.choose("auto", problem, device)["algorithm"] == "winograd_f2"
        activate(choice("winograd_f4", packing))  # of the weight that a step has changed, where nothing else was
        assert _C.choose("auto", problem, device)["algorithm"] == "winograd_f4"
    activate()
