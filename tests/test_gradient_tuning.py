"""Measured choices of gradients: what `tune` measures, and that planner, operators and reports take it. No test asserts
a time."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from choices import CPU, activate, choice
from layers import relative_error
from torch import nn
from typer.testing import CliRunner

import fastconv
from fastconv import _C, cli, measured, ops, selection, timing, tuning
from fastconv.ops import gradients
from fastconv.ops.geometry import Geometry

pytestmark = pytest.mark.usefixtures("cache_folder", "full_precision")

GRADIENTS = selection.PASSES[1:]
SIZES = {"n": 2, "c": 8, "h": 11, "w": 9, "k": 12, "r": 3, "s": 3, "padding": (1, 1)}
FORMS = {
    "same": _C.ConvProblem(**SIZES),
    "strided": _C.ConvProblem(**SIZES | {"stride": (2, 2)}),
    "dilated": _C.ConvProblem(**SIZES | {"stride": (3, 2), "dilation": (2, 1), "padding": (2, 0)}),
    "groups": _C.ConvProblem(**SIZES | {"groups": 4}),
    "1x1": _C.ConvProblem(**SIZES | {"r": 1, "s": 1, "padding": (0, 0)}),
}


def device():
    return ops.device_info(CPU)


def eligible(pass_, problem, info=None):
    """What tune would measure, without the template that scales channels."""
    rows = selection.candidates(pass_, problem, info or device())
    return [row["algorithm"] for row in rows if row["auto_eligible"] and not row["algorithm"].endswith("null")]


def chosen(pass_, problem, info=None):
    return selection.choose(pass_, problem, info or device())[:2]


# --- The choice


@pytest.mark.parametrize("pass_", GRADIENTS)
@pytest.mark.parametrize("info", [_C.cpu_device(1), _C.h200_device()], ids=["cpu", "h200"])
def test_the_planner_takes_every_candidate_that_was_measured(pass_, info):
    name = _C.measured_device(info)
    for problem in FORMS.values():
        before = chosen(pass_, problem, info)
        assert before == (_C.choose_by_cost(pass_, problem, info), False)
        candidates = eligible(pass_, problem, info)
        assert before[0] in candidates
        assert candidates[-1] == "torch"
        for candidate in candidates:
            activate(choice(candidate, problem, name, pass_))
            assert chosen(pass_, problem, info) == (candidate, True)
            assert _C.choose_by_cost(pass_, problem, info) == before[0]
        activate()
        assert chosen(pass_, problem, info) == before


def test_an_input_gradient_may_be_made_in_both_ways_and_by_pytorchs_convolution():
    names = eligible("backward_input", FORMS["strided"])
    assert {"phases direct", "together direct", "phases torch", "together torch", "torch"} <= set(names)
    assert not any(name.startswith("together") for name in eligible("backward_input", FORMS["same"]))


@pytest.mark.parametrize("pass_", GRADIENTS)
def test_what_is_computed_with_the_convolution_does_not_count_and_everything_else_does(pass_):
    problem = FORMS["same"]
    other = next(name for name in eligible(pass_, problem) if name != chosen(pass_, problem)[0])
    activate(choice(other, problem, pass_=pass_))
    for same in ({"bias": True}, {"activation": "relu"}, {"residual": True}, {"max_pool": True}):
        assert chosen(pass_, _C.ConvProblem(**SIZES | same)) == (other, True)
    for change in ({"n": 3}, {"padding": (0, 1)}, {"layout": "nhwc"}, {"precision": "ieee"}, {"dtype": "bfloat16"}):
        assert not chosen(pass_, _C.ConvProblem(**SIZES | change))[1]
    for another in selection.PASSES:
        assert chosen(another, problem)[1] == (another == pass_)
    assert not chosen(pass_, problem, _C.cpu_device(97))[1]
    # What is asked for by name does not ask the table.
    assert selection.choose(pass_, problem, device(), "torch").row["code"] == "algorithm"
    assert not selection.choose(pass_, problem, device(), "im2col_gemm").measured


@pytest.mark.parametrize("pass_", GRADIENTS)
def test_what_does_not_fit_or_is_unknown_is_not_taken(pass_):
    problem = FORMS["strided"]
    before = chosen(pass_, problem)
    for name in ("of_tomorrow", "phases of_tomorrow", "winograd_f4", "phases winograd_f4", "phases", ""):
        activate(choice(name, problem, pass_=pass_))
        assert chosen(pass_, problem) == before


@pytest.mark.parametrize("pass_", GRADIENTS)
def test_limits_hold(pass_):
    info = _C.h200_device()
    name = _C.measured_device(info)
    sizes = {"n": 8, "c": 32, "h": 32, "w": 32, "k": 64, "r": 3, "s": 3, "padding": (1, 1), "layout": "nhwc"}
    problem = _C.ConvProblem(**sizes)
    refused = 0
    for row in selection.candidates(pass_, problem, info):
        if not row["ok"] or row["algorithm"] == "torch":
            continue
        activate(choice(row["algorithm"], problem, name, pass_))
        assert chosen(pass_, problem, info)[1] == row["auto_eligible"]
        for limit in ({"max_workspace": max(row["workspace_bytes"] - 1, 0)}, {"max_error": 1.0}):
            limited = _C.ConvProblem(**sizes | limit)
            within = row["workspace_bytes"] == 0 if "max_workspace" in limit else row["expected_error"] <= 1.0
            # Measured without a limit, it is the fastest of those within one, too.
            assert chosen(pass_, limited, info)[1] == (within and row["auto_eligible"])
            refused += not within
    assert refused
    limited = _C.ConvProblem(**sizes, max_error=1.25)
    activate(choice("torch", problem, name, pass_), choice(chosen(pass_, problem, info)[0], limited, name, pass_))
    assert chosen(pass_, problem, info) == ("torch", True)
    assert chosen(pass_, limited, info)[1]


def test_where_pytorchs_would_be_in_another_class_a_measured_one_of_pytorchs_is_ours():
    problem, info = FORMS["same"], _C.h200_device()
    activate(choice("torch", problem, _C.measured_device(info), "backward_input"))
    assert _C.choose_input_gradient("auto", problem, info)["code"] == "measured"
    assert _C.choose_input_gradient("auto", problem, info, own=True)["method"] == "phases"


# --- What runs


def tensors(problem, dtype=torch.float32):
    x = torch.randn(problem.n, problem.c, problem.h, problem.w, dtype=dtype)
    weight = torch.randn(problem.k, problem.c // problem.groups, problem.r, problem.s, dtype=dtype)
    grad = torch.randn(problem.n, problem.k, problem.p, problem.q, dtype=dtype)
    return x, weight, grad, Geometry(problem.stride, problem.padding, problem.dilation, problem.groups)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("form", FORMS)
def test_each_candidate_is_right_when_it_is_forced(form, layout):
    x, weight, grad, geometry = tensors(FORMS[form])
    x, weight = (t.to(memory_format=layout).requires_grad_() for t in (x, weight))
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    nn.functional.conv2d(*exact, None, *geometry).backward(grad.double())
    problem = tuning.Convolution(
        CPU, x.dtype, tuple(x.shape), tuple(weight.shape), *geometry, "fp32", layout, layout
    ).problem()
    for pass_, of, expected in zip(GRADIENTS, (x, weight), exact, strict=True):
        for name in eligible(pass_, problem):
            activate(choice(name, problem, pass_=pass_))
            (found,) = torch.autograd.grad(fastconv.conv2d(x, weight, None, *geometry), of, grad)
            assert relative_error(found.double(), expected.grad) < 1e-5, (pass_, name)
            assert found.is_contiguous(memory_format=layout)


def eager(x, weight, geometry):
    return fastconv.conv2d(x, weight, None, *geometry)


def layer(x, weight, geometry):
    made = fastconv.Conv2d(x.shape[1], weight.shape[0], 3, *geometry, bias=False)
    made.weight = nn.Parameter(weight.detach())
    return torch.func.functional_call(made, {"weight": weight}, (x,))


def with_epilogue(x, weight, geometry):
    return fastconv.conv2d(x, weight, None, *geometry, activation="leaky_relu", negative_slope=1.0)


@torch.compile(backend="aot_eager")
def compiled(x, weight, geometry):
    return fastconv.conv2d(x, weight, None, *geometry)


CALLS = [eager, layer, with_epilogue, compiled]


@pytest.mark.parametrize("call", CALLS, ids=[call.__name__ for call in CALLS])
@pytest.mark.parametrize("form", ["same", "strided"])
def test_an_entry_is_what_runs(call, form):
    """Of an input gradient the last convolution tells; of a weight gradient the rounding, which is each one's own."""
    problem = FORMS[form]
    x, weight, grad, geometry = tensors(problem)
    x.requires_grad_(), weight.requires_grad_()
    problems = problem, _C.ConvProblem(**SIZES | {"stride": problem.stride, "activation": "leaky_relu"})
    forward = [choice("direct", each) for each in problems]
    for name in ("phases im2col_gemm", "phases implicit_gemm", "torch", "phases torch"):
        activate(*forward, choice(name, problem, pass_="backward_input"))
        torch.autograd.grad(call(x, weight, geometry), x, grad)
        assert fastconv.last_call()["algorithm"] == (name.split()[1] if name != "torch" else "direct")
    sums = {}
    for name in eligible("backward_weight", problem):
        activate(*forward, choice(name, problem, pass_="backward_weight"))
        (sums[name],) = torch.autograd.grad(call(x, weight, geometry), weight, grad)
        by = gradients.weight_gradient_by(name, x.detach(), grad, weight.shape, geometry, "fp32", 0)
        assert torch.equal(sums[name], by), name
    assert len(sums) > 1
    assert not torch.equal(*list(sums.values())[-2:])


