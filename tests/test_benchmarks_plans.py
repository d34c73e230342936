"""cuDNN's plans of earlier runs: tried in the place of a search over all."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from test_benchmarks import HEAD, layer_row
from test_benchmarks_rivals import FakeGraph, fake_plans  # noqa: F401 (a fixture)

from benchmarks.harness import results
from benchmarks.layers import group, plans
from benchmarks.layers import suite as layer_suite
from benchmarks.peers import cudnn_graph
from benchmarks.phases import CARD, PHASES, Step
from fastconv import environment
from fastconv.models.layers import select


def search(graph: FakeGraph, *earlier: str) -> tuple[str, list[str]]:
    """In words how the plan was found, and what was built."""
    built: list[str] = []
    words = cudnn_graph.search(graph, False, lambda y: "", announce=built.append, earlier=earlier)[1]
    return words, list(dict.fromkeys(built))


@pytest.mark.usefixtures("fake_plans")
def test_only_plans_that_won_before_and_the_first_proposals_are_tried() -> None:
    graph = FakeGraph(20, 30, 2, 40, 10)
    once = "engine 10 (); 5 of 7 plans ran, in earlier searches"
    assert search(graph, "engine 10 (); 5 of 7 plans ran") == (once, ["engine 10", "engine 20", "engine 30"])
    assert search(graph, once)[0] == once
    twice = "engine 10 (); 5 of 7 plans ran", "engine 2 (); 6 of 7 plans ran"
    assert search(graph, *twice)[0] == "engine 2 (); 6 of 7 plans ran, in earlier searches"
    proposed = FakeGraph(1, 30, 10)  # faster than what had won
    assert search(proposed, once)[0] == "engine 1 (); 5 of 7 plans ran, in earlier searches"


@pytest.mark.usefixtures("fake_plans")
def test_each_plan_that_won_is_tried_however_long_it_takes_to_build() -> None:
    earlier = "engine 10 (); 5 of 7 plans ran", "engine 2 (); 6 of 7 plans ran"
    words = cudnn_graph.search(FakeGraph(20, 10, 2), False, lambda y: "", seconds=-1.0, earlier=earlier)[1]
    assert words == "engine 2 (); 6 of 7 plans ran, in earlier searches"


@pytest.mark.usefixtures("fake_plans")
def test_all_are_searched_where_no_such_plan_is_left() -> None:
    assert search(FakeGraph(20, 30, 2), "engine 10 (); 5 of 7 plans ran")[0] == "engine 2 (); 3 of 3 plans ran"


def plan_file(path: Path, *rows: results.Row, **head: Any) -> Path:
    results.write(path, {**HEAD, **head, "rows": list(rows)})
    return path


def test_plans_are_those_of_the_problem_and_of_who_has_its_rivals(tmp_path: Path) -> None:
    (res1,) = select(["res1"])
    words = {"cudnn_graph_nhwc": "engine 1 (); 2 of 2 plans ran", "cutlass_3xtf32": "a tile"}
    files = [
        str(plan_file(tmp_path / "a.json", layer_row("res1", "fp32", 1.0, 2.0, peer_plans=words))),
        str(plan_file(tmp_path / "b.json", layer_row("res1", "tf32", 1.0, 2.0), layer_row("res2", "fp32", 1.0, 2.0))),
    ]
    expected = {"cudnn_graph_nhwc": ["engine 1 (); 2 of 2 plans ran"]}
    assert plans.known(files, res1, 64, "ieee", "forward") == expected
    assert (
        plans.known([files[0], files[0]], res1, 64, "fp32", "forward")["cudnn_graph_nhwc"]
        == 2 * expected["cudnn_graph_nhwc"]
    )
    for other in ((1, "fp32", "forward"), (64, "tf32", "forward"), (64, "fp32", "backward_input")):
        assert not plans.known(files, res1, *other)
    assert not plans.known([], res1, 64, "fp32", "forward")


def test_a_suite_gives_a_layer_its_plans_and_refuses_those_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = environment.describe("layers", "cpu")
    words = {"cudnn_graph_nchw": "engine 1 (); 2 of 2 plans ran"}
    rows = [layer_row("res1", "fp32", 1.0, 2.0, n=1, peer_plans=words)]
    path = plan_file(tmp_path / "plans.json", *rows, gpu="of another", cudnn=head["cudnn"])
    seen = []
    monkeypatch.setattr(group, "measure", lambda its, *_: seen.append(its.known_plans) or [])
    options: dict[str, Any] = {"layers": ["res1"], "device": "cpu", "out": tmp_path / "l.json"}
    layer_suite.run([1], plans=[path], **options)
    assert seen == [{"cudnn_graph_nchw": ["engine 1 (); 2 of 2 plans ran"]}]
    plan_file(path, *rows, cudnn="8.0.0")
    with pytest.raises(ValueError, match=r"cudnn '8.0.0'; expected"):
        layer_suite.run([1], plans=[path], **options)


def test_steps_of_layers_take_the_plans_of_their_suite(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    plan_file(folders[0] / "layers.json")
    plan_file(folders[1] / "layers.json")
    steps = [step for phase in PHASES.values() for queue in phase.queues for step in queue]
    for step in steps:
        taken = step.arguments(tmp_path, 5.0, folders)[len(step.arguments(tmp_path, 5.0)) :]
        files = [str(folder / "layers.json") for folder in folders[:2]]
        assert taken == (["--plans", files[0], "--plans", files[1]] if step.suite == "layers" else [])
    assert Step("layers", ("networks",)).arguments(tmp_path, 5.0, folders)[-1] == "--resume"


def test_a_larger_card_has_more_processes(tmp_path: Path) -> None:
    step = Step("layers", ("layers", "--workers", "4"))
    for memory, workers in ((CARD, 4), (CARD // 2, 4), (150 * 10**9, 7)):
        arguments = step.arguments(tmp_path, 5.0, memory=memory)
        assert [int(its) for before, its in itertools.pairwise(arguments) if before == "--workers"][-1] == workers
    assert "--workers" not in Step("host", ("host",)).arguments(tmp_path, 5.0, memory=3 * CARD)
