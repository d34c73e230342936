"""What other parts of PyTorch do with swapped models: counting, exporting, tracing, tensor subclasses."""

from __future__ import annotations

import copy
import io
import itertools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import processes
import pytest
import torch
import torch.nn.functional as F
from harness import GATED
from layers import relative_error
from swapping import Net, codes
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import fastconv
from fastconv import integrations, ops
from fastconv.ops import autograd

LATE = ("torch.utils.flop_counter", "torch.distributed.tensor", "torch.onnx")


class Block(nn.Module):
    """A residual block, with each activation that an epilogue has."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, (2, 3), padding="same", groups=2)
        self.third = nn.Conv2d(8, 8, 3, padding=(2, 1), dilation=(2, 1))
        self.fourth = nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = F.relu6(self.third(F.silu(self.second(x))) + x)
        return F.leaky_relu(self.fourth(x), 0.2)


def block() -> nn.Module:
    model = Block().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # so that relu6 has something to cut
            parameter.mul_(3)
    return model


def swapped(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    fastconv.swap_(model, strict=True)
    return model


# --- Registration


@pytest.mark.parametrize("first", ["fastconv", "torch.utils.flop_counter, torch.distributed.tensor"])
def test_the_order_of_imports_does_not_matter(first: str) -> None:
    """And importing fastconv imports none of them."""
    code = f"""
