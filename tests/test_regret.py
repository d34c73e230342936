"""`fastconv bench regret`: its problems, rows and summary. Times are looked at for their arithmetic alone."""

import json
import math

import pytest
import torch
from torch import nn

from benchmarks.harness import results
from benchmarks.regret import contest, problems, suite, summary
from fastconv import _C, demo, ops

SMALL = problems.Problem(1, 8, 9, 7, 16, 3, 3, padding=(1, 1), split="judge", networks=("a",))


def test_a_problem_is_read_from_every_way_of_writing_it():
    sizes = {"n": 2, "c": 4, "h": 9, "w": 8, "k": 6, "r": 3, "s": 1}
    expected = problems.Problem(2, 4, 9, 8, 6, 3, 1, (2, 1), (1, 0), (1, 1), 2, "backward_weight")
    rest = {"groups": 2, "pass": "backward_weight"}
    halves = {"stride_h": 2, "stride_w": 1, "dilation_h": 1, "dilation_w": 1}
    for row in (
        {**sizes, **rest, "stride": [2, 1], "padding": [1, 0]},
        {**sizes, **rest, **halves, "pad_h": 1, "pad_w": 0},
        {**sizes, **rest, **halves, "padding_h": 1, "padding_w": 0},
    ):
        assert problems.from_row(row) == expected
    assert problems.from_row(expected.fields()) == expected
    assert (expected.p, expected.q) == tuple(torch.nn.functional.conv2d(
        torch.zeros(2, 4, 9, 8), torch.zeros(6, 2, 3, 1), stride=(2, 1), padding=(1, 0), groups=2
    ).shape[2:])  # fmt: skip


@pytest.mark.parametrize(
    ("row", "message"), [({"n": 1}, "no c"), ({"pass": "sideways"}, "pass is"), ({"split": "all"}, "split is")]
)
def test_what_is_no_problem_is_refused(row, message):
    sizes = dict.fromkeys("nchwkrs", 3) if "n" not in row else {}
    with pytest.raises(ValueError, match=message):
        problems.from_row(sizes | row)


def test_a_file_holds_each_problem_once_with_all_its_networks(tmp_path):
    path = tmp_path / "problems.json"
    row = dict.fromkeys("nchwkrs", 3)
    path.write_text(json.dumps([{**row, "networks": ["a"]}, {**row, "networks": ["b"], "layer": "x"}, {**row, "k": 4}]))
    first, second = problems.read(path)
    assert first.networks == ("a", "b")
    assert second.k == 4


def test_a_sample_of_the_corpus_is_the_same_every_time_and_of_one_side():
    passes = ["forward", "backward_weight"]
    drawn = problems.of_corpus(20, 3, passes, ["judge"])
    assert drawn == problems.of_corpus(20, 3, passes, ["judge"]) != problems.of_corpus(20, 4, passes, ["judge"])
    assert {(each.split, each.direction) for each in drawn} == {("judge", direction) for direction in passes}
    assert len(drawn) == 40


def test_the_problems_of_a_network_are_those_that_it_runs():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, (1, 3), groups=2), nn.Conv2d(8, 8, (1, 3), groups=2)
    )
    with torch.device("meta"):
        found = problems._record(model.to("meta"), torch.empty(2, 3, 16, 16))
    assert found == {
        problems.Problem(2, 3, 16, 16, 8, 3, 3, (2, 2), (1, 1)): 1,
        problems.Problem(2, 8, 8, 8, 8, 1, 3, groups=2): 1,
        problems.Problem(2, 8, 8, 6, 8, 1, 3, groups=2): 1,
    }
    squeezed = problems.of_networks(["squeezenet1_1"], 2, 64)
    assert squeezed[0].fields()["n"] == 2
    assert len(squeezed) == len(set(squeezed)) > 10


@pytest.mark.parametrize("direction", problems.PASSES)
def test_rows_hold_what_auto_takes_and_the_best(tmp_path, direction):
    path = tmp_path / "regret.json"
    problem = problems.Problem(**{**vars(SMALL), "direction": direction})
    document = suite.run([problem], rounds=1, out=path, report=lambda text: None)
    assert results.problems(json.loads(path.read_text())) == []
    assert [row["layout"] for row in document["rows"]] == ["nchw", "nhwc"]
    for row in document["rows"]:
        assert (row["pass"], row["split"], row["n"], row["k"]) == (direction, "judge", 1, 16)
        rivals = [*row["algorithms"].values(), row["torch_us"]]
        assert row["best_us"] == min(rivals)
        assert row["us"] == row["algorithms"][row["algorithm"]]
        assert contest.regret(row) >= 1
        assert row["measured_us"] == row["algorithms"].get(row["measured"])  # without a time if it is of another method
        if direction == "forward":
            planned = problem.planned(torch.float32, "fp32", row["layout"])
            assert row["algorithm"] == _C.choose("auto", planned, ops.device_info(torch.device("cpu")))["algorithm"]


