"""swap_: what it takes, what it leaves alone and why, and that the model stays the same model."""

import copy
import gc
import json
import pickle
import warnings
import weakref
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torchvision
from layers import DEVICES, packed_algorithms, relative_error
from swapping import NET_CONVOLUTIONS, Net, Subclass, codes
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import fastconv
from fastconv import settings

pytestmark = pytest.mark.usefixtures("full_precision")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("algorithm", ["auto", "direct", *packed_algorithms()])
def test_resnet18_computes_the_same(device: str, algorithm: str) -> None:
    model = torchvision.models.resnet18().to(device).eval()
    state = model.state_dict()
    x = torch.randn(2, 3, *(64, 64) if device == "cuda" else (33, 48), device=device)
    with torch.no_grad():
        expected = model(x)
        report = fastconv.swap_(model, algorithm=algorithm, precision="fp32")
        assert report.total == 20
        assert report.swapped == (13 if algorithm.startswith("winograd") else 20)
        for _ in range(2):
            assert relative_error(model(x), expected) < 1e-5
        assert relative_error(model.to(memory_format=torch.channels_last)(x), expected) < 1e-5
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), state.values(), strict=True))
    for row in report.rows:
        if row.swapped:
            assert row.algorithm in {algorithm} if algorithm != "auto" else {*row.candidates, "torch"}
            assert row.last_input_shape is not None
            assert row.last_input_shape[0] == 2


def test_every_convolution_has_a_row() -> None:
    model = Net()
    report = fastconv.swap_(model)
    assert [row.names for row in report.rows] == NET_CONVOLUTIONS
    assert (report.swapped, report.total) == (5, 5)
    assert codes(report) == [""] * 5
    row = report.rows[0]
    assert (row.shape, row.in_channels, row.out_channels, row.kernel) == ("8x3x7x7", 3, 8, (7, 7))
    assert (row.stride, row.padding, row.dilation, row.groups) == ((2, 2), (3, 3), (1, 1), 1)
    assert (row.dtype, row.device, row.padding_mode) == ("float32", "cpu", "zeros")
    assert report.rows[2].padding == "same"
    assert report.rows[3].padding_mode == "reflect"
    assert "direct" in row.candidates
    assert row.algorithm == "auto"
    assert row.last_input_shape is None


def test_the_report_follows_the_layer() -> None:
    model = Net()
    report = fastconv.swap_(model, algorithm="direct")
    assert "for 2x3x19x17" not in str(report)
    model(torch.randn(2, 3, 19, 17))
    assert report.rows[0].algorithm == "direct"
    assert report.rows[0].last_input_shape == (2, 3, 19, 17)
    assert "direct for 2x3x19x17" in str(report)


@pytest.mark.parametrize("name", ["plain", "model", "shared"])
def test_identity_names_and_attributes_survive(name: str) -> None:
    model = nn.Conv2d(3, 4, 3) if name == "model" else Net()
    if name == "plain":
        model.eval()
    modules = list(model.named_modules(remove_duplicate=False))
    parameters = list(model.named_parameters())
    training = [module.training for _, module in modules]
    fastconv.swap_(model)
    after = list(model.named_modules(remove_duplicate=False))
    assert [n for n, _ in after] == [n for n, _ in modules]
    assert all(a is b for (_, a), (_, b) in zip(after, modules, strict=True))
    assert all(a is b for (_, a), (_, b) in zip(model.named_parameters(), parameters, strict=True))
    assert [module.training for _, module in after] == training
    if name == "shared":
        assert model.body is model.again
        assert type(model.body) is fastconv.Conv2d


def test_the_model_itself_may_be_the_convolution() -> None:
    model = nn.Conv2d(3, 4, 3)
    x = torch.randn(1, 3, 8, 8)
    expected = model(x)
    report = fastconv.swap_(model)
    assert report.rows[0].names == ("",)
    assert "(model)" in str(report)
    assert type(model) is fastconv.Conv2d
    assert relative_error(model(x), expected) < 1e-5
    report.undo()
    assert type(model) is nn.Conv2d


