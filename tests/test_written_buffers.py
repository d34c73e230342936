"""Models that write over buffers in forward: no value of these is a constant, and `fuse` refuses them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layers import relative_error
from rewriting import Rewriting
from torch import Tensor, nn
from torch._inductor import config

import fastconv
from fastconv.compiler.ahead import rewritten
from fastconv.rewrites import Asked

pytestmark = pytest.mark.usefixtures("full_precision")

FROZEN = Asked(algorithm="implicit_gemm", packed=True)


class Model(nn.Module):
    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.gain = nn.Parameter(torch.rand(8, 1, 1))
        self.register_buffer("scale", torch.rand(8, 1, 1))
        self.register_buffer("state", torch.rand(2, 8, 6, 5))
        self.call = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


def multiplied(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x) * m.scale
    m.scale.mul_(2)
    return y


def counted(m: Any, x: Tensor) -> Tensor:
    m.scale += 1
    return m.conv(x) * m.scale


def copied(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x) + 0.5 * m.state
    m.state.copy_(y)
    return y


def assigned(m: Any, x: Tensor) -> Tensor:
    m.scale = m.scale * 2
    return m.conv(x) * m.scale


WRITERS = {f.__name__: f for f in (multiplied, counted, copied, assigned)}


@pytest.mark.parametrize("name", WRITERS)
def test_an_exported_graph_follows_its_buffers(name: str) -> None:
    model, x = Model(WRITERS[name]).eval(), torch.randn(2, 3, 6, 5)
    with torch.no_grad():
        module, _ = rewritten(copy.deepcopy(model), (x,), FROZEN)
        for _ in range(3):
            assert relative_error(module(x), model(x)) < 1e-6


@pytest.mark.parametrize("name", WRITERS)
def test_a_compiled_graph_follows_its_buffers(name: str) -> None:
    model, x = Model(WRITERS[name]).eval(), torch.randn(2, 3, 6, 5)
    torch._dynamo.reset()
    function = torch.compile(copy.deepcopy(model), backend=Rewriting(FROZEN))
    with torch.no_grad(), config.patch(freezing=True):
        for _ in range(3):
            assert relative_error(function(x), model(x)) < 1e-6


def sliced(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x) + m.state
    m.state[:, :4] = y[:, :4]
    return y


def in_a_view(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x) + m.state
    m.state[:, :4].copy_(y[:, :4])
    return y


def given_as_out(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    torch.mul(y, 2, out=m.state)
    return y


def a_parameter(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x) * m.gain
    with torch.no_grad():
        m.gain[0].mul_(2)
    return y


def of_the_call(m: Any, x: Tensor) -> Tensor:
    y = torch.zeros(2, 8, 6, 5)
    y += m.conv(x)
    return y


REFUSED = {
    multiplied: "scale", counted: "scale", assigned: "scale", copied: "state", sliced: "state", in_a_view: "state",
    given_as_out: "state", a_parameter: "gain", of_the_call: "a tensor that it makes from no argument",
}  # fmt: skip


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("writer", REFUSED, ids=lambda writer: writer.__name__)
def test_fuse_names_what_is_written(writer: Callable[[Any, Tensor], Tensor], inference: bool) -> None:
    with torch.inference_mode(inference), pytest.raises(fastconv.UnsupportedError, match=f"over {REFUSED[writer]},"):
        fastconv.fuse(Model(writer).eval())


def test_what_writes_over_values_of_the_call_is_fused() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.conv(x) * (m.gain.exp() + 1).mul_(m.scale)
        return y.mul_(2)

    model, x = Model(forward).eval(), torch.randn(2, 3, 6, 5)
    with torch.no_grad():
        assert relative_error(fastconv.fuse(model)(x), model(x)) < 1e-6
