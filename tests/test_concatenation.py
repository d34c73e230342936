"""Concatenations along channels that become ranges of one tensor, and norms before convolutions that become their
affine input: what is rewritten, and values against float64."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from concatenating import CASES, NORMS, Model, calibrated, cat, dense, model, picture, resized
from layers import relative_error
from rewriting import OURS, check, compiled
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.utils.flop_counter import FlopCounterMode

import fastconv
from benchmarks.corpus import definitions
from fastconv import ops
from fastconv.rewrites import choosing, concatenation
from fastconv.rewrites.convolution import plan_of

aten = torch.ops.aten
FROZEN = replace(OURS, packed=True, scatters=True)


@pytest.fixture(autouse=True)
def kernels(full_precision, monkeypatch):
    """What the rewrites do does not hang on the kernels of this machine: here all of ours take ranges and norms.
    (Around those that do not, operators do as much in passes.)"""

    def direct(call: Any, **around: Any) -> Any:
        return plan_of(call, **around) | {"norms_apart": False, "copies_x": False, "copies_y": False}

    for module in (choosing, concatenation):
        monkeypatch.setattr(module, "plan_of", direct)


@pytest.mark.parametrize("name", CASES)
def test_ranges(name):
    forward, codes, direct, copied = CASES[name]
    backend = check(model(forward), picture(), FROZEN)
    assert sorted(backend.concatenations) == sorted(codes)
    assert backend.count(aten.cat.default) == len([code for code in codes if code]) + (name[:5] == "along")
    assert (backend.count(ops.conv2d_packed_scatter_op), backend.count(ops.channel_scatter_op)) == (direct, copied)
    assert [parts.endswith("+cat") for parts in backend.parts].count(True) == direct


@pytest.mark.parametrize("name", ["dense block", "nested", "growing backwards"])
def test_lists_that_grow_share_one_tensor(name):
    backend = check(model(CASES[name][0]), picture(1, 6, 9), FROZEN)
    assert backend.count(aten.empty.memory_format) == 1


def test_what_kernels_do_not_take(monkeypatch):
    """A value whose reader wants a tensor of its own stays one, and is copied; of a list that is read so, nothing is
    shared."""

    def copies(call: Any, **around: Any) -> Any:
        reads = call.input.meta["val"].shape[1] == 8
        return plan_of(call, **around) | {"copies_x": reads, "copies_y": False}

    monkeypatch.setattr(concatenation, "plan_of", copies)
    backend = check(model(lambda m, x: cat(y := m.a(x), m.b(y), m.c(x))), picture(), FROZEN)
    assert (backend.count(ops.conv2d_packed_scatter_op), backend.count(ops.channel_scatter_op)) == (2, 1)
    backend = check(model(lambda m, x: m.wider(cat(y := cat(m.a(x), m.b(x)), m.c(x))) + m.wide(y)), picture(), FROZEN)
    assert backend.concatenations == ["", ""]
    monkeypatch.setattr(
        concatenation, "plan_of", lambda call, **around: plan_of(call, **around) | {"copies_x": True, "copies_y": False}
    )
    backend = check(model(lambda m, x: m.wider(cat(y := cat(m.a(x), m.b(x)), m.c(x))) + m.wide(y)), picture(), FROZEN)
    assert sorted(backend.concatenations) == ["", "readers"]


def test_layout_and_alignment():
    backend = check(Model(lambda m, x: cat(m.a(x), m.b(x))), picture().contiguous(), FROZEN)
    assert backend.concatenations == ["layout"]
    backend = check(Model(lambda m, x: cat(m.a(x), m.b(x))), torch.randn(1, 8, 1, 1), FROZEN)  # dense in either format
    assert backend.concatenations == ["producers"]
    backend = check(model(lambda m, x: cat(m.a(x), m.b(x)), 6), picture(), FROZEN)
    assert backend.concatenations == ["alignment"]


def test_only_frozen_weights_and_static_shapes():
    backend = check(model(dense), picture(), OURS)
    assert (backend.concatenations, backend.count(aten.cat.default)) == ([], 3)
    backend = check(model(dense), picture(3), FROZEN, dynamic=True)
    assert set(backend.concatenations) == {"sizes"}


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("name", NORMS)
def test_norms_before(name, channels_last):
    forward, parts, left = NORMS[name]
    make, x = (model, picture()) if channels_last else (Model, picture().contiguous())
    backend = check(make(forward), x, FROZEN)
    if not channels_last:
        parts = [each.removesuffix("+cat") for each in parts]
    assert sorted(backend.parts) == sorted(parts)
    assert backend.count(ops.conv2d_packed_scatter_op) == sum(each.startswith("bn") for each in parts)
    assert sum(what == "batch norm" for what, _ in backend.left) == left


def test_padding_stays_zero():
    """Where the norm moves zero far away."""
    m = model(lambda m, x: m.a(F.relu(m.norm(x))))
    with torch.no_grad():
        m.norm.bias.fill_(10.0)
    check(m, picture(), FROZEN)


def test_nan_and_infinity_pass_through_a_norm():
    m = model(lambda m, x: m.a(F.relu(m.norm(x))), kernel_size=1, padding=0).eval()
    x = picture()
    x[0, 0, 0, 0], x[1, 3, 2, 1] = torch.nan, -torch.inf
    function, backend = compiled(m, FROZEN)
    with torch.no_grad():
        y, wanted = function(x), m(x)
    assert backend.parts == ["bn+relu+conv"]
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4, equal_nan=True)
    assert y.isnan().any()
    assert not y.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types(dtype):
    """The normed value is rounded as that of a norm which stands for itself."""
    m = model(NORMS["in a dense block"][0]).eval()
    x = picture().to(dtype)
    exact = m.double()(x.double())
    m = m.to(dtype)
    function, backend = compiled(m, replace(FROZEN, max_error=None))
    with torch.no_grad():
        found, alone = relative_error(function(x).double(), exact), relative_error(m(x).double(), exact)
    assert backend.concatenations == [""]
    assert found < 2 * alone


def tensors() -> tuple[Tensor, ...]:
    weight = torch.randn(8, 8, 3, 3)
    return torch.randn(2, 24, 5, 4), picture(2, 5, 4), ops.pack_weight(weight, 1, "implicit_gemm", "fp32"), weight


def test_operators_change_nothing():
    """They return what they wrote."""
    buffer, x, packed, weight = tensors()
    before, geometry = buffer.clone(), [8, 8, 3, 3, 1, 1, 1, 1, 1, 1, 1]
    written = torch.ops.fastconv.channel_scatter(x, buffer, 8)
    torch.testing.assert_close(written, torch.cat([buffer[:, :8], x, buffer[:, 16:]], 1), rtol=0, atol=0)
    scale, shift = torch.randn(8), torch.randn(8)
    rest = (geometry, True, "implicit_gemm", "fp32", "none", 0.0, "relu", False)
    written = torch.ops.fastconv.conv2d_packed_scatter(x, packed, None, None, scale, shift, buffer, 16, *rest)
    y = F.conv2d((x * scale[:, None, None] + shift[:, None, None]).relu(), weight, padding=1)
    torch.testing.assert_close(written, torch.cat([buffer[:, :16], y], 1), rtol=1e-4, atol=1e-4)
    assert torch.equal(buffer, before)


def test_fake_operators():
    buffer, x, packed, _ = tensors()
    geometry = [8, 8, 3, 3, 1, 1, 1, 1, 1, 1, 1]
    rest = (geometry, True, "implicit_gemm", "fp32", "none", 0.0, "none", False)
    torch.library.opcheck(torch.ops.fastconv.channel_scatter.default, (x, buffer, 8))
    scatter = torch.ops.fastconv.conv2d_packed_scatter.default
    torch.library.opcheck(scatter, (x, packed, None, None, None, None, buffer, 0, *rest))
    with (
        torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(RuntimeError, match="out has shape"),
    ):
        torch.ops.fastconv.conv2d_packed_into(buffer, x, packed, None, None, None, None, *rest)


def test_flops():
    """Those of the convolution."""
    buffer, x, packed, weight = tensors()
    buffer = buffer.contiguous(memory_format=torch.channels_last)
    geometry = [8, 8, 3, 3, 1, 1, 1, 1, 1, 1, 1]
    with FlopCounterMode(display=False) as found:
        rest = (geometry, True, "implicit_gemm", "fp32", "none", 0.0, "none", False)
        torch.ops.fastconv.conv2d_packed_into(buffer[:, 8:16], x, packed, None, None, None, None, *rest)
    with FlopCounterMode(display=False) as wanted:
        y = F.conv2d(x, weight, padding=1)
    assert found.get_total_flops() == wanted.get_total_flops()
    torch.testing.assert_close(buffer[:, 8:16], y, rtol=1e-4, atol=1e-4)


def test_torchvisions_densenet():
    """Its dense layers and transitions, fewer of them."""
    network = torchvision.models.DenseNet(8, (2, 4, 3, 2), 16, num_classes=10)
    calibrated(network)
    x = torch.randn(2, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    backend = check(network.to(memory_format=torch.channels_last), x, FROZEN)
    assert set(backend.concatenations) == {""}
    assert backend.parts.count("conv+cat") == 11
    assert backend.parts.count("bn+relu+conv+bn+relu") == 11
    assert backend.parts.count("bn+relu+conv") == 3  # transitions
    assert backend.count(aten.cat.default) == 0
    assert backend.count(ops.channel_scatter_op) == 4  # a pooled value before each block


@pytest.mark.parametrize("name", ["densenet", "rrdb"])
def test_inductor_writes_in_place(name):
    """Its code has no concatenation and no norm left, and copies what convolutions have not computed alone."""
    if name == "densenet":
        network: Any = torchvision.models.DenseNet(8, (2, 3), 16, num_classes=10)
        calibrated(network)
        x, into, kernels = torch.randn(2, 3, 32, 32), 11, 4  # both pools, the head's mean and its bias
    else:
        network, x, into, kernels = definitions.Dense(12, 12), torch.randn(1, 12, 7, 9), 4, 1  # the input's copy
    network = network.eval().to(memory_format=torch.channels_last)
    x = x.contiguous(memory_format=torch.channels_last)
    compiled = fastconv.compile(network, "fp32", algorithm="implicit_gemm", frozen=True)
    torch._dynamo.reset()
    with torch.no_grad(), torch.compiler.config.patch(force_disable_caches=True):
        y, code = run_and_get_code(compiled, x)
        assert torch.equal(compiled(x), y)
        exact = copy.deepcopy(network).double()(x.double())
    assert relative_error(y.double(), exact) < 1e-5
    assert compiled.report.concatenations == {"": {"densenet": 5, "rrdb": 4}[name]}
    assert "concatenations without a copy" in str(compiled.report)
    text = "".join(code)
    assert text.count("conv2d_packed_into.default(") == into
    assert "cat" not in text
    assert text.count("async_compile.cpp_pybinding(") <= kernels


def test_inductor_computes_in_the_format_of_the_range():
    """What it computes for a convolution: nothing in between is in the other format."""
    network, x = model(lambda m, x: m.wide(cat(resized(m.a(x)[:, :, 1:], x), resized(x, x)))).eval(), picture()
    compiled = fastconv.compile(network, "fp32", algorithm="implicit_gemm", frozen=True)
    torch._dynamo.reset()
    with torch.no_grad(), torch.compiler.config.patch(force_disable_caches=True):
        y, code = run_and_get_code(compiled, x)
        exact = copy.deepcopy(network).double()(x.double())
    assert relative_error(y.double(), exact) < 1e-5
    assert compiled.report.concatenations == {"": 1}
    assert "empty_strided_cpu((2, 8, 7, 5), (280, 1, 40, 8)" in "".join(code)
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14):
        pytest.skip(f"Inductor of torch {torch.__version__} computes parts of a sum in tensors of its own")
    assert "empty_strided_cpu((2, 8, 7, 5), (280, 35, 5, 1)" not in "".join(code)


def test_inductor_reads_and_writes_one_tensor():
    """What is computed of a range stands in another one of the same tensor, and one value in two tensors."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        first = cat(y, F.relu(-y), y[:, :4], m.b(x))
        return cat(m.c(y), y).sin() * first[:, :16] * y.sum()

    network, x = model(forward).eval(), picture(3)
    compiled = fastconv.compile(network, "fp32", algorithm="implicit_gemm", frozen=True)
    torch._dynamo.reset()
    with torch.no_grad(), torch.compiler.config.patch(force_disable_caches=True):
        y = compiled(x)
        assert torch.equal(compiled(x), y)
        exact = copy.deepcopy(network).double()(x.double())
    assert relative_error(y.double(), exact) < 1e-5
    assert compiled.report.concatenations == {"": 2}


class Views(nn.Module):
    def __init__(self, copies: bool) -> None:
        super().__init__()
        self.a, self.b, self.copies = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1), copies

    def forward(self, x):
        y = self.a(x)
        whole = torch.cat([y, self.b(x)], 1)
        return (whole.clone() if self.copies else y).permute(0, 2, 3, 1), whole


@pytest.mark.parametrize("copies", [False, True])
def test_views_that_are_returned_are_as_they_were(copies):
    """Of their own strides and memory: whoever gets one may take a view of it, or write to it."""
    layers = Views(copies).eval().to(memory_format=torch.channels_last)
    function, backend = compiled(layers, FROZEN)
    x = torch.randn(2, 8, 7, 9).to(memory_format=torch.channels_last)
    with torch.no_grad():
        (view, whole), expected = function(x), layers(x)
        assert backend.count(ops.conv2d_packed_scatter_op) > 0
        assert [value.stride() for value in (view, whole)] == [value.stride() for value in expected]
        view.zero_()
    torch.testing.assert_close(whole, expected[1], rtol=1e-4, atol=1e-4)
