"""explain: every algorithm's answer for one convolution, as readable text and as data."""

import itertools

import numpy as np
import pytest
import torch
from test_functional import NAMES

import fastconv
from fastconv import _C, settings


def test_explain_is_readable():
    explanation = fastconv.explain((1, 64, 56, 56), (64, 64, 3, 3), padding="same", device="cuda", precision="fp32")
    text = str(explanation)
    assert (torch.cuda.get_device_name() if torch.cuda.is_available() else "H200") in text
    assert "chosen" in text
    assert [row.algorithm for row in explanation.rows] == NAMES
    for name in NAMES:
        assert name in text
    with pytest.raises(ValueError, match="x_shape"):
        fastconv.explain((1, 3, 8, 8), (4, 4, 3, 3))


def test_explain_is_about_what_conv2d_would_run(monkeypatch):
    """The row more of an even kernel with padding "same", and FASTCONV_ALGORITHM."""
    explanation = fastconv.explain((1, 4, 9, 9), (4, 4, 4, 3), padding="same", device="cpu")
    assert "H10 W9 " in explanation.problem
    assert "padding 1x1" in explanation.problem
    monkeypatch.setattr(settings, "auto_algorithm", "direct")
    assert fastconv.explain((1, 4, 9, 9), (4, 4, 3, 3), device="cpu").choice == "direct"
    monkeypatch.setattr(settings, "auto_algorithm", "winograd_f4")
    with pytest.raises(fastconv.UnsupportedError, match="winograd_f4"):
        fastconv.explain((1, 4, 9, 9), (4, 4, 5, 5), device="cpu")


def test_explain_takes_integers_of_any_kind():
    sizes, filters = np.array([1, 4, 9, 9]), np.array([4, 4, 3, 3])
    expected = fastconv.explain((1, 4, 9, 9), (4, 4, 3, 3), device="cpu", padding="same").problem
    assert fastconv.explain(tuple(sizes), filters, device="cpu", padding="same").problem == expected


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dtype": "float32"}, TypeError, "dtype is 'float32'; expected a torch.dtype"),
        ({"x_shape": 8}, TypeError, "x_shape is 8; expected 4 integers"),
        ({"w_shape": (4, 4, 3.0, 3)}, TypeError, r"w_shape is \(4, 4, 3.0, 3\)"),
        ({"x_shape": (1, 4, -9, 9)}, ValueError, "h is -9; expected a size of at least 0"),
        ({"stride": 0}, ValueError, r"stride is \(0, 0\); expected two positive"),
        ({"padding": (0, -1)}, ValueError, r"padding is \(0, -1\)"),
        ({"dilation": 2**62}, ValueError, r"\(9, 9\), smaller than the kernel's extent \(4611686018427387904"),
        ({"padding": 2**62}, ValueError, r"padding is \(4611686018427387904, .*; expected below 2\^61"),
        ({"x_shape": (1, 4, 2**62, 9)}, ValueError, r"the input is \(4611686018427387904, 9\); expected below 2\^62"),
        (
            {"x_shape": (10**20, 4, 9, 9)},
            RuntimeError,
            "x_shape is 100000000000000000000; expected an integer of 64 bits",
        ),
        ({"dilation": (1, 0)}, ValueError, r"dilation is \(1, 0\)"),
        ({"w_shape": (4, 4, 30, 3)}, ValueError, r"the padded input is \(9, 9\), smaller than .* \(30, 3\)"),
    ],
)
def test_explain_names_what_is_wrong(change, error, message):
    with pytest.raises(error, match=message):
        fastconv.explain(**{"x_shape": (1, 4, 9, 9), "w_shape": (4, 4, 3, 3), "device": "cpu"} | change)


