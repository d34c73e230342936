"""What fuse returns is a module like others; what it refuses to trace; whole networks."""

import copy
import io
import json
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fusing import Function, check, codes, hooked, layers, norm, parts, sequence
from layers import NO_GPU, relative_error
from rewriting import compiled
from torch import Tensor, nn

import fastconv
from fastconv import FusedConv2d, FusedModule
from fastconv.models import build, flatten_output, photographs
from fastconv.models.compare import bound
from fastconv.rewrites import Asked

pytestmark = pytest.mark.usefixtures("full_precision")


# -------------------------------------------------------------------------------------------- arguments, tracing


def test_arguments() -> None:
    model = sequence(nn.Conv2d(4, 4, 3)).eval()
    with pytest.raises(TypeError, match="model is a int"):
        fastconv.fuse(3)
    with pytest.raises(TypeError, match="strict is 1"):
        fastconv.fuse(model, strict=1)
    with pytest.raises(ValueError, match="algorithm is 'magic'"):
        fastconv.fuse(model, algorithm="magic")
    with pytest.raises(ValueError, match="precision is 'fp8'"):
        fastconv.fuse(model, precision="fp8")
    with pytest.raises(ValueError, match="activation is 'tanh'"):
        FusedConv2d(3, 3, 3, activation="tanh")


@pytest.mark.parametrize("read", ["weight", "bias"])
def test_a_forward_that_reads_a_convolution_s_parameters_finds_them(read: str) -> None:
    """The fused layer, whose weight has the norm in it, takes a name of its own."""

    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.relu(self.norm(self.conv(x)))
        return y, F.conv2d(x, self.conv.weight, padding=1) if read == "weight" else self.conv.bias * 2

    model = Function(forward).eval()
    x = torch.randn(2, 6, 5, 8)
    fused = fastconv.fuse(model)
    assert parts(fused) == ["conv+bn+relu"]
    with torch.no_grad():
        for result, expected in zip(fused(x), model(x), strict=True):
            assert relative_error(result, expected) < 1e-5


def test_a_container_that_stays_a_call_keeps_its_convolution() -> None:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.block(x), F.relu(self.norm(self.block[0](x)))

    model = Function(forward)
    model.block = hooked(sequence(nn.Conv2d(6, 6, 3, padding=1)))
    model.eval()
    x = torch.randn(2, 6, 5, 8)
    with torch.no_grad():
        for result, expected in zip(fastconv.fuse(model)(x), model(x), strict=True):
            assert relative_error(result, expected) < 1e-5


def test_a_free_name_is_free_of_whatever_the_model_has() -> None:
    model = Function(lambda self, x: F.relu(self.conv(x)) + F.silu(self.conv(x)) * self.conv_1)
    model.conv_1 = nn.Parameter(torch.randn(6, 1, 1))
    check(model, torch.randn(2, 6, 5, 8))


