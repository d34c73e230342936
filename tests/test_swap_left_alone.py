"""Convolutions that swap_ leaves alone, and the reason that its report gives."""

import json
import warnings

import pytest
import torch
from swapping import Subclass, codes
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm

import fastconv

pytestmark = pytest.mark.usefixtures("full_precision")


def own_forward() -> nn.Module:
    layer = nn.Conv2d(3, 4, 3)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    return layer


def own_conv_forward() -> nn.Module:
    layer = nn.Conv2d(3, 4, 3)
    layer._conv_forward = lambda *_: 0  # type: ignore[method-assign]
    return layer


def pruned() -> nn.Module:
    return prune.l1_unstructured(nn.Conv2d(3, 4, 3), "weight", 0.5)


def quantized() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.nn.quantized.Conv2d(3, 4, 3)


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.Conv2d(3, 4, 3))


def tensor_subclass() -> nn.Module:
    class Wrapped(Tensor):
        pass

    layer = nn.Conv2d(3, 4, 3)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Wrapped))
    assert type(layer.weight) is not nn.Parameter
    return layer


LEFT_ALONE = {
    "subclass": lambda: Subclass(3, 4, 3),
    "parametrized": lambda: parametrizations.weight_norm(nn.Conv2d(3, 4, 3)),
    "weight_hook": lambda: spectral_norm(nn.Conv2d(3, 4, 3)),
    "weight_hook pruned": pruned,
    "lazy": lambda: nn.LazyConv2d(4, 3),
    "quantized": quantized,
    "script": scripted,
    "forward_override": own_forward,
    "forward_override of _conv_forward": own_conv_forward,
    "tensor_subclass": tensor_subclass,
    "dtype": lambda: nn.Conv2d(3, 4, 3, dtype=torch.float64),
    "dtype complex": lambda: nn.Conv2d(3, 4, 3, dtype=torch.complex64),
    "device": lambda: nn.Conv2d(3, 4, 3, device="meta"),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_left_alone_with_a_reason(case: str) -> None:
    layer = LEFT_ALONE[case]()
    code, cls, attributes = case.split()[0], type(layer), set(layer.__dict__)
    model = nn.Sequential(layer, nn.Conv2d(4, 4, 3))
    report = fastconv.swap_(model)
    assert codes(report) == [code, ""]
    assert len(report.rows[0].reason) > 10
    assert report.rows[0].algorithm is None
    assert (type(model[0]), set(model[0].__dict__)) == (cls, attributes)
    assert f"[{code}]" in str(report)
    assert json.loads(report.to_json())["rows"][0]["reason_code"] == code
    with pytest.raises(fastconv.UnsupportedError, match=rf"1 of 2 [\s\S]*\b0: [\s\S]*\[{code}\]"):
        fastconv.swap_(nn.Sequential(LEFT_ALONE[case](), nn.Conv2d(4, 4, 3)), strict=True)


def test_a_materialised_lazy_convolution_is_swapped() -> None:
    model = nn.Sequential(nn.LazyConv2d(4, 3))
    model(torch.randn(1, 3, 8, 8))
    assert fastconv.swap_(model).swapped == 1


def test_convolutions_inside_a_jitted_model_are_reported() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()))
    with pytest.warns(UserWarning, match="1 script"):
        report = fastconv.swap_(model)
    assert [(row.names, row.reason_code) for row in report.rows] == [(("0",), "script")]
