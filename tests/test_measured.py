"""Measured choices: `auto` takes them where they fit, and the file keeps them."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import processes
import pytest
import torch
from choices import CPU, PROBLEM, SIZES, W, X, activate, choice, other_than, ran
from typer.testing import CliRunner

import fastconv
from fastconv import _C, cli, environment, measured, ops, settings, tuning

MISFIT = "winograd_f4"  # of a convolution with a stride
pytestmark = pytest.mark.usefixtures("cache_folder")


# --- The choice


def test_the_planner_takes_the_measured_algorithm():
    device = ops.device_info(CPU)
    before = _C.choose("auto", PROBLEM, device)
    assert not before["measured"]
    for row in _C.candidates(PROBLEM, device):
        if row["auto_eligible"]:
            activate(choice(row["algorithm"]))
            assert _C.choose("auto", PROBLEM, device) == row | {"measured": True}
    activate()
    assert _C.choose("auto", PROBLEM, device) == before


def test_a_bias_does_not_count_and_everything_else_does():
    device, more = ops.device_info(CPU), _C.cpu_device(97)
    planned = _C.choose("auto", PROBLEM, device)["algorithm"]
    activate(choice(other_than(planned)))
    biased = _C.ConvProblem(**SIZES, bias=True)
    assert _C.choose("auto", biased, device)["algorithm"] == other_than(planned)
    changes = [
        {"n": 3},
        {"residual": True},
        {"activation": "silu"},
        {"residual": True, "activation": "silu", "residual_after": True},
        {"max_pool": True},
        {"padding": (1, 1)},
        {"layout": "nhwc"},
        {"precision": "ieee"},
        {"dtype": "float16"},
    ]
    for change in changes:
        assert not _C.choose("auto", _C.ConvProblem(**SIZES | change), device)["measured"]
    assert not _C.choose("auto", PROBLEM, more)["measured"]
    assert not _C.choose("auto", PROBLEM, _C.h200_device())["measured"]
    assert _C.choose("torch", PROBLEM, device)["algorithm"] == "torch"  # what is asked for by name


def test_what_does_not_fit_or_is_unknown_is_not_taken():
    strided = _C.ConvProblem(**SIZES, stride=(2, 2))
    planned = _C.choose("auto", strided, ops.device_info(CPU))
    for name in (MISFIT, "of_tomorrow"):
        activate(choice(name, strided))
        assert _C.choose("auto", strided, ops.device_info(CPU)) == planned


def test_what_is_less_accurate_than_auto_admits_is_not_taken():
    device, refused = _C.h200_device(), 0
    for cls in ("ieee", "fp32", "tf32"):
        problem = _C.ConvProblem(2, 8, 16, 16, 8, 3, 3, padding=(1, 1), precision=cls, layout="nhwc")
        planned = _C.choose("auto", problem, device)
        for row in _C.candidates(problem, device):
            if row["ok"] and not row["auto_eligible"]:
                activate(choice(row["algorithm"], problem, _C.measured_device(device)))
                assert _C.choose("auto", problem, device) == planned
                refused += 1
    assert refused


def test_devices_are_told_apart():
    h200, portable = _C.h200_device(), _C.h200_device()
    portable.compute_capability = 80
    assert _C.measured_device(h200) == "NVIDIA H200, sm_90"
    assert _C.measured_device(portable) == "NVIDIA H200, sm_80"
    assert [_C.measured_device(_C.cpu_device(n)) for n in (1, 3)] == ["cpu, 1 thread", "cpu, 3 threads"]
    with pytest.raises(ValueError, match="expected device, pass, problem, choice with tabs between"):
        _C.set_measured("cpu\n")


def test_conv2d_follows_the_table_in_every_thread():
    planned = ran(X, W)
    activate(choice(other_than(planned)))
    assert ran(X, W) == other_than(planned)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(ran, X, W, torch.randn(4)).result() == other_than(planned)
    activate()
    assert ran(X, W) == planned


def test_a_layer_follows_the_table_after_it_has_remembered_a_choice():
    layer = fastconv.Conv2d(8, 4, 3).requires_grad_(False)
    expected = layer(X)
    planned = layer.last_algorithm
    for name in (other_than(planned), "torch", "implicit_gemm"):
        activate(choice(name))
        torch.testing.assert_close(layer(X), expected, rtol=1e-4, atol=1e-4)
        assert layer.last_algorithm == name
    activate()
    layer(X)
    assert layer.last_algorithm == planned


def test_compiled_code_follows_the_table():
    compiled = torch.compile(lambda x, w: fastconv.conv2d(x, w), backend="eager", fullgraph=True)
    compiled(X, W)
    planned = fastconv.last_call()["algorithm"]
    activate(choice(other_than(planned)))
    compiled(X, W)
    assert fastconv.last_call()["algorithm"] == other_than(planned)


def test_explain_info_and_result_files_say_so(cache_folder, tmp_path):
    arguments = {"x_shape": X.shape, "w_shape": W.shape, "device": "cpu"}
    assert "measured" not in fastconv.explain(**arguments).note
    activate(choice("direct"))
    explanation = fastconv.explain(**arguments)
    assert explanation.choice == "direct"
    assert explanation.note == f" (the choice was measured: {cache_folder / 'choices.json'})"
    out = tmp_path / "info.json"
    assert CliRunner().invoke(cli.app, ["info", "--json", str(out)]).exit_code == 0
    device = measured.device_name(CPU)
    assert environment.describe("layers", CPU)["measured_choices"] == 1
    assert json.loads(out.read_text())["measured"] == {
        "path": str(cache_folder / "choices.json"),
        "choices": {device: 1},
    }


# --- The file


def in_a_process(code, cache_folder):
    run = processes.run(code, environment={**os.environ, "FASTCONV_CACHE_DIR": str(cache_folder)})
    assert run.returncode == 0, run.stderr
    return run


IMPORT = """
import sys, torch, fastconv
assert "fastconv.cli" not in sys.modules and "platformdirs" not in sys.modules
fastconv.conv2d(torch.randn(2, 8, 11, 9), torch.randn(4, 8, 3, 3))
print(fastconv.last_call()["algorithm"])
"""


def test_another_process_takes_what_the_folder_keeps(cache_folder, tmp_path):
    planned = ran(X, W)
    measured.add([choice(other_than(planned))])
    assert [path.name for path in cache_folder.iterdir()] == ["choices.json"]
    run = in_a_process(IMPORT, cache_folder)
    assert (run.stdout.strip(), run.stderr) == (other_than(planned), "")
    assert in_a_process(IMPORT, tmp_path / "none").stdout.strip() == planned
    (cache_folder / "choices.json").write_text("{")
    run = in_a_process(IMPORT, cache_folder)
    assert run.stdout.strip() == planned
    assert run.stderr.count(str(cache_folder / "choices.json")) == 1


def test_the_file_round_trip(cache_folder):
    entries = [choice("direct"), choice("torch", device="NVIDIA H200, sm_90")]
    measured.add(entries)
    activate()
    measured.load()
    assert list(measured.choices().values()) == entries


def test_what_others_wrote_is_kept_and_replaced_problem_by_problem(cache_folder):
    other = _C.ConvProblem(**SIZES | {"n": 5})
    measured.add([choice("direct"), choice("direct", other)])
    activate()  # as a process that started before
    measured.add([choice("torch")])
    activate()
    measured.load()
    assert {key[1]: entry.algorithm for key, entry in measured.choices().items()} == {
        repr(PROBLEM): "torch", repr(other): "direct",
    }  # fmt: skip


def test_writers_at_the_same_time_lose_nothing(cache_folder):
    problems = [_C.ConvProblem(**SIZES | {"n": n}) for n in range(1, 17)]

    def write(entry):
        measured._edit(lambda kept: kept.update({entry.key: entry}))

    with ThreadPoolExecutor(len(problems)) as pool:
        list(pool.map(write, [choice("direct", problem) for problem in problems]))
    measured.load()
    assert {key[1] for key in measured.choices()} == {repr(problem) for problem in problems}


def row(**changes):
    good = {"device": "cpu", "problem": "N1", "algorithm": "direct", "us": {"direct": 1.0}}
    return good | {"fastconv": fastconv.__version__} | changes


@pytest.mark.parametrize(
    ("text", "complaint", "kept"),
    [
        ("{", "it is not JSON", 0),
        ("[" * 100_000, "it is not JSON", 0),
        ("\xff", "it is not JSON", 0),
        ("[]", "its schema is not 1", 0),
        ('{"schema": 2, "choices": []}', "its schema is not 1", 0),
        ('{"schema": 1}', "it has no list of choices", 0),
        ([row(fastconv="0.0.1"), row()], "1 of 2 measured with fastconv 0.0.1", 1),
        ([row(algorithm="magic"), row()], "1 of 2 of an unknown algorithm 'magic'", 1),
        (
            [3, {}, row(us=7), row(us={"direct": "fast"}), row(device="a\tb"), row(problem=""), row()],
            "6 of 7 malfor",
            1,
        ),
    ],
)
def test_what_cannot_be_used_is_left_out_with_one_warning(cache_folder, text, complaint, kept):
    cache_folder.mkdir()
    content = text if isinstance(text, str) else json.dumps({"schema": 1, "choices": text})
    (cache_folder / "choices.json").write_text(content, encoding="latin-1")
    with pytest.warns(UserWarning, match="choices.json") as warned:
        measured.load()
    assert len(warned) == 1
    assert complaint in str(warned[0].message)
    assert len(measured.choices()) == kept
    measured.add([choice("direct")])  # repairs the file
    activate()
    measured.load()
    assert choice("direct").key in measured.choices()


def test_a_folder_in_the_place_of_the_file_is_a_warning(cache_folder):
    (cache_folder / "choices.json").mkdir(parents=True)
    with pytest.warns(UserWarning, match=r"choices\.json: it cannot be read"):
        measured.load()


def test_an_empty_variable_keeps_nothing(monkeypatch, cache_folder):
    monkeypatch.setattr(settings, "cache_dir", "")
    measured.require_writable()
    measured.add([choice("direct")])
    assert ran(X, W) == "direct"
    assert measured.path() is None
    measured.load()
    assert measured.forget(measured.device_name(CPU)) == 1
    assert not cache_folder.exists()


def test_the_default_is_the_users_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(settings, "cache_dir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert measured.path() == tmp_path / "fastconv" / "choices.json"


def test_a_folder_that_cannot_be_written_is_named_before_anything_is_measured(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(settings, "cache_dir", str(tmp_path / "file"))
    monkeypatch.setattr(tuning, "_measure", None)
    with pytest.raises(OSError, match=r"FASTCONV_CACHE_DIR is '.*file'; expected a folder that can be written"):
        fastconv.tune(lambda: fastconv.conv2d(X, W))


def test_forget_leaves_other_devices(cache_folder):
    measured.add([choice("direct"), choice("direct", device="NVIDIA H200, sm_90")])
    assert measured.forget(measured.device_name(CPU)) == 1
    assert [key[0] for key in measured.choices()] == ["NVIDIA H200, sm_90"]
    activate()
    measured.load()
    assert [key[0] for key in measured.choices()] == ["NVIDIA H200, sm_90"]
