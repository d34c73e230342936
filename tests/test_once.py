"""On a CPU whose rates nobody has measured, `auto` measures each problem at its first call."""

import os

import processes
import pytest
import torch
import torch.nn.functional as F
from layers import relative_error
from torch import nn

import fastconv
from fastconv import _C, measured, once, ops, timing

pytestmark = pytest.mark.usefixtures("cache_folder", "full_precision")


@pytest.fixture
def timed(monkeypatch):
    """Which algorithms were timed, of each problem. The last of them is said to be the fastest."""
    found = []

    def measure(calls, **_):
        found.append(list(calls))
        shapes = {tuple(call().shape) for call in calls.values()}
        assert len(shapes) == 1
        return timing.Measurement({name: timing.Timing(9.0 - i, 0, 0, 3, False) for i, name in enumerate(calls)})

    monkeypatch.setattr(timing, "measure", measure)
    monkeypatch.setattr(timing, "once", lambda call, device: (call(), 1.0))  # nobody is hopeless
    monkeypatch.setattr(once, "_seen", set())
    monkeypatch.setattr(once, "wanted", None)
    monkeypatch.setattr(once, "is_unknown", lambda device: True)
    return found


def layer(**asked):
    return fastconv.Conv2d(8, 8, 3, padding=1, **asked)


def test_a_problem_is_measured_at_its_first_call(timed):
    conv, x = layer(), torch.randn(2, 8, 9, 10)
    expected = F.conv2d(x, conv.weight, conv.bias, padding=1)
    with torch.no_grad():
        for _ in range(3):
            assert relative_error(conv(x), expected) < 1e-5
            layer()(x)  # another weight, the same problem
    assert len(timed) == 1
    problem = _C.ConvProblem(n=2, c=8, h=9, w=10, k=8, r=3, s=3, padding=(1, 1), bias=True)
    rows = [row for row in _C.candidates(problem, ops.device_info(x.device)) if row["auto_eligible"]]
    cheapest = [row["algorithm"] for row in sorted(rows, key=lambda row: row["cost_us"])]
    assert set(timed[0]) == {*cheapest[:2], "torch"}
    assert conv.last_algorithm == timed[0][-1]
    (choice,) = measured.choices().values()
    assert (choice.device, choice.problem) == (measured.device_name(x.device), repr(problem))
    assert measured.path().exists()
    with torch.no_grad():
        conv(torch.randn(2, 8, 9, 11))
        conv(x.to(memory_format=torch.channels_last))
    assert len(timed) == 3


def test_every_form_of_a_call(timed):
    x, r = torch.randn(2, 8, 9, 10), torch.randn(2, 8, 9, 10)
    fused = fastconv.FusedConv2d(8, 8, 3, padding=1, activation="relu", residual_after=True)
    pooled = fastconv.FusedConv2d(8, 8, 3, padding=1, activation="silu", max_pool=True)
    with torch.no_grad():
        assert relative_error(fused(x, r), F.relu(nn.Conv2d.forward(fused, x)) + r) < 1e-5
        assert fused(x).shape == x.shape
        assert relative_error(pooled(x), F.max_pool2d(F.silu(nn.Conv2d.forward(pooled, x)), 2)) < 1e-5
        weight = torch.randn(8, 8, 3, 3)
        for _ in range(3):
            fastconv.conv2d(x[0], weight, padding=1)
    layer()(x.requires_grad_()).sum().backward()  # the problem of a layer with a bias, and none of a gradient
    assert len(timed) == 5
    assert len(measured.choices()) == 5


def test_what_is_not_measured(timed, monkeypatch):
    x = torch.randn(2, 8, 9, 10)
    with torch.no_grad():
        layer(algorithm="direct_tiled")(x)
        layer().double()(x.double())
        layer()(x[:0])
        with pytest.raises(RuntimeError, match="channels"):
            layer()(x[:, :3])
        once.wanted = None
        monkeypatch.setattr(once, "is_unknown", lambda device: False)
        conv = layer()
        conv(x)
        assert once.wanted is False
        assert conv.last_algorithm == _C.choose(
            "auto", _C.ConvProblem(2, 8, 9, 10, 8, 3, 3, padding=(1, 1)), ops.device_info(x.device)
        )["algorithm"]  # fmt: skip
    assert timed == []


def test_what_is_known_already_counts_and_a_file_is_no_must(timed, monkeypatch, tmp_path):
    x = torch.randn(2, 8, 9, 10)
    monkeypatch.setattr(fastconv.settings, "cache_dir", str(tmp_path / "file" / "below"))
    (tmp_path / "file").write_text("in the way")
    with torch.no_grad():
        layer()(x)
        assert len(measured.choices()) == 1
        once._seen.clear()
        layer()(x)
    assert len(timed) == 1


def test_a_process_with_the_variable_measures():
    """By the clock."""
    script = (
        "import torch, fastconv; from fastconv import measured, once; c = fastconv.Conv2d(8, 8, 3)\n"
        "with torch.no_grad(): c(torch.randn(2, 8, 9, 10))\n"
        "print(once.wanted, len(measured.choices()))"
    )
    environment = {**os.environ, "FASTCONV_MEASURE": "1", "FASTCONV_CACHE_DIR": ""}
    ran = processes.run(script, environment=environment)
    assert ran.stdout.strip() == "True 1", ran.stderr


def test_the_variable(timed, monkeypatch, read_settings):
    for value, wanted in (("1", True), ("0", False), ("", None)):
        assert read_settings(FASTCONV_MEASURE=value)["measure"] is wanted
    with pytest.raises(ValueError, match="FASTCONV_MEASURE is 'yes'; expected 0 or 1"):
        read_settings(FASTCONV_MEASURE="yes")
    x = torch.randn(2, 8, 9, 10)
    with torch.no_grad():
        monkeypatch.setattr(once, "wanted", False)
        layer()(x)
        assert timed == []  # not even where the CPU is unknown
        monkeypatch.setattr(once, "wanted", None)
        layer()(x)
        assert once.wanted is True
        assert len(timed) == 1


def test_a_cpu_is_unknown_without_vectors(monkeypatch):
    for name in ("generic", "avx2", "avx512"):
        cpu = _C.cpu_device(1, getattr(_C.InstructionSet, name))
        monkeypatch.setattr(once.ops, "device_info", lambda _, cpu=cpu: cpu)
        assert once.is_unknown(torch.device("cpu")) == (name == "generic")
