"""What `compile(frozen=True)` made of a module is made again when parameters have changed; copies are frozen, too."""

import copy
import json
import pickle
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layers import relative_error
from rewriting import check
from torch import Tensor, nn

import fastconv
from fastconv.compiler import inductor
from fastconv.rewrites import Asked
from fastconv.rewrites.report import RewriteReport

pytestmark = pytest.mark.usefixtures("full_precision")


class Model(nn.Module):
    """Two graphs: what Dynamo compiles behind a break is code of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        torch._dynamo.graph_break()
        return self.b(y)


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Every graph that is compiled, with its parameters as they are then for good: as Inductor, without its code."""
    made: list[Any] = []

    def compile_graph(graph: Any, *_: Any) -> Callable[..., Any]:
        made.append(copy.deepcopy(graph))
        return made[-1].forward

    torch._dynamo.reset()
    monkeypatch.setattr(inductor, "compile_graph", compile_graph)
    with torch._dynamo.config.patch(recompile_limit=3):  # behind which Dynamo gives up
        yield made


def other(module: nn.Module) -> dict[str, Tensor]:
    return {name: torch.randn_like(value) for name, value in module.state_dict().items()}


def change_and_refresh(refreshed: str) -> Callable[[Model, Any], None]:
    def change(model: Model, compiled: Any) -> None:
        for parameter in model.parameters():
            parameter.data.mul_(3)
        fastconv.refresh({"model": model, "compiled": compiled, "inner": model.b}[refreshed])

    return change


CHANGES: dict[str, Callable[[Model, Any], None]] = {
    "load_state_dict": lambda model, _: model.load_state_dict(other(model)),
    "load_state_dict of the compiled one": lambda _, compiled: compiled.load_state_dict(other(compiled)),
    "load_state_dict of a module in it": lambda model, _: model.b.load_state_dict(other(model.b)),
    "refresh": change_and_refresh("model"),
    "refresh of the compiled one": change_and_refresh("compiled"),
    "refresh of a module in it": change_and_refresh("inner"),
}


@torch.no_grad()
@pytest.mark.parametrize("name", CHANGES)
def test_it_is_compiled_again(name: str, graphs: list[Any]) -> None:
    model, x = Model().eval(), torch.randn(2, 3, 6, 5)
    compiled = fastconv.compile(model, frozen=True)
    for again in range(torch._dynamo.config.recompile_limit + 2):
        for _ in range(2):
            assert relative_error(compiled(x), model(x)) < 1e-6
        assert len(graphs) == 2 * (again + 1)
        CHANGES[name](model, compiled)


@torch.no_grad()
@pytest.mark.parametrize("how", ["load_state_dict", "refresh"])
def test_a_module_that_came_later_is_one_of_the_models(how: str, graphs: list[Any]) -> None:
    model, x = Model().eval(), torch.randn(2, 3, 6, 5)
    compiled = fastconv.compile(model, frozen=True)
    compiled(x)
    model.b = nn.Conv2d(8, 8, 1)
    assert relative_error(compiled(x), model(x)) < 1e-6
    if how == "refresh":
        model.b.weight.data.mul_(3)
        fastconv.refresh(model.b)
    else:
        model.b.load_state_dict(other(model.b))
    assert relative_error(compiled(x), model(x)) < 1e-6


@torch.no_grad()
@pytest.mark.parametrize("inner", [torch.compile, fastconv.compile])
def test_a_model_that_is_compiled_already(inner: Callable[..., Any], graphs: list[Any]) -> None:
    model, x = Model().eval(), torch.randn(2, 3, 6, 5)
    compiled = fastconv.compile(inner(model), frozen=True)
    assert relative_error(compiled(x), model(x)) < 1e-6
    model.load_state_dict(other(model))
    assert relative_error(compiled(x), model(x)) < 1e-6


