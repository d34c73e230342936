"""`tune` and its command: what is measured, taken and reported. No test asserts a time."""

import json

import pytest
import torch
from choices import CPU, PROBLEM, W, X, activate, choice, other_than, ran
from torch import nn
from typer.testing import CliRunner

import fastconv
from fastconv import _C, cli, measured, ops, selection, settings, timing, tuning
from fastconv.ops import autograd

pytestmark = pytest.mark.usefixtures("cache_folder")


# --- Measuring


class Zoo(nn.Module):
    """Layers whose problems are not what their arguments say."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.Conv2d(8, 8, (3, 2), padding="same"),
                nn.Conv2d(8, 12, 3, stride=(1, 2), padding=(2, 1), groups=4, bias=False),
                nn.Conv2d(12, 8, 3, padding=1, padding_mode="reflect"),
                nn.Conv2d(8, 6, 3, dilation=2, padding="valid"),
            ]
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("form", ["swapped", "compiled", "unbatched"])
def test_what_is_recorded_is_what_the_layers_run(channels_last, form):
    model, x = Zoo().requires_grad_(False), torch.randn(2, 8, 13, 11)
    fastconv.swap_(model)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    if form == "unbatched":
        x = x[0]
    called = torch.compile(model, backend="eager") if form == "compiled" else model
    found = tuning.record(called, x)
    assert sum(found.values()) == 4
    activate(*(choice("direct", convolution.problem()) for convolution in found))
    model(x)
    assert [layer.last_algorithm for layer in model.layers] == ["direct"] * 4


def test_autocast_and_epilogues_are_recorded():
    model = fastconv.fuse(nn.Sequential(nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4), nn.SiLU()).eval())
    (found,) = tuning.record(model, X)
    assert (found.bias, found.residual, found.activation) == (True, False, "silu")
    with torch.autocast("cpu", torch.bfloat16):
        (found,) = tuning.record(model, X)
    assert found.dtype == torch.bfloat16


def test_where_nothing_is_eligible_torch_is_measured(times, monkeypatch):
    """As of a weight gradient that is beyond its class by PyTorch's Winograd, where nothing of ours serves."""
    found = selection.candidates
    monkeypatch.setattr(
        selection, "candidates", lambda *asked: [row | {"auto_eligible": False} for row in found(*asked)]
    )
    model = nn.Sequential(nn.Conv2d(8, 4, 3)).requires_grad_(False)
    fastconv.swap_(model)
    (row,) = fastconv.tune(model, X).rows
    assert (row.algorithm, row.us, row.failures) == ("torch", {"torch": 100.0}, {})


def test_tune_from_end_to_end(cache_folder):
    model = nn.Sequential(nn.Conv2d(8, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1)).requires_grad_(False)
    fastconv.swap_(model)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    expected, state = model(X), torch.get_rng_state()
    report = fastconv.tune(model, X)
    assert torch.equal(torch.get_rng_state(), state)
    assert [row.calls for row in report.rows] == [1, 1]
    for row in report.rows:
        eligible = {r["algorithm"] for r in _C.candidates(_problem_of(row), ops.device_info(CPU)) if r["auto_eligible"]}
        assert row.us.keys() | row.failures.keys() == eligible
        assert all(us > 0 for us in row.us.values())
        assert row.gain is None or row.gain >= 1
    torch.testing.assert_close(model(X), expected, rtol=1e-4, atol=1e-4)
    assert [model[0].last_algorithm, model[2].last_algorithm] == [row.algorithm for row in report.rows]
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    kept = json.loads((cache_folder / "choices.json").read_text())
    assert [entry["algorithm"] for entry in kept["choices"]] == [row.algorithm for row in report.rows]
    assert str(cache_folder / "choices.json") in str(report)


def _problem_of(row):
    return PROBLEM if repr(PROBLEM) == row.problem else _C.ConvProblem(2, 4, 9, 7, 4, 1, 1)


