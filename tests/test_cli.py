"""The command line: exit codes, messages, JSON."""

import dataclasses
import json
import runpy
import sys
from types import SimpleNamespace

import processes
import pytest
import torch
from typer.testing import CliRunner

import fastconv
from benchmarks.harness import results
from fastconv import _C, cli, ops

run = CliRunner().invoke
SMALL = ["--network", "resnet18", "--device", "cpu", "--batch", "1", "--image", "32"]


def said(result) -> str:
    """Everything printed, on one line: the terminal's width breaks messages."""
    return " ".join((result.stdout + result.stderr).split())


def test_info(tmp_path):
    path = tmp_path / "deeper" / "info.json"
    result = run(cli.app, ["info", "--json", str(path)])
    assert result.exit_code == 0, said(result)
    found = json.loads(path.read_text())
    assert found["torch"] == torch.__version__
    assert found["usable"]["cpu"]["ok"] is True
    assert [row["name"] for row in found["algorithms"]] == [row.name for row in fastconv.algorithms()]
    assert found["usable"]["cuda"]["ok"] is not bool(found["usable"]["cuda"]["reason"])
    if not torch.cuda.is_available():
        assert not found["usable"]["cuda"]["ok"]
        assert "not usable" in said(result)


def test_version():
    result = run(cli.app, ["--version"])
    assert result.exit_code == 0, said(result)
    assert said(result).startswith(f"fastconv {fastconv.__version__}, built with torch 2.")
    assert said(result).endswith(f"; torch {torch.__version__}")


def test_explain(tmp_path):
    path = tmp_path / "explain.json"
    shape = ["--n", "2", "--c", "32", "--h", "14", "--k", "16", "--stride", "2", "--device", "cpu"]
    result = run(cli.app, ["explain", *shape, "--json", str(path)])
    assert result.exit_code == 0, said(result)
    found = json.loads(path.read_text())
    assert {row["algorithm"] for row in found["rows"]} == {row.name for row in fastconv.algorithms()}
    assert found["choice"] in {row["algorithm"] for row in found["rows"] if row["fits"]}
    assert "direct" in result.stdout


ENDS = {
    "--bias": {"bias": True}, "--residual": {"residual": True}, "--activation silu": {"activation": "silu"},
    "--residual --residual-after": {"residual": True, "residual_after": True}, "--max-pool": {"max_pool": True},
    "--pass backward_input": {"pass_": "backward_input"}, "--pass backward_weight": {"pass_": "backward_weight"},
}  # fmt: skip


@pytest.mark.parametrize("options", ENDS)
def test_explain_of_other_passes_and_of_what_goes_with_a_convolution(options, tmp_path):
    path = tmp_path / "explain.json"
    result = run(cli.app, ["explain", "--device", "cpu", *options.split(), "--json", str(path)])
    assert result.exit_code == 0, said(result)
    found, expected = json.loads(path.read_text()), explained(**ENDS[options])
    assert found == json.loads(json.dumps(expected))
    assert expected != explained()


def explained(**arguments):
    return dataclasses.asdict(fastconv.explain((1, 64, 56, 56), (64, 64, 3, 3), 1, 1, device="cpu", **arguments))


@pytest.mark.parametrize(("name", "is_known"), [("NVIDIA H200", True), ("NVIDIA L40S", False)])
def test_info_offers_to_measure_a_gpu_of_which_nothing_is_known(name, is_known, monkeypatch, tmp_path):
    def device_info(device):
        info = _C.h200_device()
        info.name = name
        return info

    properties = SimpleNamespace(name=name, major=9, minor=0, total_memory=48 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(_C, "built_with_cuda", True)
    monkeypatch.setattr(ops, "device_info", device_info)
    path = tmp_path / "info.json"
    result = run(cli.app, ["info", "--json", str(path)])
    assert result.exit_code == 0, said(result)
    assert [gpu["has_own_rates"] for gpu in json.loads(path.read_text())["gpus"]] == [is_known]
    assert ("not measured: costs are a generic GPU's" in said(result)) is not is_known
    assert ("`fastconv tune --device cuda:0` measures" in said(result)) is not is_known


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "--c", "10", "--groups", "3"], "groups is 3; expected a divisor of c = 10"),
        (["explain", "--h", "1", "--r", "5", "--padding", "0"], "smaller than the kernel"),
        (["explain", "--pass", "backward"], "pass_ is 'backward'; expected one of forward, backward_input"),
        (["explain", "--activation", "tanh"], "activation is 'tanh'; expected None or one of"),
        (["demo", "--network", "lenet"], "network is 'lenet'; expected all, or some of vgg16"),
        (["demo", *SMALL, "--device", "tpu"], "device is 'tpu'"),
        (["demo", *SMALL, "--device", "cuda:99"], "device is 'cuda:99'"),
        (["demo", *SMALL, "--algorithm", "magic"], "algorithm is 'magic'; expected one of auto"),
        (["bench", "networks", *SMALL, "--classes", "fp8"], "classes is 'fp8'"),
        (["bench", "networks", *SMALL, "--classes", ","], "classes is empty"),
        (["bench", "networks", *SMALL, "--modes", "fast"], "modes is 'fast'"),
        (["trace", "--layer", "vgg9"], "layer is 'vgg9'; expected one of vgg1_1"),
        (["trace", "--costs", "1,2,x,4"], "costs is '1,2,x,4'; expected four numbers"),
        (["trace", "--costs", "1,2,3,0"], "expected four positive numbers"),
        (["trace", "--device", "cpu", "--blocks", "3"], "blocks is 3, but the run is simulated; expected --workers"),
        (["bench", "megakernel", "--parts", "all,most"], "parts is 'all'; expected all, or some of layers, mapping"),
        (["bench", "megakernel", "--classes", "fp8"], "classes is 'fp8'; expected all, or some of ieee, fp32, tf32"),
        (["bench", "megakernel-soak", "--classes", "fp8"], "classes is 'fp8'"),
        (["bench", "weights-soak", "--modes", "magic"], "modes is 'magic'; expected all, or some of swapped"),
        (["bench", "layers", "--device", "cpu", "--batch", "zero"], "batch is 'zero'; expected positive integers"),
        (["bench", "layers", "--device", "cpu", "--algorithms", "magic"], "algorithms is 'magic'"),
    ],
)
def test_bad_values_end_in_a_message(arguments, message):
    result = run(cli.app, arguments)
    assert result.exit_code == 1
    assert message in said(result)
    assert "Traceback" not in said(result)