def test_hooks_survive() -> None:
    model = Net()
    seen: list[str] = []
    layer = model.body
    layer.register_forward_pre_hook(lambda *_: seen.append("pre"))
    layer.register_forward_hook(lambda *_: seen.append("forward"))
    layer.register_full_backward_hook(lambda *_: seen.append("backward"))
    layer.register_state_dict_pre_hook(lambda *_: seen.append("state_dict"))
    layer.register_load_state_dict_post_hook(lambda *_: seen.append("load"))
    model.head.register_forward_hook(lambda module, inputs, output: output * 2)
    reference = copy.deepcopy(model)
    fastconv.swap_(model)
    x = torch.randn(1, 3, 16, 16)
    y = model(x)
    y.sum().backward()
    assert seen == ["pre", "forward"] * 2 + ["backward"] * 2
    assert relative_error(y, reference(x)) < 1e-5
    seen.clear()
    model.load_state_dict(model.state_dict())
    assert set(seen) == {"state_dict", "load"}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_training_steps_are_the_same(device: str, optimizer: type[torch.optim.Optimizer]) -> None:
    ours, theirs = Net().to(device), Net().to(device)
    theirs.load_state_dict(ours.state_dict())
    fastconv.swap_(ours)
    for model in (ours, theirs):
        torch.manual_seed(3)
        # Adam divides by the gradient's size: without an eps it would magnify the rounding of a tiny one.
        arguments = {"eps": 1e-3} if optimizer is torch.optim.Adam else {"momentum": 0.9}
        updates = optimizer(model.parameters(), lr=1e-2, **arguments)
        for _ in range(3):
            updates.zero_grad()
            x = torch.randn(4, 3, 16, 16, device=device)
            with torch.no_grad():
                model(x)  # inference between the steps fills the caches
            model(x).square().mean().backward()
            updates.step()
    x = torch.randn(2, 3, 16, 16, device=device)
    with torch.no_grad():
        assert relative_error(ours.eval()(x), theirs.eval()(x)) < 1e-4
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert relative_error(a, b) < 1e-4


class TestUndo:
    def test_restores_everything(self) -> None:
        model = Net()
        before = {name: (type(module), set(module.__dict__)) for name, module in model.named_modules()}
        x = torch.randn(1, 3, 16, 16)
        expected = model.eval()(x)
        report = fastconv.swap_(model)
        with torch.no_grad():
            model(x)
        report.undo()
        assert {name: (type(module), set(module.__dict__)) for name, module in model.named_modules()} == before
        assert torch.equal(model(x), expected)
        assert report.undone
        assert "undone" in str(report)

    def test_twice_is_once(self) -> None:
        model = Net()
        first = fastconv.swap_(model)
        first.undo()
        first.undo()
        assert type(model.body) is nn.Conv2d
        second = fastconv.swap_(model)
        first.undo()  # must not take back the second swap
        assert type(model.body) is fastconv.Conv2d
        second.undo()
        assert type(model.body) is nn.Conv2d

    def test_survives_deleted_and_changed_submodules(self) -> None:
        class Mine(fastconv.Conv2d):
            pass

        model = Net()
        report = fastconv.swap_(model)
        del model.body, model.again
        gc.collect()
        model.head = nn.Conv2d(8, 5, 1)
        model.reflect.__class__ = Mine
        str(report)
        report.to_json()
        with pytest.warns(UserWarning, match="not undone: reflect is a Mine"):
            report.undo()
        assert type(model.stem[0]) is nn.Conv2d
        assert type(model.reflect) is Mine
        assert not report.undone

    def test_a_parametrized_layer_is_undone_once_it_is_plain_again(self) -> None:
        model = nn.Sequential(nn.Conv2d(3, 4, 3))
        report = fastconv.swap_(model)
        parametrizations.weight_norm(model[0])
        with pytest.warns(UserWarning, match="not undone: 0 is a ParametrizedConv2d"):
            report.undo()
        assert not report.undone
        parametrize.remove_parametrizations(model[0], "weight")
        report.undo()
        assert report.undone
        assert type(model[0]) is nn.Conv2d

    def test_the_environment_s_algorithm_takes_the_layers_that_it_fits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(settings, "auto_algorithm", "winograd_f4")
        model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 5))
        report = fastconv.swap_(model)
        assert [row.swapped for row in report.rows] == [True, False, False]
        assert report.rows[0].candidates == ("winograd_f4",)
        model(torch.randn(1, 3, 12, 12))
        assert fastconv.last_call() is not None

    def test_the_report_does_not_keep_the_model_alive(self) -> None:
        model = Net()
        body = weakref.ref(model.body)
        report = fastconv.swap_(model)
        del model
        gc.collect()
        assert body() is None
        assert report.total == 5

    def test_layers_made_by_the_user_are_left_alone(self) -> None:
        model = nn.Sequential(fastconv.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))
        report = fastconv.swap_(model)
        assert codes(report) == ["already_swapped", ""]
        report.undo()
        assert [type(module) for module in model] == [fastconv.Conv2d, nn.Conv2d]

    def test_a_dry_run_has_nothing_to_undo(self) -> None:
        model = Net()
        dry = fastconv.swap_(model, dry_run=True)
        fastconv.swap_(model)
        dry.undo()
        assert type(model.body) is fastconv.Conv2d