def test_unpickling_leaves_torch_fx_as_it_was() -> None:
    """torch.fx's own check of an argument that it fixes to None breaks every later trace, once unpickled."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 6, 3)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            y = F.relu(self.conv(x))
            return y if mask is None else y * mask

    model, x = Masked().eval(), torch.randn(2, 4, 9, 9)
    again = pickle.loads(pickle.dumps(fastconv.fuse(model)))
    with torch.no_grad():
        assert relative_error(again(x), model(x)) < 1e-5
        assert relative_error(fastconv.fuse(model)(x), model(x)) < 1e-5
    with pytest.raises(AssertionError):
        again(x, torch.ones(1))
    torch.fx.symbolic_trace(nn.ReLU())


def test_training_is_refused() -> None:
    model = sequence(nn.Conv2d(4, 4, 3), norm(4))
    with pytest.raises(RuntimeError, match="model is in training mode"):
        fastconv.fuse(model)
    fused = fastconv.fuse(model.eval())
    for module in (fused, copy.deepcopy(fused), sequence(fused)):
        with pytest.raises(RuntimeError, match="serves inference alone"):
            module.train()
        assert not fused.training
        module.eval()
    assert not any(parameter.requires_grad for parameter in fused.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_models_that_ask_what_they_were_given() -> None:
    """A trace answers as a call with tensors does."""

    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.conv(F.relu(x)) if isinstance(x, Tensor) else x
        first = torch.split(y, 3, 1)[0] if torch.is_tensor(y) else x
        others = x.shape, x.size(0), y.shape[1] * 2, y.chunk(2, 1)
        if isinstance(first, Tensor) and not any(isinstance(other, Tensor) for other in others):
            y = torch.cat([y, first * 2], 1)
        return y if isinstance(y, torch.nn.Parameter) else y.view(x.size(0), -1)

    model, x = Function(forward).eval(), torch.randn(2, 6, 7, 5)
    with torch.no_grad():
        torch.testing.assert_close(fastconv.fuse(model)(x), model(x), rtol=1e-5, atol=1e-5)


def test_a_model_that_switches_autocast_off_is_not_for_autocast() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return F.relu(self.conv(x))

    model, x = Function(forward).eval(), torch.randn(2, 6, 9, 8)
    fused = fastconv.fuse(model)
    assert parts(fused) == ["conv+relu"]
    for each in (fused, copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        with torch.no_grad():
            torch.testing.assert_close(each(x), model(x), rtol=1e-4, atol=1e-4)
            with torch.autocast("cpu", torch.bfloat16), pytest.raises(fastconv.UnsupportedError, match="autocast off"):
                each(x)


def test_models_that_cannot_be_traced() -> None:
    def branch(self: Any, x: Tensor) -> Tensor:
        return self.conv(x) if x.sum() > 0 else x

    def autocast(self: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.conv(x)

    for forward, message in ((branch, "control flow.*swap_"), (autocast, "autocast")):
        with pytest.raises(fastconv.UnsupportedError, match=f"(?s)cannot be traced.*{message}"):
            fastconv.fuse(Function(forward).eval())
    with pytest.raises(fastconv.UnsupportedError, match=r"not there yet, 0\.weight; call it once"):
        fastconv.fuse(nn.Sequential(nn.LazyConv2d(4, 3)).eval())
    with pytest.raises(fastconv.UnsupportedError, match="hooks"):
        fastconv.fuse(hooked(sequence(nn.Conv2d(4, 4, 3)).eval()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script = torch.jit.script(sequence(nn.Conv2d(4, 4, 3)).eval())
    with pytest.raises(fastconv.UnsupportedError, match="TorchScript"):
        fastconv.fuse(script)


def test_arguments_with_a_default_keep_it() -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3)

        def forward(self, x: Tensor, mask: Tensor | None = None, twice: bool = False) -> Tensor:
            y = F.relu(self.conv(x))
            y = y if mask is None else y * mask
            return 2 * y if twice else y

    fused = check(Optional(), torch.randn(1, 4, 5, 5))
    assert parts(fused) == ["conv+relu"]
    with pytest.raises(AssertionError, match="specialized"):
        fused(torch.randn(1, 4, 5, 5), twice=True)


def test_layers_that_were_swapped_or_fused_before() -> None:
    model = sequence(nn.Conv2d(4, 4, 3), norm(4), nn.ReLU()).eval()
    fastconv.swap_(model, algorithm="direct", precision="ieee")
    x = torch.randn(1, 4, 5, 5)
    fused = fastconv.fuse(model)
    assert parts(fused) == ["conv+bn+relu"]
    with torch.no_grad():
        assert relative_error(fused(x), model(x)) < 1e-5
    layer = fused.get_submodule("0")
    assert (layer.algorithm, layer.precision, layer.last_algorithm) == ("direct", "ieee", "direct")
    again = fastconv.fuse(fused, strict=True)
    assert codes(again) == ["already_fused"]
    assert torch.equal(again(x), fused(x))
    assert fastconv.swap_(fused).rows[0].reason_code == "already_swapped"


# -------------------------------------------------------------------------------------------- a module like others


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = sequence(nn.Conv2d(3, 8, 3, padding=1), norm(8), nn.SiLU())
        self.body = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm = norm(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = F.relu(self.norm(self.body(x)) + x)
        return self.head(x.mean((2, 3)))


def test_report() -> None:
    fused = fastconv.fuse(Small().eval())
    report = fused.report
    assert (report.fused, report.total) == (2, 2)
    assert [row.name for row in report.rows] == ["stem.0", "body"]
    assert [row.algorithm for row in report.rows] == ["auto", "auto"]
    assert "conv+bn+residual+relu" in str(report)
    with torch.no_grad():
        fused(torch.randn(2, 3, 9, 7))
    ran = json.loads(fused.report.to_json())
    assert (ran["schema"], ran["fused"], ran["total"]) == (1, 2, 2)
    assert [row["last_input_shape"] for row in ran["rows"]] == [[2, 3, 9, 7], [2, 8, 9, 7]]
    assert all(row["algorithm"] in [entry.name for entry in fastconv.algorithms()] for row in ran["rows"])


@pytest.mark.parametrize("front", ["fuse", "compile"])
def test_a_report_groups_what_is_alike_and_expects_the_planner_s_time(front: str) -> None:
    """Three blocks of one kind are one row, whose time is what `explain` says of that problem."""
    block = [nn.Conv2d(32, 32, 3, padding=1), norm(32), nn.ReLU()]
    model = sequence(*copy.deepcopy(block), *copy.deepcopy(block), *copy.deepcopy(block), nn.Conv2d(32, 4, 1)).eval()
    x = torch.randn(2, 32, 12, 12)
    algorithm = "winograd_f2"
    model[9] = fastconv.Conv2d(32, 4, 1, algorithm="implicit_gemm").eval()
    if front == "fuse":
        fused = fastconv.fuse(model, algorithm=algorithm, precision="fp32")
        assert fused.report.expected_us == {"convolutions": 0, "epilogues": 0, "pytorch": 0}
        with torch.no_grad():
            fused(x)
        report = fused.report
    else:
        function, backend = compiled(model, Asked(algorithm, "fp32"))
        with torch.no_grad():
            function(x)
        report = fastconv.CompileReport([backend.found])
    assert [(row.fused, row.names, row.algorithm) for row in report.rows] == [
        ("conv+bn+relu", ("0", "3", "6"), algorithm),
        ("conv", ("9",), "implicit_gemm"),
    ]
    assert (report.total, report.ours, report.fused) == (4, 4, 3)

    def cost(algorithm: str, k: int, r: int, activation: str | None) -> float:
        found = fastconv.explain(
            x.shape, (k, 32, r, r), padding=r // 2, device="cpu", precision="fp32", bias=True, activation=activation
        )
        return next(row.cost_us for row in found.rows if row.algorithm == algorithm)

    first, last = report.rows
    assert first.us == cost(algorithm, 32, 3, "relu")
    assert last.us == cost("implicit_gemm", 4, 1, None)
    plain = cost(algorithm, 32, 3, None)
    expected = report.expected_us
    assert expected["convolutions"] == pytest.approx(3 * plain + last.us)
    assert expected["epilogues"] == pytest.approx(3 * (first.us - plain))
    assert expected["pytorch"] == 0
    text = str(report)
    assert "0 and 2 more" in text
    assert f"expected: {expected['convolutions']:.0f} us" in text
    assert json.loads(report.to_json())["rows"][0]["names"] == ["0", "3", "6"]


def test_copies_pickles_and_state() -> None:
    fused = fastconv.fuse(Small().eval())
    x = torch.randn(2, 3, 9, 7)
    with torch.no_grad():
        y = fused(x)
        buffer = io.BytesIO()
        torch.save(fused, buffer)
        buffer.seek(0)
        copies = [copy.deepcopy(fused), pickle.loads(pickle.dumps(fused)), torch.load(buffer, weights_only=False)]
        for other in copies:
            assert isinstance(other, FusedModule)
            assert not other.training
            assert torch.equal(other(x), y)
            assert parts(other) == parts(fused)
            other.get_submodule("stem.0").weight.zero_()
            assert torch.equal(fused(x), y)
        assert list(fused.state_dict()) == [
            "stem.0.weight", "stem.0.bias", "body.weight", "body.bias", "head.weight", "head.bias",
        ]  # fmt: skip
        copies[0].load_state_dict(fused.state_dict())
        assert torch.equal(copies[0](x), y)  # what was packed before follows
        assert relative_error(fused.double()(x.double()).float(), y) < 1e-5


def test_it_holds_the_weights_of_its_day() -> None:
    model = Small().eval()
    fused = fastconv.fuse(model)
    x = torch.randn(2, 3, 9, 7)
    with torch.no_grad():
        y = fused(x)
        for tensor in model.state_dict().values():
            tensor.fill_(3)
        assert torch.equal(fused(x), y)


def test_compile_and_export() -> None:
    fused = fastconv.fuse(Small().eval())
    x = torch.randn(2, 3, 9, 7)
    with torch.no_grad():
        y = fused(x)
        compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
        assert relative_error(compiled(x), y) < 1e-5
        exported = torch.export.export(fused, (x,))
        assert relative_error(exported.module()(x), y) < 1e-5
        targets = [str(node.target) for node in exported.graph.nodes]
        assert sum("fastconv.conv2d" in target for target in targets) == 2
        assert not any("batch_norm" in target or "silu" in target or "relu" in target for target in targets)


def test_autocast_and_gradients_of_the_input() -> None:
    model = Small().eval()
    fused = fastconv.fuse(model)
    x = torch.randn(2, 3, 9, 7)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert fused(x).dtype == model(x).dtype
        assert relative_error(fused(x), model(x)) < 3e-2
    gradients = []
    for module in (fused, model):
        leaf = x.clone().requires_grad_()
        module(leaf).square().sum().backward()
        gradients.append(leaf.grad)
    assert relative_error(*gradients) < 1e-4
    assert relative_error(torch.func.vmap(fused)(x[:, None])[:, 0], fused(x)) < 1e-5


def test_a_layer_takes_residuals_of_any_shape_in_turn() -> None:
    """The choice that a layer remembers belongs to the residual's shape, too."""
    layer = FusedConv2d(8, 8, 3, padding=1, activation="relu", algorithm="implicit_gemm")
    x = torch.randn(2, 8, 9, 9)
    with torch.no_grad():
        y = nn.Conv2d.forward(layer, x)
        for shape in ((2, 8, 9, 9), (8, 1, 1), (2, 8, 9, 9), (1, 1, 1, 9), ()):
            residual = torch.randn(shape)
            assert relative_error(layer(x, residual), F.relu(y + residual)) < 1e-5