def test_the_fastest_is_taken_and_the_planned_one_where_it_is_as_fast(times, tmp_path):
    planned = ran(X, W)
    times |= {other_than(planned): 50.0, planned: 75.0}
    report = fastconv.tune(fastconv.conv2d, X, W)
    (found,) = report.rows
    assert (found.planned, found.algorithm, found.gain, report.changed) == (planned, other_than(planned), 1.5, 1)
    assert "1.50x" in str(report)
    assert ran(X, W) == other_than(planned)
    report.to_json(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text())["rows"][0]["us"][planned] == 75.0
    times |= {other_than(planned): 74.9}
    report = fastconv.tune(fastconv.conv2d, X, W)
    assert (report.rows[0].algorithm, report.changed) == (planned, 0)
    assert ran(X, W) == planned


def test_one_problem_in_two_forms_is_measured_as_it_is_called_most(times, monkeypatch):
    seen = []
    original = tuning.Convolution.contenders
    spy = lambda self, *rest: seen.append((self.bias, self.activation)) or original(self, *rest)  # noqa: E731
    monkeypatch.setattr(tuning.Convolution, "contenders", spy)

    def model():
        for bias, activation in ((None, None), (torch.randn(4), None), (torch.randn(4), None), (None, "relu")):
            fastconv.conv2d(X, W, bias, activation=activation)

    found = fastconv.tune(model).rows
    assert sorted(zip(seen, (row.calls for row in found), strict=True)) == [((False, "relu"), 1), ((True, "none"), 3)]
    assert sorted(row.problem.endswith(" + relu") for row in found) == [False, True]


def test_a_candidate_that_fails_is_left_out_and_named(times, monkeypatch):
    pack, run = ops.pack_weight, autograd.conv2d_packed

    def refuse_to_pack(weight, groups, algorithm, precision):
        if algorithm == "winograd_f2":
            raise RuntimeError("cannot be packed")
        return pack(weight, groups, algorithm, precision)

    def refuse_to_run(*arguments):
        if arguments[10] == "im2col_gemm":
            raise RuntimeError("cannot run")
        return run(*arguments)

    monkeypatch.setattr(ops, "pack_weight", refuse_to_pack)
    monkeypatch.setattr(autograd, "conv2d_packed", refuse_to_run)
    times |= {"winograd_f2": 1.0, "im2col_gemm": 1.0, "direct": 2.0}
    report = fastconv.tune(fastconv.conv2d, X, W)
    (found,) = report.rows
    assert found.algorithm == "direct"
    expected = {"winograd_f2": "RuntimeError: cannot be packed", "im2col_gemm": "RuntimeError: cannot run"}
    assert found.failures == expected
    assert "im2col_gemm left out: RuntimeError: cannot run" in str(report)