def test_a_second_call_changes_nothing() -> None:
    model = Net()
    fastconv.swap_(model, algorithm="direct")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = fastconv.swap_(model)
    assert codes(report) == ["already_swapped"] * 5
    assert (report.swapped, report.total) == (0, 5)
    assert str(report).startswith("fastconv: 0 of 5 convolutions swapped, 5 already swapped\n")
    assert model.body.algorithm == "direct"
    assert [row.algorithm for row in report.rows] == ["direct"] * 5
    report.undo()
    assert type(model.body) is fastconv.Conv2d


def test_dry_run_changes_nothing() -> None:
    model = Net()
    before = {name: (type(module), set(module.__dict__)) for name, module in model.named_modules()}
    report = fastconv.swap_(model, dry_run=True)
    assert (report.swapped, report.total, report.dry_run) == (5, 5, True)
    assert "would be swapped" in str(report)
    assert {name: (type(module), set(module.__dict__)) for name, module in model.named_modules()} == before


class TestFilter:
    def test_leaves_alone_what_it_refuses(self) -> None:
        model = Net()
        asked: list[str] = []

        def deny(name: str, module: nn.Module) -> bool:
            assert isinstance(module, nn.Conv2d)
            asked.append(name)
            return name != "again" and module.kernel_size != (1, 1)

        report = fastconv.swap_(model, filter_fn=deny)
        assert codes(report) == ["", "filtered", "", "", "filtered"]
        assert set(asked) == {name for names in NET_CONVOLUTIONS for name in names}
        assert type(model.head) is nn.Conv2d
        assert type(model.body) is nn.Conv2d
        assert type(model.depthwise) is fastconv.Conv2d

    def test_strict_accepts_what_it_refuses(self) -> None:
        model = nn.Sequential(Subclass(3, 4, 3), nn.Conv2d(4, 4, 3))
        report = fastconv.swap_(model, filter_fn=lambda name, _: name == "1", strict=True)
        assert codes(report) == ["filtered", ""]

    def test_an_exception_in_it_leaves_the_model_as_it_was(self) -> None:
        def fail(name: str, module: nn.Module) -> bool:
            if name == "head":
                raise KeyError(name)
            return True

        model = Net()
        with pytest.raises(KeyError):
            fastconv.swap_(model, filter_fn=fail)
        assert all(type(module) is not fastconv.Conv2d for module in model.modules())