@pytest.mark.parametrize("lower", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("function", ["sum", "in_place", "after", "swapped"])
def test_autocast_promotes_a_sum_as_pytorch_does(function: str, records: bool, lower: torch.dtype) -> None:
    functions: dict[str, Any] = {
        "sum": lambda m, x: F.relu(m.conv(x) + x),
        "in_place": lambda m, x: F.relu(m.conv(x).add_(x)),
        "after": lambda m, x: F.relu(m.conv(x)) + x,
        "swapped": lambda m, x: F.relu(x + m.conv(x)),
    }
    model = Function(functions[function]).eval().requires_grad_(False)
    fused, x = fastconv.fuse(model), torch.randn(2, 6, 9, 8)
    assert layers(fused) == 1
    with torch.autocast("cpu", lower):
        for residual in (x, x.to(lower), x):  # the input and the residual
            y, expected = (m(residual.clone().requires_grad_(records)) for m in (fused, model))
            assert y.dtype == expected.dtype
            assert relative_error(y, expected) < 2 * torch.finfo(lower).eps


PADDED: dict[str, Any] = {
    "relu": lambda m, x: F.relu(m.conv(x)),
    "max_pool": lambda m, x: F.max_pool2d(F.relu(m.conv(x)), 2),
    "residual": lambda m, x: F.relu(m.norm(m.conv(x)) + x),
    "residual_after": lambda m, x: F.silu(m.conv(x)) + x,
    "broadcast": lambda m, x: F.relu(m.conv(x) + x.mean((2, 3), keepdim=True)),
}


@pytest.mark.parametrize("function", PADDED)
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_padding_that_is_not_zeros_with_and_without_gradients(mode: str, function: str) -> None:
    model = Function(PADDED[function], padding_mode=mode).eval()
    x = torch.randn(2, 6, 8, 9)
    fused = check(model, x)
    assert layers(fused) == 1
    exact, leaves = copy.deepcopy(model).double(), (x.clone().requires_grad_(), x.double().requires_grad_())
    values = fused(leaves[0]), exact(leaves[1])
    assert relative_error(values[0].double(), values[1]) < 1e-5
    gradients = [torch.autograd.grad(y.square().sum(), leaf)[0] for y, leaf in zip(values, leaves, strict=True)]
    assert relative_error(gradients[0].double(), gradients[1]) < 1e-5


@pytest.mark.skipif(not torch.cuda.is_available(), reason=f"test_cuda_graph: {NO_GPU}")
def test_cuda_graph() -> None:
    model = Small().eval().cuda().to(memory_format=torch.channels_last)
    fused = fastconv.fuse(model)
    x = torch.randn(4, 3, 13, 11, device="cuda").to(memory_format=torch.channels_last)
    with torch.no_grad():
        fused(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = fused(x)
        for _ in range(3):
            x.normal_()
            graph.replay()
            assert relative_error(y, model(x)) < 1e-4


@pytest.mark.parametrize(
    ("name", "image", "expected"),
    [
        ("vgg16", 32, {"conv+relu": 8, "conv+relu+max_pool": 5}),
        ("resnet50", 32, {"conv+bn+relu": 33, "conv+bn+residual+relu": 16, "conv+bn": 4}),
        ("densenet161", 32, {"conv+bn+relu": 79, "conv": 81}),
        ("yolov3", 32, {"conv+bn+leaky_relu": 49, "conv+bn+leaky_relu+residual": 23, "conv": 3}),
    ],
)
def test_networks(name: str, image: int, expected: dict[str, int]) -> None:
    pytest.importorskip("torchvision", reason="torchvision is not installed: no networks to run")
    pytest.importorskip("sklearn", reason="scikit-learn is not installed: no photographs to feed")
    model = build(name, image=image)
    fused = fastconv.fuse(model, strict=True)
    found = parts(fused)
    assert {part: found.count(part) for part in found} == expected
    x = photographs(1, image)
    with torch.inference_mode():
        y, plain = flatten_output(fused(x)), flatten_output(model(x))
        exact = flatten_output(model.double()(x.double()))
    assert relative_error(y.double(), exact) <= bound(relative_error(plain.double(), exact), "fp32", len(found))
