"""The error metrics and bounds themselves: wrong outputs of every kind must be caught, right ones must pass."""

from __future__ import annotations

import math

import pytest
import torch
from harness import Epilogue, check, hostile, make_case, peer, reference
from metrics import Rounding, bound
from shapes import Shape

from fastconv import testing

SHAPE = Shape(2, 16, 13, 13, 8, 3, 3, padding=(1, 1))


@pytest.fixture(scope="module")
def data():
    case = make_case(SHAPE, "fp32", "nchw")
    return case, peer(case, "fp32"), reference(case)


def verdict(data, output: torch.Tensor, cls: str = "fp32") -> str:
    return "\n".join(check(output, data[0], "direct", cls))


def test_the_correctly_rounded_result_passes(data):
    assert not verdict(data, data[2].float())
    assert not verdict(data, data[1])


def test_a_shrunk_output_is_caught(data):
    """A truncating accumulator: every value 1e-6 too small, far inside what a tolerance of 1e-5 forgives."""
    output = (data[2] * (1 - 1e-6)).float()
    assert "signed bias" in verdict(data, output)


def test_a_small_bias_inside_the_l2_bound_is_caught(data):
    """The L2 bound alone would let it pass."""
    output = (data[2] * (1 - 5e-7)).float()
    text = verdict(data, output)
    assert "signed bias" in text
    assert "L2" not in text


def test_one_wrong_element_is_caught(data):
    output = data[1].clone()
    worst = data[2].abs().mean().item()
    output[1, 3, 5, 7] += 2e-5 * worst  # invisible to the norm of 2704 elements
    text = verdict(data, output)
    assert "maximum" in text


def test_a_shifted_output_is_caught(data):
    assert "L2" in verdict(data, data[1].roll(1, dims=3))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_value_that_is_not_finite_is_caught(data, value):
    output = data[1].clone()
    output[0, 0, 0, 0] = value
    assert "L2" in verdict(data, output)


def test_noise_twice_the_bound_is_caught(data):
    noise = torch.randn(data[2].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert "L2" in verdict(data, data[2] + noise * 2e-6 * data[2].std())


def test_half_precision_bounds_scale_with_the_dtype():
    case = make_case(SHAPE, "fp16", "nchw")
    expected = reference(case)
    assert not check(expected.half(), case, "direct", "fp16")
    assert check((expected * (1 + 2e-3)).half(), case, "direct", "fp16")
    assert check(expected.bfloat16(), case, "direct", "fp16")


def test_measure_on_known_errors():
    expected = torch.tensor([3.0, -4.0], dtype=torch.float64)
    assert testing.errors(torch.tensor([3.0, -4.0]), expected) == testing.Errors(0.0, 0.0, 0.0)
    errors = testing.errors(torch.tensor([3.3, -4.4]), expected)
    assert errors.relative_l2 == pytest.approx(0.1, rel=1e-5)
    assert errors.maximum == pytest.approx(0.4 / 12.5**0.5, rel=1e-5)
    assert errors.bias == pytest.approx(0.1, rel=1e-5)
    assert testing.errors(torch.tensor([2.7, -3.6]), expected).bias == pytest.approx(-0.1, rel=1e-5)
    assert testing.errors(torch.tensor([1e-30, 0.0]), torch.zeros(2, dtype=torch.float64)).relative_l2 == math.inf


def test_measure_survives_extreme_scales():
    for scale in (1e-200, 1e-42, 1e35, 1e200):
        expected = torch.tensor([3.0, -4.0], dtype=torch.float64) * scale
        assert testing.errors(expected * 1.1, expected).relative_l2 == pytest.approx(0.1, rel=1e-9)


def test_a_lucky_peer_does_not_make_the_bound_zero():
    expected = torch.full((1, 1, 1, 1), 2.0, dtype=torch.float64)
    allowed = bound(
        expected,
        expected,
        peer=testing.Errors(0, 0, 0),
        multiple=4,
        rounding=Rounding(2, 1),
        dtype=torch.float32,
        terms=9,
    )
    assert not allowed.violations(testing.errors(torch.full((1, 1, 1, 1), 2.0 + 2.0**-22), expected))
    assert allowed.violations(testing.errors(torch.full((1, 1, 1, 1), 2.0 + 1e-5), expected))


def test_uneven_errors_widen_the_maximum_alone():
    """And no further than what is expected of PyTorch's error: the allowance above it is not multiplied."""
    generator = torch.Generator().manual_seed(0)
    expected = torch.randn(1, 8, 16, 16, generator=generator, dtype=torch.float64)

    def limits(uneven: float, declared: float):
        return bound(
            expected, expected.abs(), peer=testing.Errors(1e-6, 1e-6, 0), multiple=4, rounding=Rounding(2, 1),
            dtype=torch.float32, terms=9, expected=declared, uneven=uneven,
        )  # fmt: skip

    even, within, beyond = limits(1.0, 3.0), limits(1.3, 3.0), limits(2.0, 3.0)
    assert within == even
    assert (beyond.l2, beyond.bias) == (even.l2, even.bias)
    assert beyond.maximum == pytest.approx(even.maximum * 2.0 * 3.0 / 4.0)


def test_an_output_cleared_by_its_activation_must_be_exactly_zero():
    expected = torch.zeros(1, 2, 3, 3, dtype=torch.float64)
    allowed = bound(
        expected,
        expected + 1,
        peer=testing.Errors(0, 0, 0),
        multiple=4,
        rounding=Rounding(2, 1),
        dtype=torch.float32,
        terms=9,
    )
    assert not allowed.violations(testing.errors(torch.zeros(1, 2, 3, 3), expected))
    assert allowed.violations(testing.errors(torch.full((1, 2, 3, 3), 1e-30), expected))


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_hostile_memory(layout):
    """Same values and strides; anything read or kept beyond the view is NaN."""
    values = torch.randn(2, 3, 5, 7)
    view = hostile(values, layout, offset=1)
    assert torch.equal(view, values)
    assert view.storage_offset() % 64 == 1
    flat = view.as_strided((view.numel() + 2,), (1,), view.storage_offset() - 1)
    assert bool(flat[0].isnan())
    assert bool(flat[-1].isnan())
    assert torch.equal(hostile(torch.ones(5), layout), torch.ones(5))


def test_cases_depend_on_the_shape_alone():
    first, second = make_case(SHAPE, "fp32", "nchw"), make_case(SHAPE, "fp32", "nhwc", epilogue=Epilogue(bias=True))
    assert torch.equal(first.input, second.input)
    assert torch.equal(first.weight, second.weight)