def test_what_is_measured_before_an_exception_is_kept(times, monkeypatch):
    measure, calls = timing.measure, []

    def interrupted(*arguments, **options):
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(*arguments, **options)

    monkeypatch.setattr(timing, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fastconv.tune(lambda: [fastconv.conv2d(X[:n], W) for n in (1, 2)])
    assert len(measured.choices()) == 1


def test_bad_arguments(monkeypatch):
    with pytest.raises(TypeError, match=r"model is a int; expected a torch\.nn\.Module or another callable"):
        fastconv.tune(3)
    with pytest.raises(ValueError, match=r"model is a Conv2d that ran no convolution .*fastconv's layers"):
        fastconv.tune(nn.Conv2d(8, 4, 3), X)
    with pytest.raises(ValueError, match="ran no convolution"):
        fastconv.tune(lambda: fastconv.conv2d(X, W, algorithm="direct"))
    monkeypatch.setattr(settings, "auto_algorithm", "direct")
    with pytest.raises(RuntimeError, match="FASTCONV_ALGORITHM is set"):
        fastconv.tune(fastconv.conv2d, X, W)


# --- The command


def said(result):
    return " ".join((result.stdout + result.stderr).split())


def test_the_command_measures_a_layer_set(cache_folder, tmp_path, times, monkeypatch):
    out = tmp_path / "tune.json"
    times["direct"] = 1.0
    monkeypatch.setattr(timing, "once", lambda call, device: (None, 1e9))  # nobody is hopeless beside that
    options = ["--set", "lenet5", "--device", "cpu", "--classes", "fp32,bf16", "--layouts", "all"]
    result = CliRunner().invoke(cli.app, ["tune", *options, "--json", str(out)])
    assert result.exit_code == 0, said(result)
    found = json.loads(out.read_text())
    assert found["path"] == str(cache_folder / "choices.json")
    assert {row["algorithm"] for row in found["rows"]} == {"direct"}
    assert {tuple(row["problem"].split()[-3:]) for row in found["rows"]} == {
        (layout, dtype, cls)
        for layout in ("nchw", "nhwc")
        for dtype, cls in (("float32", "fp32"), ("bfloat16", "bf16"))
    }
    assert len(measured.choices()) == len(found["rows"])
    assert f"kept in {cache_folder / 'choices.json'}" in said(result)

    result = CliRunner().invoke(cli.app, ["tune", "--clear", "--device", "cpu", "--json", str(out)])
    assert result.exit_code == 0
    assert json.loads(out.read_text())["forgotten"] == len(found["rows"])
    assert not measured.choices()


def test_the_command_measures_networks(times):
    pytest.importorskip("torchvision")
    small = ["--network", "squeezenet1_1", "--device", "cpu", "--batch", "1", "--image", "32"]
    result = CliRunner().invoke(cli.app, ["tune", *small])
    assert result.exit_code == 0, said(result)
    assert measured.choices()


def test_the_command_fails_if_nothing_could_be_measured(monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("no clock")

    monkeypatch.setattr(timing, "measure", fail)
    result = CliRunner().invoke(cli.app, ["tune", "--set", "lenet5", "--device", "cpu"])
    assert result.exit_code == 1
    assert "problems could not be measured" in said(result)
    assert "no clock" in said(result)
    assert not measured.choices()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "lenet6"], "layer_set is 'lenet6'; expected one of layers"),
        (["--network", "lenet"], "network is 'lenet'; expected all, or some of vgg16"),
        (["--network", "resnet18", "--set", "layers"], "network is 'resnet18' beside --set layers; expected one"),
        (["--classes", "fp8"], "classes is 'fp8'"),
        (["--layouts", "nchv"], "layouts is 'nchv'"),
        (["--device", "tpu"], "device is 'tpu'"),
    ],
)
def test_the_command_names_what_is_wrong(options, message):
    result = CliRunner().invoke(cli.app, ["tune", "--device", "cpu", *options])
    assert result.exit_code == 1
    assert message in said(result)


@pytest.mark.parametrize(("disabled", "variable"), [(False, "FASTCONV_ALGORITHM"), (True, "FASTCONV_DISABLE")])
def test_there_is_nothing_to_measure_where_a_variable_chooses(disabled, variable, monkeypatch):
    monkeypatch.setattr(settings, "auto_algorithm", "torch" if disabled else "direct")
    monkeypatch.setattr(settings, "disabled", disabled)
    result = CliRunner().invoke(cli.app, ["tune", "--device", "cpu", "--set", "lenet5"])
    assert result.exit_code == 1
    assert f"{variable} is set to" in said(result)
    assert not measured.choices()


def test_the_slow_and_the_hopeless_get_less_time(monkeypatch):
    took = {"a": 1e3, "b": 6e3, "c": 30e3}
    monkeypatch.setattr(timing, "once", lambda call, device: (None, call()))
    rows = [{"algorithm": name, "cost_us": us} for name, us in [("a", 1.0), ("b", 2.0), ("c", 1e5)]]
    calls = {name: (lambda us=us: us) for name, us in took.items()}
    failures = {}
    assert timing.drop_hopeless(rows, calls, CPU, failures) == ["b"]
    assert calls.keys() == {"a", "b"}
    assert failures == {"c": "the cost model expects 100000 us, over 20 times the best"}


def test_pytorch_is_not_hopeless_because_it_searches_first(monkeypatch):
    monkeypatch.setattr(timing, "once", lambda call, device: (None, call()))
    rows = [{"algorithm": name, "cost_us": us} for name, us in [("a", 1.0), ("torch", 2.0), ("b", 3.0)]]
    calls = {"a": lambda: 10.0, "torch": iter([500e3, 8.0]).__next__, "b": iter([500e3, 8.0]).__next__}
    failures = {}
    assert timing.drop_hopeless(rows, calls, CPU, failures) == []
    assert calls.keys() == {"a", "torch"}
    assert failures == {"b": "one call took 500000 us, over 20 times the best"}
