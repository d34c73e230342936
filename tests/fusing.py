"""What the tests of fuse share."""

import copy
import warnings
from typing import Any

import torch
from layers import relative_error
from torch import Tensor, nn

import fastconv
from fastconv import FusedConv2d, FusedModule


def norm(features: int, **arguments: Any) -> nn.BatchNorm2d:
    """A batch norm whose every number counts."""
    layer = nn.BatchNorm2d(features, **arguments)
    with torch.no_grad():
        for tensor in (layer.running_mean, layer.weight, layer.bias):
            if tensor is not None:
                tensor.normal_()
        if layer.running_var is not None:
            layer.running_var.uniform_(0.1, 3)
    return layer


class Function(nn.Module):
    """A convolution of 6 channels, a norm, and what a test does with them."""

    def __init__(self, function: Any, activation: nn.Module | None = None, **conv: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 6, 3, padding=1, **conv)
        self.norm = norm(6)
        self.activation = activation
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def sequence(*modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(*modules)


def fuse_quietly(model: nn.Module, **arguments: Any) -> FusedModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fastconv.fuse(model.eval(), **arguments)


def check(model: nn.Module, x: Tensor, limit: float = 1e-5, **arguments: Any) -> FusedModule:
    """Fuses the model and holds the result against the model in float64."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    fused = fuse_quietly(model, **arguments)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.clone().double())
        y = fused(x.clone())
    assert y.shape == exact.shape
    assert relative_error(y.double(), exact) < limit
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    return fused


def parts(fused: FusedModule) -> list[str]:
    return [row.fused for row in fused.report.rows for _ in row.names]


def codes(fused: FusedModule) -> list[str]:
    return [row.reason_code for row in fused.report.rows for _ in row.names]


def layers(fused: FusedModule) -> int:
    return len([module for module in fused.modules() if isinstance(module, FusedConv2d)])


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *_: None)
    return module
