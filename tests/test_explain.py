"""explain: every algorithm's answer for one convolution, as readable text and as data."""

import numpy as np
import pytest
from test_functional import NAMES

import fastconv
from fastconv import settings


def test_explain_is_readable():
    explanation = fastconv.explain((1, 64, 56, 56), (64, 64, 3, 3), padding="same", device="cuda", precision="fp32")
    text = str(explanation)
    assert "H200" in text
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
        ({"dilation": (1, 0)}, ValueError, r"dilation is \(1, 0\)"),
        ({"w_shape": (4, 4, 30, 3)}, ValueError, r"the padded input is \(9, 9\), smaller than .* \(30, 3\)"),
    ],
)
def test_explain_names_what_is_wrong(change, error, message):
    with pytest.raises(error, match=message):
        fastconv.explain(**{"x_shape": (1, 4, 9, 9), "w_shape": (4, 4, 3, 3), "device": "cpu"} | change)