@pytest.mark.parametrize("algorithm", packed_algorithms())
class TestNamedAlgorithm:
    def test_takes_only_the_layers_that_it_fits(self, algorithm: str) -> None:
        model = Net()
        report = fastconv.swap_(model, algorithm=algorithm)
        winograd = ["kernel_size", "", "groups", "", "kernel_size"]
        assert codes(report) == (winograd if algorithm.startswith("winograd") else [""] * 5)
        assert [row.swapped for row in report.rows] == [code == "" for code in codes(report)]
        assert all(algorithm in row.reason for row in report.rows if not row.swapped)
        with torch.no_grad():
            model.eval()(torch.randn(1, 3, 16, 16))
        assert {row.algorithm for row in report.rows if row.swapped} == {algorithm}

    def test_strict_names_the_others_and_swaps_nothing(self, algorithm: str) -> None:
        model = Net()
        if not algorithm.startswith("winograd"):
            assert fastconv.swap_(model, algorithm=algorithm, strict=True).swapped == 5
            return
        with pytest.raises(fastconv.UnsupportedError) as error:
            fastconv.swap_(model, algorithm=algorithm, strict=True)
        for text in ("3 of 5", "stem.0", "head", "[kernel_size]", "depthwise", "[groups]"):
            assert text in str(error.value)
        assert all(type(module) is not fastconv.Conv2d for module in model.modules())


class TestWarnings:
    @pytest.mark.parametrize(
        ("model", "text"),
        [
            (nn.Linear(3, 3), "the model has no convolution"),
            (nn.Conv3d(3, 3, 1), "none of 1 fit: 1 not_served"),
            (nn.Sequential(Subclass(3, 4, 3), Subclass(4, 4, 3)), "none of 2 fit: 2 subclass"),
        ],
    )
    def test_nothing_swapped(self, model: nn.Module, text: str) -> None:
        with pytest.warns(UserWarning, match=text) as caught:
            report = fastconv.swap_(model)
        assert report.swapped == 0
        assert caught[0].filename == __file__
        assert f"0 of {report.total}" in str(report)

    def test_silence_when_something_is(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fastconv.swap_(nn.Sequential(Subclass(3, 4, 3), nn.Conv2d(4, 4, 3)))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"model": "resnet"}, TypeError, "model"),
        ({"filter_fn": "name"}, TypeError, "filter_fn"),
        ({"algorithm": "fft"}, ValueError, "algorithm"),
        ({"algorithm": 4}, TypeError, "algorithm"),
        ({"precision": "half"}, ValueError, "precision"),
        ({"precision": 16}, TypeError, "precision"),
        ({"dry_run": "yes"}, TypeError, "dry_run"),
        ({"strict": 1}, TypeError, "strict"),
    ],
)
def test_bad_arguments(arguments: dict, error: type[Exception], text: str) -> None:
    model = Net()
    with pytest.raises(error, match=text):
        fastconv.swap_(**({"model": model} | arguments))
    assert type(model.body) is nn.Conv2d


def test_settings_reach_the_layers() -> None:
    model = Net()
    fastconv.swap_(model, algorithm="direct", precision="ieee")
    assert (model.body.algorithm, model.body.precision) == ("direct", "ieee")


def test_json_round_trip(tmp_path: Path) -> None:
    model = nn.Sequential(OrderedDict(a=nn.Conv2d(3, 4, 3), b=Subclass(4, 4, 3)))
    report = fastconv.swap_(model)
    with torch.no_grad():
        model(torch.randn(1, 3, 9, 9))
    path = tmp_path / "report.json"
    text = report.to_json(path)
    data = json.loads(path.read_text())
    assert data == json.loads(text)
    assert (data["swapped"], data["total"], data["dry_run"], data["undone"]) == (1, 2, False, False)
    for row, plain in zip(report.rows, data["rows"], strict=True):
        assert plain == json.loads(json.dumps(row.to_dict()))
        assert tuple(plain["names"]) == row.names
        assert plain["algorithm"] == row.algorithm
    assert data["rows"][0]["last_input_shape"] == [1, 3, 9, 9]
    assert [row.shape for row in pickle.loads(pickle.dumps(report)).rows] == [row.shape for row in report.rows]