import warnings
warnings.simplefilter("error", UserWarning)
import sys, {first}
assert {first != "fastconv"} or not set({LATE}) & set(sys.modules)
import fastconv, torch.utils.flop_counter, torch.distributed.tensor as t
assert fastconv.ops.conv2d_op.overloadpacket in torch.utils.flop_counter.flop_registry
assert fastconv.ops.conv2d_op in t.DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
"""
    run = processes.run(code)
    assert run.returncode == 0, run.stderr


def test_what_cannot_be_registered_is_said_and_stops_no_import(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AttributeError("moved")

    name = "torch.utils.mkldnn"
    monkeypatch.setitem(integrations._WAITING, name, fail)
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.warns(UserWarning, match=f"not known to {name} of torch .*: AttributeError: moved"):
        import torch.utils.mkldnn as module
    assert module.to_mkldnn is not None


# --- Counting


def operations(run: Callable[[], Any]) -> dict[str, int]:
    """By module."""
    with FlopCounterMode(display=False) as counter:
        run()
    return {name: sum(counts.values()) for name, counts in counter.get_flop_counts().items()}


@pytest.mark.parametrize("make", [Net, block])
def test_a_swapped_model_has_as_many_operations(make: Callable[[], nn.Module]) -> None:
    model = make()
    ours = swapped(model)
    x = torch.randn(2, 3, 13, 18)
    with torch.no_grad():
        ours(x)  # packed weights change nothing
        assert operations(lambda: ours(x)) == operations(lambda: model(x))
    x.requires_grad_()
    for run in (lambda m: m(x), lambda m: m(x).sum().backward()):
        expected = operations(lambda run=run: run(model))
        assert expected["Global"] > 0
        assert operations(lambda run=run: run(ours)) == expected


def test_packed_operators_and_gradients_are_counted() -> None:
    x, w = torch.randn(2, 4, 9, 7), torch.randn(6, 4, 3, 3)
    geometry: tuple[Any, ...] = ([2, 1], [1, 1], [1, 1], 1)
    packed = ops.pack_weight(w, 1, "implicit_gemm", "fp32")
    epilogue = ("implicit_gemm", "fp32", "none", 0.0)
    forward = operations(lambda: F.conv2d(x, w, None, *geometry))["Global"]
    assert forward > 0
    packed_call = lambda: autograd.conv2d_packed(x, packed, w.shape, None, None, *geometry, False, *epilogue)  # noqa: E731
    assert operations(packed_call)["Global"] == forward
    grad = F.conv2d(x, w, None, *geometry)
    like = torch.ops.aten.convolution_backward
    for mask, call in (
        ([True, False, False], lambda: ops.input_gradient_op(grad, w, x.shape, *geometry, "auto", "fp32", 0)),
        ([False, True, False], lambda: ops.weight_gradient_op(x, grad, w.shape, *geometry, "auto", "fp32", 0)),
    ):
        rest = (None, *geometry[:3], False, [0, 0], 1, mask)
        assert operations(call)["Global"] == operations(lambda rest=rest: like(grad, x, w, *rest))["Global"]


# --- Exporting


def onnx_outputs(program: Any, x: Tensor) -> tuple[list[Tensor], list[str]]:
    """The outputs of the ONNX model by its reference evaluator, and its operators."""
    from onnx.reference import ReferenceEvaluator

    graph = program.model_proto.graph
    assert {node.domain for node in graph.node} == {""}
    outputs = ReferenceEvaluator(program.model_proto).run(None, {graph.input[0].name: x.numpy()})
    return [torch.from_numpy(y) for y in outputs], [node.op_type for node in graph.node]


@pytest.mark.parametrize("how", ["swapped", "fused", "exported before", "dynamic"])
@pytest.mark.filterwarnings("ignore")
def test_onnx_by_dynamo(how: str) -> None:
    pytest.importorskip("onnxscript", reason="the ONNX exporter needs onnx and onnxscript")
    model = block()
    ours = fastconv.fuse(model) if how == "fused" else swapped(model)
    x = torch.randn(2, 3, 12, 10)
    if how == "exported before":
        program = torch.onnx.export(torch.export.export(ours, (x,)), dynamo=True, verbose=False)
    else:
        dynamic = ({0: torch.export.Dim("n", min=2)},) if how == "dynamic" else None
        program = torch.onnx.export(ours, (x,), dynamo=True, dynamic_shapes=dynamic, verbose=False)
    if how == "dynamic":
        x = torch.randn(5, 3, 12, 10)
    (y,), operators = onnx_outputs(program, x)
    assert operators.count("Conv") == 4
    assert relative_error(y, model(x)) < 1e-5


@pytest.mark.filterwarnings("ignore")
def test_onnx_has_every_epilogue() -> None:
    """Of one model: an export takes long."""
    pytest.importorskip("onnxscript", reason="the ONNX exporter needs onnx and onnxscript")
    activations, residuals = (None, "relu", "relu6", "silu", "leaky_relu"), ("none", "before", "after", "pooled")
    epilogues = [*itertools.product(activations, residuals), *((activation, "none") for activation in GATED)]

    class Convolutions(nn.Module):
        def forward(self, x: Tensor) -> list[Tensor]:
            return [
                fastconv.conv2d(
                    x, w, b, (1, 2), (2, 0), residual=r if residual in ("before", "after") else None,
                    activation=activation, negative_slope=0.3, residual_after=residual == "after",
                    max_pool=residual == "pooled",
                )
                for activation, residual in epilogues
            ]  # fmt: skip

    x, w, b = 4 * torch.randn(2, 3, 8, 9), torch.randn(4, 3, 3, 3), torch.randn(4)
    r = 10 * torch.randn(2, 4, 10, 4)
    found, _ = onnx_outputs(torch.onnx.export(Convolutions(), (x,), dynamo=True, verbose=False), x)
    for epilogue, y, expected in zip(epilogues, found, Convolutions()(x), strict=True):
        assert relative_error(y, expected) < 1e-5, epilogue


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["swapped", "fused"])
def test_torchscript_is_refused_in_one_sentence(how: str) -> None:
    pytest.importorskip("onnx", reason="torch.onnx.export needs it")
    ours = fastconv.fuse(block()) if how == "fused" else swapped(block())
    x = torch.randn(1, 3, 8, 8)
    way_out = "script the model that it was made from" if how == "fused" else r"\bundo\(\) the swap"
    with pytest.raises(fastconv.UnsupportedError, match=rf"^torch\.jit\.script cannot .*{way_out}"):
        torch.jit.script(ours)
    with pytest.raises(fastconv.UnsupportedError, match=r"^torch\.onnx\.export by TorchScript cannot .*\bundo\(\)"):
        torch.onnx.export(ours, (x,), io.BytesIO(), dynamo=False)


@pytest.mark.filterwarnings("ignore")
def test_a_fused_model_without_a_layer_of_ours_says_the_same() -> None:
    fused = fastconv.fuse(nn.Sequential(nn.Linear(3, 3), nn.ReLU()).eval())
    for model in (fused, nn.Sequential(fused)):
        with pytest.raises(fastconv.UnsupportedError, match="script the model that it was made from"):
            torch.jit.script(model)


@pytest.mark.filterwarnings("ignore")
def test_undone_a_model_can_be_scripted() -> None:
    model = block()
    fastconv.swap_(model).undo()
    x = torch.randn(1, 3, 8, 8)
    assert relative_error(torch.jit.script(model)(x), model(x)) < 1e-6


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["swapped", "fused"])
def test_a_model_can_be_traced(how: str) -> None:
    model = block()
    ours = fastconv.fuse(model) if how == "fused" else swapped(model)
    x = torch.randn(2, 3, 12, 10)
    traced = torch.jit.trace(ours, (x,))
    assert "fastconv::conv2d" in str(traced.inlined_graph)
    x = torch.randn(3, 3, 9, 14)
    assert relative_error(traced(x), model(x)) < 1e-5


# --- Tensor subclasses


class Quantized(Tensor):
    """A weight as integers and a scale, which knows what it needs of PyTorch's operators and no other."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: float) -> Quantized:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: Tensor, scale: float) -> None:
        self.codes, self.scale = codes, scale

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(args[0].codes, args[0].scale)
        if func is torch.ops.aten.convolution.default:
            return func(*[a.codes * a.scale if isinstance(a, cls) else a for a in args])
        raise NotImplementedError(func)


