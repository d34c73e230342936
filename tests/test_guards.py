"""What `compile(frozen=True)` sees of a model's modules: `train()`, other modules and parameters change what is
computed, as they do without a compiler, and nothing is compiled again for changes back; unless the caller's filter says
otherwise. And what reaches the backend."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from layers import relative_error
from torch import Tensor, nn

import fastconv
from fastconv.compiler import inductor

pytestmark = pytest.mark.usefixtures("full_precision")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, momentum=0.0), nn.ReLU())
        self.head, self.scale = nn.Conv2d(8, 4, 1), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x)) * self.scale


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments of every compilation of a graph, which runs as it is: as Inductor, without its code."""
    made: list[tuple[Any, ...]] = []

    def compile_graph(graph: Any, *arguments: Any) -> Callable[..., Any]:
        made.append(arguments)
        return graph.forward  # type: ignore[no-any-return]

    torch._dynamo.reset()
    monkeypatch.setattr(inductor, "compile_graph", compile_graph)
    return made


def put(owner: Callable[[Model], Any], name: str, value: Callable[[], Any]) -> Callable[[Model], Callable[[], None]]:
    def change(model: Model) -> Callable[[], None]:
        its, before = owner(model), getattr(owner(model), name)
        setattr(its, name, value())
        return lambda: setattr(its, name, before)

    return change


def override(model: Model) -> Callable[[], None]:
    model.head.forward = lambda x: torch.ones(2, 4, 4, 3)  # type: ignore[method-assign]
    return lambda: delattr(model.head, "forward")


def head(model: Model) -> nn.Module:
    return model.head


def train(model: Model) -> Callable[[], None]:
    model.train()
    return lambda: model.eval() and None


CHANGES: dict[str, Callable[[Model], Callable[[], None]]] = {
    "train()": train,
    "another parameter": put(head, "weight", lambda: nn.Parameter(torch.randn(4, 8, 1, 1))),
    "another module": put(lambda model: model, "head", lambda: nn.Conv2d(8, 4, 1)),
    "another module in a list of them": put(lambda model: model.blocks, "2", nn.Sigmoid),
    "another class": put(lambda model: model.blocks[2], "__class__", lambda: nn.Sigmoid),
    "another forward": override,
    "an attribute of the caller's own module": put(lambda model: model, "scale", lambda: 3.0),
}


def _torch_sees_classes() -> bool:
    """Whether what PyTorch compiles notices that a module's class is another, which no guard of 2.11's asks."""
    model, x = nn.ModuleList([nn.Tanh()]), torch.ones(1)
    compiled = torch.compile(lambda x: model[0](x), backend="eager")
    before = compiled(x)
    model[0].__class__ = nn.Sigmoid
    return not torch.equal(compiled(x), before)


@torch.no_grad()
@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_seen_and_what_was_compiled_before_stays(name: str, calls: list[Any]) -> None:
    torch.manual_seed(0)
    model, x = Model().eval(), torch.randn(2, 3, 6, 5)
    compiled = fastconv.compile(model, frozen=True)
    before = compiled(x)
    assert relative_error(before, model(x)) < 1e-6
    assert len(calls) == 1
    undo = CHANGES[name](model)
    if name == "another class" and not _torch_sees_classes():
        pytest.skip(f"{name}: torch {torch.__version__} does not see it either")
    changed = compiled(x)
    assert relative_error(changed, model(x)) < 1e-6
    assert relative_error(changed, before) > 0.01
    count = len(calls)
    undo()
    assert relative_error(compiled(x), before) == 0
    assert len(calls) == count


@torch.no_grad()
@pytest.mark.parametrize("frozen", [False, True])
def test_the_callers_filter_of_guards(frozen: bool, calls: list[Any]) -> None:
    """With the model of the caller's own class unguarded as well, nobody sees its attributes."""
    model, x = Model().eval(), torch.randn(2, 3, 6, 5)
    options = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe, "shape_padding": True}
    compiled = fastconv.compile(model, frozen=frozen, options=options)
    before = compiled(x)
    model.scale = 3.0
    assert relative_error(compiled(x), before) == 0
    assert len(options) == 2
    assert [arguments[4] for arguments in calls] == [{"shape_padding": True}]


@torch.no_grad()
def test_mode_and_options_reach_the_backend(calls: list[Any]) -> None:
    model, x = Model().eval(), torch.randn(2, 3, 6, 5)
    by_mode = fastconv.compile(model, frozen=True, mode="reduce-overhead")
    by_option = fastconv.compile(model, frozen=True, options={"shape_padding": True})
    by_mode(x), by_option(x)
    train(model)
    by_mode(x), by_option(x)
    assert [arguments[3:5] for arguments in calls] == 2 * [("reduce-overhead", {}), (None, {"shape_padding": True})]


@torch.no_grad()
def test_a_compiled_model_within_compiled_code() -> None:
    model, x = Model().eval(), torch.randn(2, 3, 6, 5)
    compiled = fastconv.compile(model, frozen=True)
    outer = torch.compile(lambda x: compiled(x) + 1, backend="eager")
    assert relative_error(outer(x), model(x) + 1) < 1e-6
    assert relative_error(compiled(x) + 1, outer(x)) < 1e-6