def test_passes():
    rows = {}
    for pass_ in ("forward", "backward_input", "backward_weight"):
        found = fastconv.explain((64, 64, 56, 56), (64, 64, 3, 3), padding=1, device="cuda", precision="fp32",
                                 layout="nhwc", pass_=pass_)  # fmt: skip
        assert found.pass_ == pass_
        assert str(found).startswith(pass_)
        assert found.choice in {row.algorithm for row in found.rows}
        assert {row.algorithm: row for row in found.rows}[found.choice].fits
        rows[pass_] = [row.algorithm for row in found.rows]
    assert rows["forward"] == rows["backward_input"]  # which is made of forward convolutions
    assert rows["backward_weight"] == ["direct_tiled", "winograd_f4", "im2col_gemm", "implicit_gemm", "torch"]
    with pytest.raises(ValueError, match=r"pass_ is 'backward'; expected one of forward, backward_input"):
        fastconv.explain((1, 8, 9, 9), (8, 8, 3, 3), device="cpu", pass_="backward")


@pytest.mark.parametrize(
    ("c", "dtype", "device", "stride", "layout", "expected"),
    [
        (64, torch.float32, "cuda", 1, "nchw", ""),
        (64, torch.float32, "cuda", 2, "nhwc", ""),
        (64, torch.float16, "cuda", 1, "nhwc", ""),
        (64, torch.float16, "cuda", 1, "nchw", "layout: of half types"),
        (6, torch.float32, "cuda", 1, "nchw", "layout: of half types and of fewer than 8 channels"),
        (6, torch.float32, "cuda", 1, "nhwc", ""),
        (3, torch.float32, "cuda", 2, "nhwc", ""),
        (64, torch.float32, "cpu", 2, "nchw", "stride: the stride is not 1"),
        (6, torch.float32, "cpu", 1, "nchw", "filters: C/groups is 6"),
        (64, torch.float64, "cpu", 1, "nchw", "dtype"),
    ],
)
def test_why_pytorch_computes_an_input_gradient(c, dtype, device, stride, layout, expected):
    found = fastconv.explain((64, c, 56, 56), (64, c, 3, 3), stride, 1, dtype=dtype, device=device, precision="fp32",
                             layout=layout, pass_="backward_input")  # fmt: skip
    assert (f"PyTorch's gradient, {expected}" in found.note) == bool(expected), found.note
    if expected:
        assert found.choice == "torch"


@pytest.mark.parametrize("stride", [1, 2, 3, (2, 3)])
@pytest.mark.parametrize("kernel", [1, 2, 3, 5, (3, 7)])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize(("c", "groups"), [(8, 1), (96, 1), (16, 2)])
def test_the_convolution_of_an_input_gradient_is_the_planned_one(stride, kernel, dilation, c, groups):
    """By definition: row y of the gradient sees the filter's row r where y + padding - r * dilation is a multiple of
    the stride. Rows of one residue see the same taps, and are one convolution; or all residues are together."""
    (r, s), strides = (2 * (x,) if isinstance(x, int) else x for x in (kernel, stride))
    for padding in ((0, 0), (1, 2)):
        problem = _C.ConvProblem(
            2, c, 19, 17, 24, r, s, stride=strides, padding=padding, dilation=(dilation, dilation), groups=groups
        )
        planned = _C.choose_input_gradient("direct", problem, _C.cpu_device(1))
        made, phases = planned["convolution"], strides[0] * strides[1]
        together = planned["method"] == "together"
        assert (made.c, made.k) == (24, phases * c if together else c)
        count = 1
        for size, step, pad, taps, used in zip((r, s), strides, padding, (made.r, made.s), made.dilation, strict=True):
            seen = [
                [(y + pad - tap * dilation) // step for tap in range(size) if (y + pad - tap * dilation) % step == 0]
                for y in range(step)
            ]
            offsets = {offset for row in seen for offset in row} if together else max(seen, key=len)
            count *= 1 if together else sum(bool(row) for row in seen)
            gaps = {a - b for a, b in itertools.pairwise(sorted(offsets, reverse=True))}
            assert taps == (max(offsets) - min(offsets) + 1 if together else len(offsets))
            assert together or gaps <= {used}
        assert planned["convolutions"] == count