class Doubled(Tensor):
    """A weight that means twice itself to F.conv2d and F.conv1d, and nothing to what is not PyTorch's."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.conv2d, F.conv1d):
            x, weight, *rest = args
            return func(x, 2 * weight.as_subclass(Tensor), *rest, **(kwargs or {}))
        if "fastconv" in str(func):
            raise NotImplementedError(func)
        return super().__torch_function__(func, types, args, kwargs or {})


FOREIGN = {
    "by dispatch": lambda w: Quantized((w * 100).round().to(torch.int8), 0.01),
    "by function": lambda w: w.as_subclass(Doubled),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_weight_of_a_foreign_class_is_pytorchs(kind: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()).eval()
    ours, x = swapped(model), torch.randn(2, 3, 8, 9)
    fused = fastconv.fuse(model)
    with torch.no_grad():
        ours(x), fused(x)  # what was packed before is not used
        for changed in (model, ours, fused):
            layer = changed.get_submodule("0")
            layer.weight = nn.Parameter(FOREIGN[kind](layer.weight.detach()), requires_grad=False)
        expected = model(x)
        assert torch.equal(ours(x), expected)
        assert torch.equal(fused(x), expected)
        assert torch.equal(fastconv.conv2d(x, model[0].weight, model[0].bias, padding=1, activation="relu"), expected)
        assert codes(fastconv.swap_(nn.Sequential(model[0], nn.Conv2d(4, 4, 1)))) == ["tensor_subclass", ""]
        with pytest.raises(fastconv.UnsupportedError, match=r"algorithm 'direct' cannot serve a .*; expected plain"):
            fastconv.conv2d(x, model[0].weight, algorithm="direct")


@torch.no_grad()
@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("padding", [1, "same"])
def test_a_row_with_a_weight_of_a_foreign_class_is_pytorchs(kind: str, frozen: bool, padding: Any) -> None:
    """Which may know no view of itself."""
    model = nn.Sequential(nn.Conv1d(4, 6, 3, padding=padding, dilation=2, groups=2), nn.ReLU()).eval()
    ours, x = copy.deepcopy(model), torch.randn(2, 4, 13)
    assert fastconv.swap_(ours, frozen=frozen).swapped == 1
    ours(x)
    for changed in (model, ours):
        changed[0].weight = nn.Parameter(FOREIGN[kind](changed[0].weight.detach()), requires_grad=False)
    expected = model(x)
    assert torch.equal(ours(x), expected)
    assert torch.equal(ours(x[0]), model(x[0]))
    fastconv.refresh(ours)
    if kind == "by dispatch":  # the other cannot be copied
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert torch.equal(fastconv.fuse(ours)(x), expected)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(ours, backend="eager")(x), expected)
    y = fastconv.conv1d(x, model[0].weight, model[0].bias, 1, padding, 2, 2)
    assert torch.equal(y.relu(), expected)
    with pytest.raises(fastconv.UnsupportedError, match=r"algorithm 'direct' cannot serve a .*; expected plain"):
        fastconv.conv1d(x, model[0].weight, algorithm="direct", groups=2)


def test_a_class_without_a_meaning_of_its_own_is_served() -> None:
    class Named(Tensor):
        pass

    x, w = torch.randn(1, 3, 8, 9), torch.randn(4, 3, 3, 3)
    y = fastconv.conv2d(x.as_subclass(Named), w, algorithm="direct")
    assert type(y) is Named
    assert torch.equal(y.as_subclass(Tensor), fastconv.conv2d(x, w, algorithm="direct"))


@pytest.mark.parametrize("swap_first", [True, False])
def test_torchao(swap_first: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ao = pytest.importorskip("torchao.quantization", reason="torchao is not installed for this torch")
    model = block()
    ours = swapped(model) if swap_first else copy.deepcopy(model)
    config = ao.IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=ao.PerAxis(0))
    x = torch.randn(2, 3, 12, 10)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours(x)
        for changed in (model, ours):
            ao.quantize_(changed, config, filter_fn=lambda layer, name: isinstance(layer, nn.Conv2d))
        if not swap_first:
            assert set(codes(fastconv.swap_(ours))) == {"tensor_subclass"}
        assert type(ours.first.weight) is not nn.Parameter
        assert torch.equal(ours(x), model(x))