def test_gradients_of_gradients_take_it():
    problem = FORMS["same"]
    x, weight, grad, geometry = tensors(problem)
    x.requires_grad_(), weight.requires_grad_()
    activate(choice("direct", problem), choice("phases im2col_gemm", problem, pass_="backward_input"))
    (dx,) = torch.autograd.grad(fastconv.conv2d(x, weight, None, *geometry), x, grad, create_graph=True)
    assert fastconv.last_call()["algorithm"] == "im2col_gemm"
    torch.autograd.grad(dx.square().sum(), weight)


def test_a_transposed_layer_is_an_input_gradient():
    problem = FORMS["strided"]  # of the convolution whose input gradient it is
    x, weight, y, geometry = tensors(problem)
    made = fastconv.ConvTranspose2d(12, 8, 3, stride=2, padding=1, output_padding=(0, 0), bias=True)
    made.weight = nn.Parameter(weight)
    for y_needs in (False, True):
        y.requires_grad_(y_needs)
        for name in ("phases im2col_gemm", "together implicit_gemm"):
            activate(choice(name, problem, pass_="backward_input"))
            found = made(y)
            assert made._fastconv.last_algorithm == name.split()[1]
            expected = nn.functional.conv_transpose2d(y.double(), weight.double(), made.bias.double(), 2, 1)
            assert relative_error(found.double(), expected) < 1e-5
    # Its own input gradient is the convolution.
    sums = []
    for name in ("direct", "two_stage"):
        activate(choice(name, problem))
        sums += torch.autograd.grad(made(y), y, x)
        assert torch.equal(sums[-1], fastconv.conv2d(x, weight, None, *geometry, algorithm=name))
    assert not torch.equal(*sums)
    activate(choice("torch", problem, pass_="backward_input"))
    with torch.no_grad():
        made(y)
    assert made._fastconv.last_algorithm == "torch"