@torch.no_grad()
@pytest.mark.parametrize("frozen", [False, True])
def test_without_dynamo_the_model_is_as_it_was(frozen: bool) -> None:
    model, x = Model().eval(), torch.randn(2, 3, 6, 5)
    before = dict(vars(model))
    compiled = fastconv.compile(model, frozen=frozen, disable=True)
    assert relative_error(compiled(x), model(x)) == 0
    assert (vars(model), compiled.report.graphs) == (before, [])
    for twin in (copy.deepcopy(compiled), pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert relative_error(twin(x), model(x)) == 0
    compiled = fastconv.compile(torch.relu, frozen=frozen, disable=True)
    assert relative_error(compiled(x), torch.relu(x)) == 0
    assert not hasattr(torch.relu, "report")


def test_inductors_switch_is_as_it_was_when_the_last_thread_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the switch is the process's, as in older PyTorch, whichever thread is the last."""
    config = SimpleNamespace(freezing=False)
    monkeypatch.setattr(torch._inductor, "config", config)
    switch = fastconv.compiler._Switch()
    assert not switch._is_of_a_thread
    assert not config.freezing
    first, second = switch.enter(), switch.enter()
    switch.leave(first)
    assert config.freezing
    switch.leave(second)
    assert not config.freezing


def test_inductors_switch_is_a_threads(graphs: list[Any]) -> None:
    from torch._inductor import config

    switch, found = fastconv.compiler._Switch(), []
    before = switch.enter()
    thread = threading.Thread(target=lambda: found.append((switch.leave(switch.enter()), config.freezing)))
    thread.start(), thread.join()
    assert config.freezing
    switch.leave(before)
    assert not config.freezing


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (Model, {}, "model is a type; expected a torch.nn.Module or a function"),
        (torch.relu, {"options": ["shape_padding"]}, "options is a list; expected a dict"),
        (torch.relu, {"options": {"guard_filter_fn": 3}}, "guard_filter_fn is 3; expected a function"),
    ],
)
def test_what_is_no_model_and_no_option(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        fastconv.compile(model, **options)


@torch.no_grad()
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("how", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies(how: Callable[[Any], Any], frozen: bool) -> None:
    model, x = Model().eval(), torch.randn(2, 3, 6, 5)
    compiled = fastconv.compile(model, "fp32", frozen=frozen)
    compiled(x)
    twin = how(compiled)
    assert type(twin) is type(compiled)
    assert str(twin.report) == str(compiled.report)
    assert twin.report is not compiled.report
    before = twin(x)
    twin.load_state_dict(other(twin))
    assert relative_error(twin(x), twin._orig_mod(x)) < 1e-6
    assert relative_error(twin(x), before) > 0.1
    assert relative_error(compiled(x), model(x)) < 1e-6
    with torch.no_grad():
        twin._orig_mod.a.weight.mul_(2)
    assert (relative_error(twin(x), twin._orig_mod(x)) > 0.1) == frozen


@torch.no_grad()
@pytest.mark.parametrize(("options", "count"), [({}, 3), ({"dynamic": None}, 2), ({"dynamic": True}, 1)])
def test_each_size_is_compiled_unless_the_caller_says_how(
    options: dict[str, Any], count: int, graphs: list[Any]
) -> None:
    model = Model().eval()
    compiled = fastconv.compile(model, frozen=True, **options)
    for n in (2, 3, 4):
        x = torch.randn(n, 3, 6, 5)
        assert relative_error(compiled(x), model(x)) < 1e-6
    assert len(graphs) == 2 * count


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_report_counts_weights_that_every_call_packs(dynamic: bool) -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)), torch.randn(2, 3, 9, 8)
    found = check(model, x, Asked(algorithm="winograd_f2", packed=True), dynamic=dynamic).found
    report = RewriteReport([list(found)])
    assert report.packing == json.loads(report.to_json())["packing"] == (2 if dynamic else 0)
    assert ("2 frozen weights packed in every call" in str(report)) == dynamic


def test_the_backend_names_what_freezes() -> None:
    with pytest.raises(ValueError, match=r"options has 'frozen', True; expected .*'freezing'"):
        fastconv.compiler.backend(torch.fx.GraphModule({}, torch.fx.Graph()), [], options={"frozen": True})