def test_resuming_measures_only_what_is_not_held(tmp_path, monkeypatch):
    path, asked = tmp_path / "regret.json", []

    def measure(problem, accuracy, layouts, *_):
        asked.append(problem)
        base = {"class": accuracy, "us": 1.0, "algorithm": "torch", "best": "torch", "best_us": 1.0, "torch_us": 1.0}
        return [
            {**problem.fields(), **base, "layout": layout, "algorithms": {}, "floor_us": None} for layout in layouts
        ]

    monkeypatch.setattr(contest, "measure", measure)
    other = problems.Problem(**{**vars(SMALL), "stride": (2, 1)})
    quiet = {"out": path, "report": lambda text: None}
    suite.run([SMALL], **quiet)
    document = suite.run([SMALL, other], resume=True, **quiet)
    assert asked == [SMALL, other]
    assert len(document["rows"]) == 4
    document = suite.run([SMALL, other], budget_s=-1.0, **quiet)
    assert asked == [SMALL, other]
    assert document["missing"] == ["2 problems: the time was over"]


@pytest.mark.usefixtures("forked_workers")
def test_two_workers_measure_every_problem_once(tmp_path):
    path, strided = tmp_path / "regret.json", problems.Problem(**{**vars(SMALL), "stride": (2, 1)})
    others = [problems.Problem(**{**vars(SMALL), "direction": direction}) for direction in problems.PASSES[1:]]
    quiet = {"rounds": 1, "out": path, "report": lambda text: None}
    first = suite.run([SMALL, strided, *others], workers=2, **quiet)
    assert results.read(path) == first
    assert sorted(map(suite._key_of, first["rows"])) == sorted(
        suite._key(problem, "fp32", layout) for problem in (SMALL, strided, *others) for layout in ("nchw", "nhwc")
    )
    assert all(row["us"] and row["torch_us"] for row in first["rows"])
    # What the file has stays when it is resumed, whichever worker finds it there.
    wider = problems.Problem(**{**vars(SMALL), "k": 24})
    both = suite.run([SMALL, strided, wider], workers=2, resume=True, **quiet)
    assert both["rows"][: len(first["rows"])] == first["rows"]
    assert [row["k"] for row in both["rows"][len(first["rows"]) :]] == [24, 24]
    assert [file.name for file in tmp_path.iterdir()] == ["regret.json"]


def test_a_command_line_does_not_grow_with_the_problems(tmp_path):
    lengths = []
    for count in (1, 5000):
        plan = suite._Plan([vars(SMALL)] * count, ["fp32"], ["nchw"], 1, None, "cuda", str(tmp_path / "regret.json"))
        lengths.append(sum(map(len, suite._command(plan, 0, {}))))
    assert lengths[0] == lengths[1]


def test_the_summary_is_of_the_rows():
    rows = [
        {
            "us": us,
            "best_us": 1.0,
            "torch_us": 2.0,
            "class": "fp32",
            "pass": "forward",
            "layout": "nchw",
            "split": "fit",
        }
        for us in (1.0, 1.0, 2.0, 4.0)
    ] + [{"us": None, "best_us": None, "torch_us": 1.0}]
    found = summary.summary(rows)
    assert found == summary.Summary(4, pytest.approx(math.pow(8, 1 / 4)), pytest.approx(3.7), 4.0, 0.25)
    assert summary.summary(rows[4:]) is None


def test_the_demo_says_that_a_network_became_slower():
    fields = {name: 0 for name in demo.Pass.__dataclass_fields__} | {"network": "vgg16", "algorithm": "auto", "ran": {}}
    assert demo.Pass(**fields | {"ms": 102.0, "peer_ms": 100.0}).slowdown is None
    text = demo.Pass(**fields | {"ms": 150.0, "peer_ms": 100.0}).slowdown
    assert text is not None
    assert "slower than PyTorch" in text
    assert "1.50 times" in text
    assert "tune" in text