def test_a_row_is_a_convolution_of_height_one():
    problem = _C.ConvProblem(2, 8, 1, 20, 12, 1, 3, padding=(0, 1))
    made = fastconv.Conv1d(8, 12, 3, padding=1, bias=False)
    activate(choice("direct", problem), choice("phases im2col_gemm", problem, pass_="backward_input"))
    x = torch.randn(2, 8, 20, requires_grad=True)
    made(x).sum().backward()
    assert fastconv.last_call()["algorithm"] == "im2col_gemm"


def test_every_thread_follows_the_table():
    problem = FORMS["same"]
    x, weight, grad, geometry = tensors(problem)
    x.requires_grad_()

    def ran():
        torch.autograd.grad(fastconv.conv2d(x, weight, None, *geometry), x, grad)
        return fastconv.last_call()["algorithm"]

    with ThreadPoolExecutor(3) as pool:
        for name in ("im2col_gemm", "implicit_gemm", "direct"):
            activate(choice("torch", problem), choice(f"phases {name}", problem, pass_="backward_input"))
            assert {future.result() for future in [pool.submit(ran) for _ in range(6)]} == {name}


# --- Measuring


def network():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3, 2, bias=False), nn.ConvTranspose2d(6, 4, 2, 2)
    )


X = torch.randn(2, 3, 11, 12)


