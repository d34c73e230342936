"""What a report says of calls: what ran, and whether channels_last is expected to pay."""

import json
import pickle

import pytest
import torch
from torch import nn

import fastconv
from fastconv import _C, ops

NHWC = torch.channels_last


@pytest.fixture
def planned_for_h200(monkeypatch):
    monkeypatch.setattr(ops, "device_info", lambda device: _C.h200_device())


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()).eval()


def estimates(*channels: tuple[int, int]) -> list[float]:
    """Of these layers in NCHW and in NHWC, of an input of 1x..x28x28."""
    problems = [
        [_C.ConvProblem(1, c, 28, 28, k, 3, 3, padding=(1, 1), layout=layout) for c, k in channels]
        for layout in ("nchw", "nhwc")
    ]
    return [sum(_C.choose("auto", each, _C.h200_device())["cost_us"] for each in layers) for layers in problems]


@pytest.mark.parametrize(("algorithm", "ran"), [("torch", 0), ("im2col_gemm", 2)])
def test_the_headline_counts_where_an_algorithm_of_ours_ran(algorithm, ran):
    model = network()
    report = fastconv.swap_(model, algorithm=algorithm)
    assert report.ours is None
    assert str(report).startswith("fastconv: 2 of 2 convolutions swapped\n")
    with torch.no_grad():
        model(torch.randn(1, 3, 8, 8))
    assert report.ours == json.loads(report.to_json())["ours"] == ran
    title = f"fastconv: 2 of 2 convolutions swapped; an algorithm of fastconv's own ran in {ran}\n"
    assert str(report).startswith(title)
    again = fastconv.swap_(model)
    assert str(again).startswith(title.replace("2 of 2", "0 of 2").replace(";", ", 2 already swapped;"))
    report.undo()
    assert "ran in" not in str(report)


@pytest.mark.usefixtures("planned_for_h200")
@pytest.mark.parametrize("front_end", ["swap_", "fuse"])
def test_layers_in_nchw_where_channels_last_is_expected_to_pay(front_end):
    model = network()
    report = fastconv.swap_(model) if front_end == "swap_" else None
    model = model if report else fastconv.fuse(model)
    x = torch.randn(1, 3, 28, 28)

    def advice() -> str:
        found = report or model.report
        assert json.loads(found.to_json())["advice"] == found.advice
        assert (found.advice in str(found).splitlines()) == (found.advice != "")
        return found.advice

    assert advice() == ""
    nchw, nhwc = estimates((3, 64), (64, 64))
    assert nchw > nhwc
    with torch.no_grad():
        model(x)
        assert advice() == (
            f"2 layers got contiguous (NCHW) input; channels_last is estimated {nchw / nhwc:.2f} times as fast for "
            "them: model.to(memory_format=torch.channels_last), and its input"
        )
        model(x.to(memory_format=NHWC))
        assert advice() == ""
        model.to(memory_format=NHWC)(x)  # converted by the first layer
        assert advice() == ""


@pytest.mark.usefixtures("planned_for_h200")
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(1, 8, 3), (2, 1, 9, 9)),  # both formats
        (nn.Conv2d(8, 8, 1), (2, 8, 1, 1)),
        (nn.Conv1d(8, 8, 3), (2, 8, 9)),
        (nn.ConvTranspose2d(8, 8, 3), (2, 8, 9, 9)),  # of which there is no estimate
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_no_advice(layer, shape):
    model = nn.Sequential(layer)
    report = fastconv.swap_(model)
    with torch.no_grad():
        model(torch.randn(shape))
    assert report.rows[0].last_input_shape == shape
    assert report.advice == ""


def test_no_advice_where_the_planner_expects_nothing_of_it(monkeypatch):
    model, x = network(), torch.randn(1, 3, 28, 28)
    report = fastconv.swap_(model)
    with torch.no_grad():
        model(x)
    monkeypatch.setattr(ops, "choose", lambda algorithm, problem, device: {"cost_us": 2.0})
    assert report.advice == ""
    costs = iter([3.0, 2.0, 1.0, 2.0])  # NCHW and NHWC of each layer: together they are the same
    monkeypatch.setattr(ops, "choose", lambda algorithm, problem, device: {"cost_us": next(costs)})
    assert report.advice == ""


def test_a_report_from_a_file_advises_nothing():
    model = network()
    report = fastconv.swap_(model)
    with torch.no_grad():
        model(torch.randn(1, 3, 28, 28))
    copied = pickle.loads(pickle.dumps(report))
    assert (copied.ours, copied.advice) == (None, "")
    with pytest.warns(UserWarning, match="which a copy of a report does not follow"):
        copied.undo()
    assert not copied.undone
    assert any(isinstance(module, fastconv.Conv2d) for module in model.modules())