def test_the_table_shows_long_names_whole() -> None:
    deep: nn.Module = nn.Conv2d(3, 4, 3)
    for _ in range(40):
        deep = nn.Sequential(OrderedDict(a_rather_long_name=deep))
    report = fastconv.swap_(nn.ModuleDict({"[red]": deep}))
    assert report.rows[0].names[0] in str(report)
    assert "[red]" in str(report)
    assert "…" not in str(report)


def test_copies_and_pickles_of_a_swapped_model_work() -> None:
    model = Net().eval()
    x = torch.randn(1, 3, 16, 16)
    report = fastconv.swap_(model, algorithm="direct")
    with torch.no_grad():
        expected = model(x)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(other.body) is fastconv.Conv2d
            assert other.body is other.again
            assert other.body.algorithm == "direct"
            assert relative_error(other(x), expected) < 1e-5
            other.body.weight.data.mul_(2)
            assert relative_error(other(x), expected) > 1e-4
            assert relative_error(model(x), expected) == 0
    report.undo()
    assert type(other.body) is fastconv.Conv2d


def test_a_state_dict_travels_both_ways() -> None:
    ours, theirs = Net(), Net()
    fastconv.swap_(ours)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        assert relative_error(ours.eval()(x), theirs.eval()(x)) < 1e-5
        ours.load_state_dict(Net().state_dict())
        theirs.load_state_dict(ours.state_dict(), assign=True)
        assert relative_error(ours(x), theirs(x)) < 1e-5


def test_swap_before_moving_dtype() -> None:
    model = Net().eval()
    fastconv.swap_(model)
    x = torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        expected = model(x)
        model.to(torch.bfloat16)
        assert relative_error(model(x.bfloat16()).float(), expected) < 0.1
        assert model(x.bfloat16()).dtype == torch.bfloat16
        model.to(torch.float64)
        assert model(x.double()).dtype == torch.float64


def test_a_compiled_model_may_be_swapped() -> None:
    model = Net().eval()
    x = torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        expected = model(x)
        compiled = torch.compile(model, backend="eager")
        report = fastconv.swap_(compiled)
        assert report.swapped == 5
        assert relative_error(compiled(x), expected) < 1e-5


def test_half_precision_models() -> None:
    report = fastconv.swap_(Net().to(torch.bfloat16), dry_run=True)
    assert {row.dtype for row in report.rows} == {"bfloat16"}
    assert report.swapped == 5


@pytest.mark.parametrize(
    "conv",
    [
        {"kernel_size": (1, 65)},  # larger than the map that a layer is shown to the planner with
        {"kernel_size": (65, 3), "dilation": (2, 1)},
        {"kernel_size": 3, "padding": 3, "padding_mode": "reflect"},  # padded before: none of the convolution's own
    ],
    ids=str,
)
def test_whatever_a_layer_fits_is_swapped(conv: dict) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, **conv))
    algorithm = "winograd_f4" if conv["kernel_size"] == 3 else "auto"
    assert codes(fastconv.swap_(model, algorithm=algorithm, strict=True)) == [""]
    with torch.no_grad():
        x = torch.randn(1, 3, 131, 67)
        assert relative_error(model(x), nn.Conv2d.forward(model[0], x)) < 1e-5


def test_the_planner_is_asked_in_the_layers_class() -> None:
    """A name that does not offer the precision is no fit; `auto` does not count on what is too inaccurate for it."""
    with pytest.warns(UserWarning, match="1 precision"):
        report = fastconv.swap_(nn.Sequential(nn.Conv2d(8, 8, 3)), algorithm="implicit_gemm", precision="ieee")
    assert codes(report) == ["precision"]
    first = nn.Sequential(nn.Conv2d(3, 8, 3))
    (row,) = fastconv.swap_(first, dry_run=True).rows
    assert "winograd_f2" in row.candidates
    assert "winograd_f4" not in row.candidates  # 4.4 times PyTorch's error, of which `auto` admits 4
    assert fastconv.swap_(first, algorithm="winograd_f4").rows[0].candidates == ("winograd_f4",)


def test_strict_accepts_what_was_swapped_before() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    fastconv.swap_(model)
    assert codes(fastconv.swap_(model, strict=True)) == ["already_swapped"]
