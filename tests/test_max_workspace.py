"""max_workspace: how much memory an algorithm may take, wherever a convolution is asked for."""

import pytest
import torch
import torch.nn.functional as F
from layers import DEVICES, relative_error
from torch import nn

import fastconv
from fastconv import _C, settings

SIZES = {"n": 2, "c": 64, "h": 28, "w": 28, "k": 64, "r": 3, "s": 3, "padding": (1, 1)}
H200 = _C.h200_device()
PLANNED = [H200, _C.cpu_device(2)]


def rows(device, **changes):
    return {row["algorithm"]: row for row in _C.candidates(_C.ConvProblem(**SIZES | changes), device)}


@pytest.mark.parametrize("device", PLANNED, ids=["h200", "cpu"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_what_needs_more_is_refused_with_both_numbers(device, layout):
    free = rows(device, layout=layout)
    sizes = sorted({row["workspace_bytes"] for row in free.values() if row["ok"]})
    assert len(sizes) > 1
    for limit in (0, sizes[-1] - 1, sizes[-1]):
        for name, row in rows(device, layout=layout, max_workspace=limit).items():
            before = free[name]
            if before["ok"] and before["workspace_bytes"] > limit and name != "torch":
                assert not row["ok"]
                assert not row["auto_eligible"]
                assert row["code"] == "workspace"
                assert str(limit) in row["reason"]
                assert str(before["workspace_bytes"]) in row["reason"]
            else:
                assert row == before
        choice = _C.choose("auto", _C.ConvProblem(**SIZES, layout=layout, max_workspace=limit), device)
        assert choice["algorithm"] == "torch" or choice["workspace_bytes"] <= limit


def test_the_copy_in_another_layout_counts():
    both = [rows(H200, layout=layout)["winograd_f4"]["workspace_bytes"] for layout in ("nhwc", "nchw")]
    assert both[1] > both[0] or not rows(H200)["winograd_f4"]["reads_nhwc"]
    assert rows(H200, layout="nhwc", max_workspace=both[0])["winograd_f4"]["ok"]
    assert rows(H200, layout="nchw", max_workspace=both[1])["winograd_f4"]["ok"]


def test_weight_gradients():
    problem = _C.ConvProblem(**SIZES, layout="nhwc")
    largest = max((row for row in _C.weight_gradients(problem, H200)[:-1] if row["ok"]),
                  key=lambda row: row["workspace_bytes"])  # fmt: skip
    assert largest["workspace_bytes"] > 0
    limited = _C.ConvProblem(**SIZES, layout="nhwc", max_workspace=largest["workspace_bytes"] - 1)
    row = next(row for row in _C.weight_gradients(limited, H200) if row["algorithm"] == largest["algorithm"])
    assert (row["ok"], row["code"]) == (False, "workspace")
    assert _C.weight_gradients(limited, H200)[-1]["ok"]
    assert _C.choose_weight_gradient(largest["algorithm"], limited, H200)["algorithm"] != largest["algorithm"]


def test_problems_with_other_limits_are_others():
    problems = [_C.ConvProblem(**SIZES, max_workspace=limit) for limit in (None, 0, 1)]
    assert len({repr(problem) for problem in problems}) == 3
    with pytest.raises(ValueError, match="max_workspace is -1; expected bytes of at least 0"):
        _C.ConvProblem(**SIZES, max_workspace=-1)


@pytest.mark.parametrize("device", DEVICES)
def test_calls_and_gradients(device):
    x, w = torch.randn(2, 8, 13, 13, device=device), torch.randn(8, 8, 3, 3, device=device)
    x.requires_grad_()
    expected = F.conv2d(x.double(), w.double(), padding=1)
    for limit in (None, 0, 10**12):
        y = fastconv.conv2d(x, w, padding=1, precision="fp32", max_workspace=limit)
        assert relative_error(y.double(), expected) < 1e-5
        y.square().sum().backward()
        if limit == 0:
            assert fastconv.last_call()["workspace_bytes"] == 0
    with pytest.raises(fastconv.UnsupportedError, match=r"workspace of .* bytes; the limit is 0"):
        fastconv.conv2d(x, w, padding=1, algorithm="im2col_gemm", max_workspace=0)
    fastconv.conv2d(x, w, padding=1, algorithm="torch", max_workspace=0)
    with pytest.raises(fastconv.UnsupportedError, match="the limit is 0"):
        fastconv.conv_transpose2d(x, w, padding=1, algorithm="im2col_gemm", max_workspace=0)


def test_layers_swap_fuse_and_explain():
    layer = fastconv.Conv2d(8, 8, 3, algorithm="im2col_gemm", max_workspace=0)
    assert layer.max_workspace == 0
    assert "max_workspace=0" in repr(layer)
    for grad in (torch.no_grad(), torch.enable_grad()):
        with grad, pytest.raises(fastconv.UnsupportedError, match="the limit is 0"):
            layer(torch.randn(1, 8, 9, 9))
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ConvTranspose2d(8, 8, 2, 2), nn.Conv1d(8, 8, 3)).eval()
    report = fastconv.swap_(model, algorithm="im2col_gemm", max_workspace=10**12)
    assert report.swapped == 3
    assert {layer.max_workspace for layer in model} == {10**12}
    report.undo()
    # A transposed 2x2 with stride 2 is four 1x1 convolutions, which unroll nothing.
    report = fastconv.swap_(model, algorithm="im2col_gemm", max_workspace=0)
    assert [row.reason_code for row in report.rows if not row.swapped] == ["workspace"] * 2
    assert [row.kind for row in report.rows if row.swapped] == ["ConvTranspose2d"]
    report.undo()
    fused = fastconv.fuse(model[:2].eval(), max_workspace=12345)
    assert fused.get_submodule("0").max_workspace == 12345
    explanation = fastconv.explain((2, 8, 9, 9), (8, 8, 3, 3), device="cpu", max_workspace=0)
    assert "workspace" in {row.code for row in explanation.rows}
    assert "the limit is 0" in " ".join(str(explanation).split())


@pytest.mark.parametrize(
    ("value", "error"), [(-1, ValueError), ("1", TypeError), (1.5, TypeError), (True, TypeError)], ids=str
)
def test_bad_values(value, error):
    x, w = torch.zeros(1, 4, 9, 9), torch.zeros(4, 4, 3, 3)
    for call in (
        lambda: fastconv.conv2d(x, w, max_workspace=value),
        lambda: fastconv.conv1d(x[0], w[0], max_workspace=value),
        lambda: fastconv.conv_transpose2d(x, w, max_workspace=value),
        lambda: fastconv.ConvTranspose2d(4, 4, 3, max_workspace=value),
        lambda: fastconv.swap_(nn.Conv2d(4, 4, 3), max_workspace=value),
        lambda: fastconv.explain(x.shape, w.shape, device="cpu", max_workspace=value),
        lambda: fastconv.tune(nn.Conv2d(4, 4, 3), x, max_workspace=value),
        lambda: fastconv.compile(nn.Conv2d(4, 4, 3), max_workspace=value),
        lambda: fastconv.export(nn.Conv2d(4, 4, 3), (x,), "model.pt2", max_workspace=value),
    ):
        with pytest.raises(error, match=r"max_workspace is .*; expected None or an integer of at least 0, in bytes"):
            call()


def test_environment(monkeypatch, read_settings):
    monkeypatch.setattr(settings, "max_workspace", 0)
    assert settings.resolve_limits(None, None, "auto") == (None, 0)
    assert settings.resolve_limits(None, 7, "auto") == (None, 7)
    assert settings.resolve_limits(None, None, "direct") == (None, None)
    for value, expected in (("4096", 4096), ("", None)):
        assert read_settings(FASTCONV_MAX_WORKSPACE=value)["max_workspace"] == expected
    with pytest.raises(ValueError, match="FASTCONV_MAX_WORKSPACE is '-1'; expected"):
        read_settings(FASTCONV_MAX_WORKSPACE="-1")