def rows_of(report):
    """(pass, K, algorithm) of each."""
    return sorted((row.pass_, row.problem.split()[4], row.algorithm) for row in report.rows)


def test_a_training_step_is_measured_where_the_model_trains(times):
    model = network()
    fastconv.swap_(model)
    times |= {"direct": 1.0, "phases direct": 1.0, "implicit_gemm": 2.0, "torch": 50.0}
    report = fastconv.tune(model, X)
    # The transposed layer's convolution has K = 6. Its forward pass is that one's input gradient, and the other way.
    assert [row[:2] for row in rows_of(report)] == [
        ("backward_input", "K6"), ("backward_input", "K6"),
        ("backward_weight", "K6"), ("backward_weight", "K6"), ("backward_weight", "K8"),
        ("forward", "K6"), ("forward", "K6"), ("forward", "K8"),
    ]  # fmt: skip
    for row in report.rows:
        best = {"forward": "direct", "backward_input": "phases direct", "backward_weight": "implicit_gemm"}[row.pass_]
        assert row.algorithm == best, row
        info = selection.candidates(row.pass_, _problem_of(row), device())
        assert row.us.keys() | row.failures.keys() == {r["algorithm"] for r in info if r["auto_eligible"]}
    assert all(f" {pass_} " in str(report) or pass_ == "forward" for pass_ in selection.PASSES)
    model(X).sum().backward()
    assert [model[i]._fastconv.last_algorithm for i in (0, 2, 3)] == ["direct"] * 3
    # In inference the forward pass alone.
    forward = rows_of(fastconv.tune(model, X, passes=["forward"]))
    assert [row[:2] for row in forward] == [("backward_input", "K6"), ("forward", "K6"), ("forward", "K8")]
    assert rows_of(fastconv.tune(model.eval(), X)) == forward
    with torch.no_grad():
        assert rows_of(fastconv.tune(model.train(), X)) == forward


_problems = {}


def _problem_of(row):
    return _problems[row.problem]


@pytest.fixture(autouse=True)
def _remembered_problems(monkeypatch):
    original = tuning.Convolution.problem

    def problem(self):
        made = original(self)
        return _problems.setdefault(repr(made), made)

    monkeypatch.setattr(tuning.Convolution, "problem", problem)


def test_what_requires_no_gradient_is_not_measured(times):
    model = network()
    fastconv.swap_(model)
    model[0].requires_grad_(False)
    found = tuning.record(model, X, passes=None)
    assert sorted(each.pass_ for each in found if each.weight_shape[0] == 8) == ["forward"]
    assert {each.pass_ for each in found if each.weight_shape[1] == 8} == {"forward", "backward_weight"}
    with torch.autocast("cpu", torch.bfloat16):
        cast = tuning.record(model, X, passes=None)
    assert {each.dtype for each in cast} == {torch.bfloat16}
    assert sorted(each.pass_ for each in cast) == sorted(each.pass_ for each in found)


def test_a_trained_weight_is_packed_in_what_is_timed(times, monkeypatch):
    packed = []
    original = ops.pack_weight
    monkeypatch.setattr(ops, "pack_weight", lambda *args: packed.append(args[2]) or original(*args))
    model, x = nn.Sequential(nn.Conv2d(8, 8, 3)), torch.randn(1, 8, 9, 9)
    fastconv.swap_(model)
    for passes in (None, ["forward", "backward_weight"]):
        fastconv.tune(model, x, passes=passes)
        assert not packed
    fastconv.tune(model, x, passes=["forward"])
    assert packed


