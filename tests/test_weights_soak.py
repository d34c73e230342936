"""The soak of weights that change: it finds nothing in what keeps the documents' promises, and every break of one."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fastconv
from benchmarks.harness import results
from benchmarks.soaks import modes, weights, writes
from fastconv.compiler import inductor

pytestmark = pytest.mark.usefixtures("full_precision")
EAGER = [name for name, mode in modes.MODES.items() if not (mode.compiles or mode.on_gpu)]


@pytest.fixture
def soak(tmp_path: Path) -> Callable[..., results.Document]:
    def run(wanted: list[str], **arguments: Any) -> results.Document:
        fixed = {"steps": 100, "out": tmp_path / "soak.json", "report": lambda line: None}
        return weights.run(wanted, arguments.pop("classes", ["fp32", "bf16"]), **fixed | arguments)

    return run


def wrong(document: results.Document) -> int:
    return sum(row["failures"] for row in document["rows"])


def test_every_eager_mode(soak: Callable[..., results.Document], tmp_path: Path) -> None:
    document = soak(EAGER, steps=120)
    assert document["failed"] == []
    assert results.read(tmp_path / "soak.json")["suite"] == "soak_weights_cpu"
    rows = document["rows"]
    assert {row["mode"] for row in rows} == set(EAGER)
    assert {row["write"] for row in rows} == set(writes.WRITES) - {"replay"}
    assert all(0 < row["error_over_bound"] <= 1 for row in rows if row["count"])
    followed = [row for row in rows if modes.MODES[row["mode"]].seen is None]
    assert not any(row["old"] for row in followed)
    assert any(row["old"] for row in rows)


def test_the_same_for_a_seed(soak: Callable[..., results.Document]) -> None:
    one, again, other = (soak(["frozen"], steps=30, seed=seed)["rows"] for seed in (0, 0, 1))
    assert one == again != other


def test_frozen_compilation(soak: Callable[..., results.Document], monkeypatch: pytest.MonkeyPatch) -> None:
    """As tests/test_compiled_again.py, without Inductor's code."""
    monkeypatch.setattr(inductor, "compile_graph", lambda graph, *_: copy.deepcopy(graph).forward)
    document = soak(["compiled_frozen"], steps=12, classes=["fp32"])
    assert wrong(document) == 0
    assert any(row["old"] for row in document["rows"])
    monkeypatch.setattr(fastconv, "refresh", lambda model: None)
    assert wrong(soak(["compiled_frozen"], steps=12, classes=["fp32"])) > 0


def test_exported(soak: Callable[..., results.Document]) -> None:
    assert wrong(soak(["exported"], steps=30)) == 0


BREAKS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "nothing packs again": ("frozen", lambda patch: patch.setattr(fastconv, "refresh", lambda model: None)),
    "wide layers keep what they have": (
        "fused", lambda patch: patch.setattr(fastconv.Conv2d, "_follow", lambda *_, **__: True),
    ),
    "nobody compares": (
        "swapped", lambda patch: patch.setitem(modes.MODES, "swapped", modes.Mode(modes._frozen, modes.LAYERS)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_promise_is_found(
    name: str, soak: Callable[..., results.Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    mode, broken = BREAKS[name]
    broken(monkeypatch)
    document = soak([mode], steps=60, classes=["fp32"])
    assert wrong(document) > 0
    assert document["failed"][0].startswith(mode)
    assert "times the bound" in document["failed"][0]


def test_what_raises_is_a_failure(soak: Callable[..., results.Document], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(fastconv, "conv2d", refuse)
    document = soak(["function"], steps=3)
    assert wrong(document) == sum(row["count"] for row in document["rows"]) == 3
    assert "RuntimeError: no such kernel" in document["failed"][0]


def test_it_goes_on_where_it_ended(soak: Callable[..., results.Document], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "ROUND", 10)
    first = soak(["function"], steps=20)
    both = soak(["function"], steps=40, resume=True)
    whole = soak(["function"], steps=40)
    assert [row["rounds"] for row in first["rows"]] == [2] * len(first["rows"])
    counts = [{row["write"]: row["count"] for row in each["rows"] if row["class"] == "fp32"} for each in (both, whole)]
    assert counts[0] == counts[1]
    late = soak(["function"], steps=40, budget_s=0.0)
    assert late["missing"] == ["3 of 4 rounds, for want of time"]


@pytest.mark.parametrize("write", [name for name in writes.WRITES if name != "replay"])
def test_a_write_changes_what_it_names_alone(write: str) -> None:
    draw = random.Random(0)
    for _, name in itertools.product(range(4), ("a.weight", "norm.bias", "norm.running_var")):
        layer, _ = next(modes.random_layers(0, 8, 8, 2))
        module = modes.Block(layer, False)
        before = {key: value.clone() for key, value in module.state_dict().items()}
        writes.WRITES[write](draw, module, name)
        after = module.state_dict()
        changed = {key for key in before if not torch.equal(before[key], after[key])}
        assert name in changed
        assert changed == {name} or write in ("load_state_dict", "assign")
        assert {value.dtype for key, value in after.items() if key in writes.names(module)} == {torch.float32}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu(soak: Callable[..., results.Document]) -> None:
    wanted = [*EAGER, "exported", "swapped_graph", "fused_graph"]
    document = soak(wanted, steps=400, classes=list(results.CLASSES), device="cuda")
    assert document["failed"] == []
    assert "replay" in {row["write"] for row in document["rows"]}
