"""Arguments that are none: the error names the argument, the value and what was expected, wherever they are given."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fastconv

X, W = torch.randn(1, 4, 9, 9), torch.randn(4, 4, 3, 3)
HUGE = 1 << 63


def conv2d(**arguments: Any) -> Tensor:
    return fastconv.conv2d(X, W, **arguments)


def layer(**arguments: Any) -> Tensor:
    return fastconv.Conv2d(4, 4, 3, **arguments)(X)


def fused_layer(**arguments: Any) -> nn.Module:
    return fastconv.FusedConv2d(4, 4, 3, **arguments)


def explain(**arguments: Any) -> Any:
    return fastconv.explain(X.shape, W.shape, **{"device": "cpu"} | arguments)


def compiled(**arguments: Any) -> Any:
    return fastconv.compile(**arguments)


def exported(**arguments: Any) -> Any:
    return fastconv.export(nn.Conv2d(4, 4, 3).eval(), **{"example_inputs": (X,), "path": "never.pt2"} | arguments)


SIZES = "expected an integer"
WRONG: list[tuple[Callable[..., Any], str, Any, type[Exception], str]] = [
    (layer, "stride", 1.5, TypeError, SIZES),
    (layer, "stride", (1, 2, 3), RuntimeError, "expected an integer or a pair of integers"),
    (layer, "padding", None, TypeError, SIZES),
    (layer, "dilation", (1, "a"), TypeError, SIZES),
    (layer, "stride", HUGE, RuntimeError, "expected an integer of 64 bits"),
    (conv2d, "padding", HUGE, RuntimeError, "expected an integer of 64 bits"),
    (conv2d, "groups", -HUGE, RuntimeError, "expected an integer of 64 bits"),
    (conv2d, "algorithm", None, TypeError, "expected a string"),
    (conv2d, "max_error", float, TypeError, "expected None or a number of at least 1"),
    (conv2d, "max_error", np.ones(2), TypeError, "expected None or a number of at least 1"),
    (conv2d, "max_error", torch.ones(2), TypeError, "expected None or a number of at least 1"),
    (conv2d, "max_workspace", np.ones(2, int), TypeError, "expected None or an integer of at least 0, in bytes"),
    (conv2d, "negative_slope", torch.ones(2), TypeError, "expected a number"),
    (fused_layer, "negative_slope", "0.1", TypeError, "expected a number"),
    (fused_layer, "negative_slope", None, TypeError, "expected a number"),
    (fused_layer, "residual_after", 1, TypeError, "expected a bool"),
    (fused_layer, "max_pool", "yes", TypeError, "expected a bool"),
    (explain, "groups", None, TypeError, SIZES),
    (explain, "stride", HUGE, RuntimeError, "expected an integer of 64 bits"),
    (explain, "bias", math.nan, TypeError, "expected a bool"),
    (explain, "residual", X, TypeError, "expected a bool"),
    (explain, "device", "gpu", ValueError, "expected cpu or cuda"),
    (explain, "device", -1, ValueError, "expected cpu or cuda"),
    (compiled, "model", "resnet50", TypeError, "expected a torch.nn.Module or a function"),
    (compiled, "model", None, TypeError, "expected a torch.nn.Module or a function"),
    (exported, "example_inputs", X, TypeError, "a Tensor; expected a tuple of arguments"),
    (exported, "path", None, ValueError, "expected one that ends in .pt2"),
    (exported, "path", "model.pt", ValueError, "expected one that ends in .pt2"),
]


@pytest.mark.parametrize(
    ("function", "name", "value", "error", "expected"),
    WRONG,
    ids=[f"{w[0].__name__}-{w[1]}-{i}" for i, w in enumerate(WRONG)],
)
def test_what_is_wrong_is_named(
    function: Callable[..., Any], name: str, value: Any, error: type[Exception], expected: str
) -> None:
    for _ in range(3):  # calls with a weight that is known go another way
        with pytest.raises(error, match=rf"^{name} is [\s\S]*{expected}"):
            function(**{name: value})


# One size in a sequence is for both dimensions, as in torch.nn.Conv2d.
SINGLE: list[dict[str, Any]] = [
    {"padding": (1,)},
    {"stride": (2,), "padding": [2]},
    {"dilation": (2,), "padding": "same"},
    {"stride": (2,), "dilation": (1,), "padding": (0,), "bias": False},
]


@pytest.mark.parametrize("arguments", SINGLE, ids=str)
@pytest.mark.parametrize("kind", ["Conv2d", "ConvTranspose2d"])
def test_one_size_is_for_both_dimensions(kind: str, arguments: dict[str, Any]) -> None:
    if kind == "ConvTranspose2d" and arguments["padding"] == "same":
        pytest.skip("a transposed convolution has no padding 'same'")
    plain = getattr(nn, kind)(4, 4, 3, **arguments)
    ours = getattr(fastconv, kind)(4, 4, 3, **arguments)
    ours.load_state_dict(plain.state_dict())
    expected = plain(X)
    models = [ours]
    for frozen in (False, True):
        model = nn.Sequential(getattr(nn, kind)(4, 4, 3, **arguments)).eval()
        model[0].load_state_dict(plain.state_dict())
        assert fastconv.swap_(model, strict=True, frozen=frozen).swapped == 1
        models.append(model)
    models.append(fastconv.fuse(nn.Sequential(plain, nn.ReLU()).eval()))
    for model in models:
        wanted = expected.relu() if isinstance(model, fastconv.FusedModule) else expected
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                torch.testing.assert_close(model(X), wanted)


@pytest.mark.parametrize(
    "arguments", [{"stride": 1.5}, {"stride": (1, 2, 3)}, {"padding": None}, {"stride": 0}], ids=str
)
@pytest.mark.parametrize("kind", ["Conv2d", "ConvTranspose2d", "Conv1d"])
def test_a_layer_that_is_no_convolution_is_left_alone(kind: str, arguments: dict[str, Any]) -> None:
    (name, value), wrong = *arguments.items(), getattr(nn, kind)(4, 4, 3, **arguments)
    model = nn.Sequential(nn.Conv2d(4, 4, 3), wrong)
    report = fastconv.swap_(model)
    assert report.swapped == 1
    assert report.rows[1].reason_code == ("output_padding" if kind == "ConvTranspose2d" and value == 0 else "invalid")
    assert name in report.rows[1].reason
    assert type(model[1]) is getattr(nn, kind)


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("FASTCONV_ALGORITHM", "best", "expected one of auto, direct"),
        ("FASTCONV_MAX_COMPUTE_CAPABILITY", "8.0", "expected an integer, as 80"),
        ("FASTCONV_DISABLE", "false", "expected 0 or 1"),
        ("FASTCONV_MEASURE", "yes", "expected 0 or 1"),
        ("FASTCONV_LOG", "info", "expected debug"),
    ],
)
def test_a_variable_is_checked_when_it_is_read(
    variable: str, value: str, expected: str, read_settings: Callable[..., dict[str, Any]]
) -> None:
    with pytest.raises(ValueError, match=f"^{variable} is '{value}'; {expected}"):
        read_settings(**{variable: value})
    known = {"FASTCONV_ALGORITHM": "winograd_f4", "FASTCONV_MAX_COMPUTE_CAPABILITY": "80", "FASTCONV_LOG": "debug"}
    for good in ("", known.get(variable, "1")):
        read_settings(**{variable: good})


def test_no_tensor_is_said_to_be_none_also_behind_a_call_that_was_right() -> None:
    layers = fastconv.Conv2d(4, 4, 3, padding=1), fastconv.ConvTranspose2d(4, 4, 3), fastconv.Conv1d(4, 4, 3)
    calls = [lambda x: fastconv.conv2d(x, W), *layers]
    for _ in range(3):
        for call, x in zip(calls, (X, X, X, X[..., 0]), strict=True):
            call(x)
        for call in calls:
            for grad in (True, False):
                with torch.set_grad_enabled(grad), pytest.raises(TypeError, match="input"):
                    call(None)


@pytest.mark.parametrize("of_models", [fastconv.fuse, fastconv.compile])
def test_what_makes_a_model_takes_the_class_second(of_models: Callable[..., Any]) -> None:
    assert list(inspect.signature(of_models).parameters)[:2] == ["model", "precision"]


def test_more_bytes_than_there_are_is_any_number_of_them(read_settings: Callable[..., dict[str, Any]]) -> None:
    most = read_settings(FASTCONV_MAX_WORKSPACE=str(10**30))["max_workspace"]
    for asked in (most, 10**30):
        assert fastconv.conv2d(X, W, max_workspace=asked).shape == (1, 4, 7, 7)
        assert explain(max_workspace=asked).choice == explain().choice