def test_the_passes_that_are_asked_for_are_measured(times):
    weight, x = torch.randn(4, 8, 3, 3), torch.randn(1, 8, 6, 6)
    assert [row.pass_ for row in fastconv.tune(fastconv.conv2d, x, weight).rows] == ["forward"]
    for passes in (["backward_weight"], ("backward_input", "forward"), selection.PASSES):
        report = fastconv.tune(fastconv.conv2d, x, weight, activation="relu", max_error=2.0, passes=passes)
        assert {row.pass_ for row in report.rows} == set(passes)
        relu = " + relu" + " packed in the call" * ("backward_weight" in passes)
        assert all(row.problem.endswith(relu * (row.pass_ == "forward") + " max_error 2") for row in report.rows)
    (row,) = fastconv.tune(fastconv.conv2d, x, weight.requires_grad_()).rows[1:]
    assert row.pass_ == "backward_weight"


def test_tune_from_end_to_end(cache_folder):
    model, x = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, 2)), torch.randn(2, 8, 9, 7)
    exact = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, 2)).double()
    exact.load_state_dict(model.state_dict())
    fastconv.swap_(model)
    report = fastconv.tune(model, x)
    assert sorted(row.pass_ for row in report.rows) == ["backward_input"] + ["backward_weight"] * 2 + ["forward"] * 2
    assert all(us > 0 for row in report.rows for us in row.us.values())
    kept = json.loads((cache_folder / "choices.json").read_text())["choices"]
    assert [(entry["pass"], entry["algorithm"]) for entry in kept] == [(r.pass_, r.algorithm) for r in report.rows]
    model(x).square().sum().backward()
    exact(x.double()).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert relative_error(parameter.grad.double(), exact.get_parameter(name).grad) < 1e-5, name


def test_bad_passes():
    with pytest.raises(TypeError, match="passes is 'forward'; expected some of forward, backward_input, backward_wei"):
        fastconv.tune(fastconv.conv2d, passes="forward")
    with pytest.raises(TypeError, match="passes is 3; expected some of"):
        fastconv.tune(fastconv.conv2d, passes=3)
    with pytest.raises(ValueError, match="passes has 'backward'; expected some of forward"):
        fastconv.tune(fastconv.conv2d, passes=["backward"])
    with pytest.raises(ValueError, match="passes is empty; expected some of"):
        fastconv.tune(fastconv.conv2d, passes=())


def test_the_command_measures_gradients(times, monkeypatch, tmp_path):
    out = tmp_path / "tune.json"
    monkeypatch.setattr(timing, "once", lambda call, device: (None, 1e9))
    options = ["--set", "lenet5", "--device", "cpu", "--passes", "all", "--json", str(out)]
    result = CliRunner().invoke(cli.app, ["tune", *options])
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())["rows"]
    assert {row["pass_"] for row in found} == set(selection.PASSES)
    assert len(measured.choices()) == len(found)
    result = CliRunner().invoke(cli.app, ["tune", "--set", "lenet5", "--device", "cpu", "--passes", "back"])
    assert result.exit_code == 1
    assert "passes is 'back'; expected all, or some of forward" in " ".join(result.output.split())


# --- The file


def test_the_file_round_trip():
    problem = FORMS["strided"]
    entries = [
        choice("direct", problem), choice("together torch", problem, pass_="backward_input"),
        choice("phases auto", FORMS["dilated"], pass_="backward_input"),
        choice("implicit_gemm", problem, pass_="backward_weight"),
    ]  # fmt: skip
    measured.add(entries)
    activate()
    measured.load()
    assert list(measured.choices().values()) == entries
    assert chosen("backward_input", problem) == ("together torch", True)
    assert measured.forget(measured.device_name(CPU)) == len(entries)