@pytest.mark.parametrize("arguments", [["magic"], ["demo", "--batch", "0"], ["demo", "--precision", "fp8"], ["bench"]])
def test_bad_usage(arguments):
    assert run(cli.app, arguments).exit_code == 2


def test_demo(tmp_path):
    path = tmp_path / "demo.json"
    result = run(cli.app, ["demo", *SMALL, "--algorithm", "direct", "--json", str(path)])
    assert result.exit_code == 0, said(result)
    found = json.loads(path.read_text())
    assert found["suite"] == "demo"
    (row,) = found["rows"]
    assert row["algorithm"] == "direct"
    assert row["swapped"] == row["total"] == 20
    assert row["difference"] <= row["bound"]
    assert row["problem"] is None
    assert "equal" in said(result)


def test_demo_fails_outside_the_bound(monkeypatch, tmp_path):
    forward = fastconv.Conv2d.forward
    monkeypatch.setattr(fastconv.Conv2d, "forward", lambda self, x: forward(self, x) * 1.001)
    path = tmp_path / "demo.json"
    result = run(cli.app, ["demo", *SMALL, "--algorithm", "auto", "--json", str(path)])
    assert result.exit_code == 1
    assert "1 of 1 passes failed" in said(result)
    assert json.loads(path.read_text())["rows"][0]["problem"].startswith("swapped and unswapped logits differ")


def test_demo_nan_is_a_failure_and_still_json(monkeypatch, tmp_path):
    forward = fastconv.Conv2d.forward
    monkeypatch.setattr(fastconv.Conv2d, "forward", lambda self, x: forward(self, x) * float("nan"))
    path = tmp_path / "demo.json"
    assert run(cli.app, ["demo", *SMALL, "--algorithm", "auto", "--json", str(path)]).exit_code == 1
    assert json.loads(path.read_text())["rows"][0]["difference"] is None


def test_bench_networks(tmp_path):
    path = tmp_path / "networks.json"
    result = run(
        cli.app,
        [
            "bench",
            "networks",
            *SMALL,
            "--classes",
            "fp32",
            "--peers",
            "torch_eager",
            "--rounds",
            "1",
            "--json",
            str(path),
        ],
    )
    assert result.exit_code == 0, said(result)
    document = results.read(path)
    assert document["suite"] == "networks_cpu"
    assert [(row["network"], row["mode"]) for row in document["rows"]] == [("resnet18", "eager"), ("resnet18", "fused")]


@pytest.mark.parametrize("suite", ["megakernel", "megakernel-soak", "soak", "stages"])
def test_a_suite_that_needs_a_gpu_says_so(suite, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run(cli.app, ["bench", suite])
    assert result.exit_code == 1
    assert "no CUDA GPU on this machine: nothing was" in said(result)


def test_trace(tmp_path):
    out, figure, path = tmp_path / "deeper" / "trace.json", tmp_path / "tasks.svg", tmp_path / "run.json"
    wanted = ["--layer", "res3", "--batch", "4", "--workers", "7", "--m", "3", "--filter-tasks", "--costs", "1,2,3,4"]
    files = ["--out", str(out), "--figure", str(figure), "--json", str(path)]
    result = run(cli.app, ["trace", *wanted, *files])
    assert result.exit_code == 0, said(result)
    events = json.loads(out.read_text())["traceEvents"]
    found = json.loads(path.read_text())
    slices = [event for event in events if event["ph"] == "X" and event["cat"] != "wait"]
    assert {event["cat"] for event in slices} == {"filter", "input", "gemm", "output"}
    assert {event["tid"] for event in slices} == set(range(7))
    assert found["m"] == 3
    last = max(event["ts"] + event["dur"] for event in slices if event["pid"] == 1)
    assert last == pytest.approx(found["task map"]["us"], abs=0.01)
    assert "tasks running" in figure.read_text()


def test_debug_shows_the_traceback(monkeypatch):
    monkeypatch.setenv("FASTCONV_LOG", "debug")
    result = run(cli.app, ["demo", "--network", "lenet"])
    assert isinstance(result.exception, ValueError)


def test_other_stages_are_refused():
    result = run(cli.app, ["bench", "stages", "--algorithm", "direct"])
    assert (result.exit_code, said(result)) == (
        1,
        "error: algorithm is 'direct'; expected one of winograd_f2, winograd_f4",
    )


def test_module_runs(monkeypatch):
    code = 'import runpy, sys; runpy.run_module("fastconv", run_name="__main__", alter_sys=True)'
    done = processes.run(code, "--help")
    assert done.returncode == 0
    for command in ("info", "demo", "explain", "trace", "bench"):
        assert command in done.stdout
    monkeypatch.setattr(sys, "argv", ["fastconv", "magic"])
    with pytest.raises(SystemExit, match=r"^2$"):
        runpy.run_module("fastconv", run_name="__main__")