def test_a_file_without_passes_is_one_of_the_forwards(cache_folder):
    problem = FORMS["same"]
    row = {"device": measured.device_name(CPU), "problem": repr(problem), "algorithm": "direct", "us": {}}
    rows = [row | {"fastconv": fastconv.__version__, "torch": torch.__version__}]
    cache_folder.mkdir()
    (cache_folder / "choices.json").write_text(json.dumps({"schema": 1, "choices": rows}))
    measured.load()
    assert chosen("forward", problem) == ("direct", True)
    assert not any(chosen(pass_, problem)[1] for pass_ in GRADIENTS)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"pass": "sideways"}, "1 of 2 of an unknown pass 'sideways'"),
        ({"pass": 3}, "1 of 2 of an unknown pass 3"),
        ({"pass": "backward_weight", "algorithm": "phases direct"}, "of an unknown algorithm 'phases direct'"),
        ({"pass": "backward_input", "algorithm": "direct"}, "of an unknown algorithm 'direct'"),
        ({"pass": "backward_input", "algorithm": "phases magic"}, "of an unknown algorithm 'phases magic'"),
        ({"pass": "backward_input", "algorithm": "turns direct"}, "of an unknown algorithm 'turns direct'"),
    ],
)
def test_what_cannot_be_used_is_left_out_with_one_warning(cache_folder, changes, complaint):
    good = {"device": "cpu", "problem": "N1", "pass": "backward_input", "algorithm": "phases direct", "us": {}}
    good |= {"fastconv": fastconv.__version__}
    cache_folder.mkdir()
    (cache_folder / "choices.json").write_text(json.dumps({"schema": 1, "choices": [good | changes, good]}))
    with pytest.warns(UserWarning, match="choices.json") as warned:
        measured.load()
    assert len(warned) == 1
    assert complaint in str(warned[0].message)
    assert len(measured.choices()) == 1


# --- What is said of it


def test_explain_says_so(cache_folder):
    problem = FORMS["same"]
    arguments = {"x_shape": (2, 8, 11, 9), "w_shape": (12, 8, 3, 3), "padding": 1, "device": "cpu"}
    for pass_ in GRADIENTS:
        assert "measured" not in fastconv.explain(**arguments, pass_=pass_).note
        activate(choice("torch", problem, pass_=pass_))
        found = fastconv.explain(**arguments, pass_=pass_)
        assert found.choice == "torch"
        assert found.note == (
            " (PyTorch's gradient, measured: PyTorch's gradient was measured to be the fastest)"
            f" (the choice was measured: {cache_folder / 'choices.json'})"
        )
        activate()
    activate(choice("phases im2col_gemm", problem, pass_="backward_input"))
    found = fastconv.explain(**arguments, pass_="backward_input")
    assert found.choice == "im2col_gemm"
    assert "made of a convolution of stride 1" in found.note
    assert "the choice was measured" in found.note


def test_the_swaps_report_tells_of_gradients_if_it_is_asked():
    model = network()
    report = fastconv.swap_(model)
    assert report.table() == str(report)
    assert [row.choice("backward_input") for row in report.rows] == [None] * 3
    model(X)
    assert "backward" not in str(report)
    lines = report.table(selection.PASSES).splitlines()
    assert ["algorithm", "backward_input", "backward_weight"] in [line.split()[-3:] for line in lines]
    problem = _C.ConvProblem(2, 8, 9, 10, 6, 3, 3, stride=(2, 2))
    assert report.rows[1].choice("backward_input") == chosen("backward_input", problem)[0]
    names = {"backward_input": "together direct", "backward_weight": "torch"}
    activate(*(choice(name, problem, pass_=pass_) for pass_, name in names.items()))
    assert report.rows[1].choice("backward_input") == "together direct (measured)"
    assert report.rows[1].choice("backward_weight") == "torch (measured)"
    assert "together direct (measured)" in report.table(["backward_input"])
    # The transposed layer's input gradient is a convolution: 4 channels to 6.
    activate(choice("direct", _C.ConvProblem(2, 4, 8, 8, 6, 2, 2, (2, 2))))
    assert report.rows[2].choice("backward_input") == "direct (measured)"
    with pytest.raises(ValueError, match="passes has 'sideways'"):
        report.table(["sideways"])
