"""conv_transpose2d, conv1d and their layers: the same functions as PyTorch's, by algorithms of ours."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layers import DEVICES, relative_error
from swapping import codes
from torch import Tensor, nn

import fastconv
from fastconv import ops
from fastconv.ops import autograd, transposed

pytestmark = pytest.mark.usefixtures("full_precision")
LAYOUTS = [torch.contiguous_format, torch.channels_last]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

# (C, H, W), (K/groups, R, S), arguments: every way that taps and stride fall on one another
TRANSPOSED: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((32, 5, 7), (16, 2, 2), {"stride": 2}),  # every U-Net's: one convolution, woven
    ((12, 5, 7), (80, 2, 2), {"stride": 2}),  # with more filters: one convolution for each phase
    ((8, 6, 5), (10, 3, 3), {"padding": 1}),
    ((8, 6, 5), (10, 3, 3), {"stride": 2, "padding": 1, "output_padding": 1}),
    ((8, 6, 5), (4, 4, 4), {"stride": 2, "padding": 1, "groups": 2}),
    ((6, 4, 9), (1, 3, 5), {"stride": (3, 2), "padding": (0, 2), "output_padding": (2, 0), "groups": 6}),
    ((8, 5, 4), (9, 3, 2), {"stride": (2, 1), "padding": 2, "dilation": (2, 3)}),
    ((8, 5, 4), (9, 1, 1), {"stride": 3, "output_padding": 2}),  # phases without taps
    ((8, 1, 1), (9, 7, 7), {}),
    ((8, 5, 4), (9, 3, 3), {"dilation": 3, "output_padding": 2}),  # PyTorch's alone
]
# (C, L), (K, S), arguments
ROWS: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((8, 33), (12, 3), {"padding": 1}),
    ((8, 33), (12, 4), {"stride": 3, "padding": 2, "groups": 4}),
    ((8, 33), (8, 5), {"padding": "same", "dilation": 2, "groups": 8}),
    ((8, 33), (12, 4), {"padding": "same"}),  # a zero more at the end
    ((3, 7), (5, 7), {"padding": "valid"}),
    ((40, 1), (33, 1), {"stride": (2,)}),
]


def limit(dtype: torch.dtype, terms: int) -> float:
    """Of the relative L2 error: a rounding of the output, and a random walk of FP32 roundings over the sum."""
    return torch.finfo(dtype).eps + torch.finfo(torch.float32).eps * terms**0.5


def values(*size: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(len(size) + size[-1])).to(device, dtype)


def transposed_case(
    case: tuple[Any, Any, dict[str, Any]], device: str, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    size, (k, r, s), arguments = case
    like: dict[str, Any] = {"dtype": dtype, "device": device}
    return (
        values(2, *size, **like),
        values(size[0], k, r, s, **like),
        values(k * arguments.get("groups", 1), **like),
        arguments,
    )


def row_case(
    case: tuple[Any, Any, dict[str, Any]], device: str, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    size, (k, s), arguments = case
    like: dict[str, Any] = {"dtype": dtype, "device": device}
    return (
        values(2, *size, **like), values(k, size[0] // arguments.get("groups", 1), s, **like), values(k, **like),
        arguments,
    )  # fmt: skip


# --- What they compute


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("algorithm", ["auto", "im2col_gemm", "implicit_gemm"])
def test_transposed_against_float64(
    algorithm: str, dtype: torch.dtype, layout: torch.memory_format, device: str
) -> None:
    for case in TRANSPOSED:
        x, weight, bias, arguments = transposed_case(case, device, dtype)
        expected = F.conv_transpose2d(x.double(), weight.double(), bias.double(), **arguments)
        x = x.contiguous(memory_format=layout)
        arguments = arguments | {"precision": "fp32", "algorithm": algorithm}
        if algorithm.endswith("gemm") and case is TRANSPOSED[-1]:
            with pytest.raises(fastconv.UnsupportedError, match=f"{algorithm}.*output_padding"):
                fastconv.conv_transpose2d(x, weight, bias, **arguments)
            continue
        y = fastconv.conv_transpose2d(x, weight, bias, **arguments)
        assert y.dtype == dtype
        assert y.is_contiguous(memory_format=ops.format_of(x, weight))
        assert relative_error(y.double(), expected) <= limit(dtype, weight.numel()), (case, algorithm)
        call = ops.last_call()
        assert call is not None
        assert call["algorithm"] == algorithm or algorithm == "auto"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("algorithm", ["auto", "im2col_gemm"])
def test_conv1d_against_float64(algorithm: str, dtype: torch.dtype, device: str) -> None:
    for case in ROWS:
        x, weight, bias, arguments = row_case(case, device, dtype)
        expected = F.conv1d(x.double(), weight.double(), bias.double(), **arguments)
        for input in (x, x.transpose(1, 2).contiguous().transpose(1, 2), x[0]):
            y = fastconv.conv1d(input, weight, bias, precision="fp32", algorithm=algorithm, **arguments)
            wanted = expected if input.dim() == 3 else expected[0]
            assert y.dtype == dtype
            assert relative_error(y.double(), wanted) <= limit(dtype, weight.numel()), case


@pytest.mark.parametrize("grad", [False, True])
def test_a_rows_output_is_no_view(grad: bool) -> None:
    layer, x = fastconv.Conv1d(8, 16, 3, padding=1), torch.randn(2, 8, 20)
    scale = nn.Parameter(torch.full((1,), 2.0))
    for call in (layer, lambda x: fastconv.conv1d(x, layer.weight, layer.bias, padding=1)):
        for _ in range(2):
            with torch.set_grad_enabled(grad):
                y = call(x)
            expected = 2 * y.detach()
            assert torch.equal(y.mul_(scale), expected)
            assert y.detach_().shape == (2, 16, 20)


def test_winograd_serves_a_transposed_convolution() -> None:
    x, weight, bias, arguments = transposed_case(TRANSPOSED[2], "cpu")
    y = fastconv.conv_transpose2d(x, weight, bias, algorithm="winograd_f2", **arguments)
    expected = F.conv_transpose2d(x.double(), weight.double(), bias.double(), **arguments)
    gain = 4.0  # of a product of transformed values, over a plain one (docs/concepts/numerics.md)
    assert relative_error(y.double(), expected) <= gain * limit(torch.float32, weight.numel())
    x, weight, bias, arguments = transposed_case(TRANSPOSED[3], "cpu")
    with pytest.raises(fastconv.UnsupportedError, match="winograd_f2"):  # made of 2x2, 2x1, 1x2 and 1x1 filters
        fastconv.conv_transpose2d(x, weight, bias, algorithm="winograd_f2", **arguments)


@pytest.mark.parametrize("device", DEVICES)
def test_unbatched_and_empty(device: str) -> None:
    x, weight, bias, arguments = transposed_case(TRANSPOSED[3], device)
    whole = fastconv.conv_transpose2d(x, weight, bias, precision="fp32", **arguments)
    assert relative_error(fastconv.conv_transpose2d(x[0], weight, bias, precision="fp32", **arguments), whole[0]) < 1e-6
    for algorithm in ("auto", "im2col_gemm"):
        assert fastconv.conv_transpose2d(x[:0], weight, bias, algorithm=algorithm, **arguments).shape == whole[:0].shape
        narrow, wide = torch.randn(2, 8, 2, 7, device=device), torch.randn(8, 5, 3, 3, device=device)
        for padding in (2, (2, 1)):  # an output without pixels
            expected = F.conv_transpose2d(narrow, wide, padding=padding)
            found = fastconv.conv_transpose2d(narrow, wide, padding=padding, algorithm=algorithm)
            assert found.shape == expected.shape == (2, 5, 0, expected.shape[3])


def test_other_dtypes_are_pytorchs() -> None:
    x, weight, bias, arguments = transposed_case(TRANSPOSED[3], "cpu", torch.float64)
    assert torch.equal(
        fastconv.conv_transpose2d(x, weight, bias, **arguments), F.conv_transpose2d(x, weight, bias, **arguments)
    )
    call = ops.last_call()
    assert call is not None
    assert call["algorithm"] == "torch"
    with pytest.raises(fastconv.UnsupportedError, match="im2col_gemm"):
        fastconv.conv_transpose2d(x, weight, bias, algorithm="im2col_gemm", **arguments)


X, W, B = values(2, 4, 5, 6), values(4, 3, 3, 3), values(3)
ROW, FILTER = values(2, 4, 9), values(6, 4, 3)


@pytest.mark.parametrize("function", ["conv_transpose2d", "conv1d"])
@pytest.mark.parametrize(
    "arguments",
    [
        {"input": values(2, 2)}, {"input": values(1, 2, 4, 5, 6)}, {"input": [1]}, {"weight": values(4, 3)},
        {"weight": None}, {"stride": 0}, {"stride": "1"}, {"stride": 1.5}, {"stride": (1, 2, 3)}, {"padding": -1},
        {"padding": "foo"}, {"dilation": 0}, {"groups": 3}, {"groups": 0}, {"groups": 1.0}, {"bias": values(5)},
        {"bias": values(3, 1)}, {"bias": 1}, {"output_padding": 1}, {"output_padding": -1}, {"output_padding": "1"},
        {"padding": 10}, {"stride": ()}, {"weight": "half"},
    ],
    ids=str,
)  # fmt: skip
def test_bad_input_raises_what_pytorch_raises(function: str, arguments: dict[str, Any]) -> None:
    if function == "conv1d" and ("output_padding" in arguments or arguments == {"padding": 10}):
        pytest.skip("an argument of conv_transpose2d")
    usual = {"input": X, "weight": W} if function == "conv_transpose2d" else {"input": ROW, "weight": FILTER}
    if arguments == {"weight": "half"}:
        arguments = {"weight": usual["weight"].half()}
    arguments = usual | arguments
    with pytest.raises((TypeError, RuntimeError)) as theirs:
        getattr(F, function)(**arguments)
    with pytest.raises((TypeError, RuntimeError)) as ours:
        getattr(fastconv, function)(**arguments)
    assert ours.type is theirs.type, (ours.value, theirs.value)


def test_messages_name_argument_value_and_what_was_expected() -> None:
    for arguments, text in (
        ({"output_padding": 2}, r"output_padding is \[2, 2\]; expected less than the stride \[1, 1\]"),
        ({"input": X[:, :3]}, r"input has C = 3 channels; expected weight.shape\[0\] = 4"),
        ({"bias": values(4)}, r"bias has shape \[4\]; expected \[3\]"),
    ):
        with pytest.raises(RuntimeError, match=text):
            fastconv.conv_transpose2d(**({"input": X, "weight": W} | arguments))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="algorithm is 'gemm'; expected one of"):
        fastconv.conv1d(ROW, FILTER, algorithm="gemm")


# --- Derivatives


def derivatives(function: Any, *tensors: Tensor) -> list[Tensor]:
    """First ones, and those of their squares."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = function(*leaves)
    first = torch.autograd.grad((y * torch.linspace(-1, 1, y.numel()).to(y).view(y.shape)).sum(), leaves,
                                create_graph=True)  # fmt: skip
    second = torch.autograd.grad(sum((g**2).sum() for g in first), leaves[:2])
    return [*first, *second]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("algorithm", ["auto", "im2col_gemm"])
@pytest.mark.parametrize("function", ["conv_transpose2d", "conv1d"])
def test_derivatives(function: str, algorithm: str, device: str) -> None:
    for case in TRANSPOSED[:-1] if function == "conv_transpose2d" else ROWS:
        make = transposed_case if function == "conv_transpose2d" else row_case
        *tensors, arguments = make(case, device)
        expected = derivatives(lambda *t: getattr(F, function)(*t, **arguments), *(t.double() for t in tensors))  # noqa: B023
        actual = derivatives(
            lambda *t: getattr(fastconv, function)(*t, **arguments, algorithm=algorithm, precision="fp32"),  # noqa: B023
            *tensors,
        )
        for ours, theirs in zip(actual, expected, strict=True):
            assert relative_error(ours.double(), theirs) < 1e-5, case


@pytest.mark.parametrize("device", DEVICES)
def test_transforms(device: str) -> None:
    x, weight, bias, arguments = transposed_case(TRANSPOSED[3], device)
    xs, weights, biases = (torch.stack([t, t.flip(0), 2 * t]) for t in (x, weight, bias))
    for algorithm in ("auto", "im2col_gemm"):

        def convolve(x: Tensor, w: Tensor, b: Tensor, algorithm: str = algorithm) -> Tensor:
            return fastconv.conv_transpose2d(x, w, b, **arguments, algorithm=algorithm, precision="fp32")

        for dims, args in (
            ((0, None, None), (xs, weight, bias)),
            ((0, None, 0), (xs, weight, biases)),
            ((None, 0, None), (x, weights, bias)),
            ((0, 0, 0), (xs, weights, biases)),
        ):
            batched = torch.func.vmap(convolve, dims)(*args)
            one = [t if d is None else t[1] for t, d in zip(args, dims, strict=True)]
            assert relative_error(batched[1], convolve(*one)) < 1e-6
    per_sample = torch.func.vmap(torch.func.grad(lambda w, x: convolve(x[None], w, bias).square().sum()), (None, 0))
    leaf = weight.clone().requires_grad_()
    (expected,) = torch.autograd.grad(convolve(x[1:2], leaf, bias).square().sum(), leaf)
    assert relative_error(per_sample(weight, x)[1], expected) < 1e-5


def test_forward_mode_is_pytorchs() -> None:
    x, weight, bias, arguments = transposed_case(TRANSPOSED[3], "cpu")
    both = [
        torch.func.jvp(lambda x: function(x, weight, bias, **arguments), (x,), (x,))[1]  # noqa: B023
        for function in (fastconv.conv_transpose2d, F.conv_transpose2d)
    ]
    assert relative_error(*both) < 1e-6


@pytest.mark.parametrize("device", DEVICES)
def test_operator_is_registered_as_pytorch_wants_it(device: str) -> None:
    x, weight, bias, _ = transposed_case(TRANSPOSED[3], device)
    for algorithm in ("auto", "im2col_gemm"):
        args = (
            x.requires_grad_(),
            weight.requires_grad_(),
            bias,
            [2, 2],
            [1, 1],
            [1, 1],
            [1, 1],
            1,
            algorithm,
            "fp32",
            4,
        )
        torch.library.opcheck(ops.conv_transpose2d_op, args)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_what_was_transposed_are_contiguous_as_pytorchs_are(device: str) -> None:
    x, layer = torch.randn(2, 21, 8, device=device).transpose(1, 2), nn.Conv1d(8, 12, 3, padding=1).to(device)
    swapped = copy.deepcopy(layer)
    fastconv.swap_(swapped)
    with torch.no_grad():
        for y in (swapped(x), fastconv.conv1d(x, layer.weight, layer.bias, padding=1)):
            assert y.stride() == layer(x).stride()
            assert relative_error(y, layer(x)) < 1e-5
        assert swapped(x[0]).stride() == layer(x[0]).stride()


# --- Layers


def layers(device: str, algorithm: str = "auto") -> list[tuple[nn.Module, nn.Module, Tensor]]:
    """PyTorch's layer, ours with the same parameters, and an input."""
    made = [
        (nn.ConvTranspose2d(8, 12, 3, 2, 1, 1), values(2, 8, 5, 6)),
        (nn.ConvTranspose2d(8, 12, (2, 3), 2, groups=4, bias=False, dilation=(1, 2)), values(2, 8, 5, 6)),
        (nn.Conv1d(8, 12, 3, padding="same"), values(2, 8, 21)),
        (nn.Conv1d(8, 12, 4, 2, 2, 1, 4, False, "circular"), values(8, 21)),
    ]
    result = []
    for layer, x in made:
        ours = copy.deepcopy(layer).to(device)
        fastconv.swap_(ours, algorithm=algorithm, precision="fp32")
        result.append((layer.to(device), ours, x.to(device)))
    return result


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("algorithm", ["auto", "im2col_gemm", "implicit_gemm"])
def test_layers_compute_the_same(algorithm: str, device: str) -> None:
    for theirs, ours, x in layers(device, algorithm):
        kind: Any = getattr(fastconv, type(theirs).__name__)
        assert type(ours) is kind
        own = kind(8, 12, theirs.kernel_size, bias=False, algorithm=algorithm, precision="fp32")
        assert (own.algorithm, own.precision, own.max_error) == (algorithm, "fp32", None)
        assert list(ours.state_dict()) == list(theirs.state_dict())
        copies = [ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))]
        for _ in range(2):
            expected = theirs(x).detach()
            for layer in copies:
                with torch.no_grad():
                    assert relative_error(layer(x), expected) < 1e-5
                assert relative_error(layer(x), expected) < 1e-5
                if theirs.padding_mode == "zeros":
                    assert layer.last_input_shape == tuple(x.shape)
                assert layer.last_algorithm == algorithm or algorithm == "auto"
            with torch.no_grad():  # nothing kept may be older than the weight
                for layer in [theirs, *copies]:
                    layer.weight.mul_(-2)
        for layer in (theirs, ours):
            layer(x).square().sum().backward()
        assert relative_error(ours.weight.grad, theirs.weight.grad) < 1e-5
        if theirs.bias is not None:
            assert relative_error(ours.bias.grad, theirs.bias.grad) < 1e-5


def test_output_size_of_a_transposed_layer() -> None:
    layer = fastconv.ConvTranspose2d(8, 4, 3, stride=2, padding=1)
    assert layer(X.repeat(1, 2, 1, 1), output_size=[10, 11]).shape == (2, 4, 10, 11)
    with pytest.raises(ValueError, match="output size"):
        layer(X.repeat(1, 2, 1, 1), output_size=[13, 11])
    with pytest.raises(ValueError, match="zeros"):
        fastconv.ConvTranspose2d(8, 4, 3, padding_mode="reflect")


@pytest.mark.parametrize("device", DEVICES)
def test_autocast(device: str) -> None:
    dtype = torch.bfloat16
    for theirs, ours, x in layers(device):
        with torch.autocast(device, dtype):
            y, expected = ours(x), theirs(x)
        assert y.dtype == expected.dtype == dtype
        assert relative_error(y, expected) <= 2 * limit(dtype, theirs.weight.numel())
        y.sum().backward()
        assert ours.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("device", DEVICES)
def test_compile_and_export(device: str) -> None:
    for theirs, ours, x in layers(device)[::2]:
        torch._dynamo.reset()
        compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend="aot_eager")
        for input in (x, torch.cat([x, x])):
            assert relative_error(compiled(input), theirs(input)) < 1e-5
        compiled(x).sum().backward()
        assert ours.weight.grad is not None
        program = torch.export.export(ours, (x,))
        assert relative_error(program.module()(x), theirs(x)) < 1e-5
        graph = torch.fx.symbolic_trace(nn.Sequential(ours))
        assert relative_error(graph(x), theirs(x)) < 1e-5


def test_operations_are_counted_as_pytorchs() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    for theirs, ours, x in layers("cpu"):
        counts = []
        for layer in (theirs, ours):
            with FlopCounterMode(display=False) as counter:
                layer(x.requires_grad_()).sum().backward()
            counts.append(counter.get_total_flops())
        assert counts[0] == counts[1] > 0


# --- Models


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(8, 16, 2, stride=2)
        self.norm = nn.BatchNorm2d(16)
        self.row = nn.Conv1d(16, 4, 3)
        self.odd = nn.ConvTranspose2d(4, 4, 3, dilation=3, output_padding=2)
        self.volume = nn.Conv3d(1, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.row(self.norm(self.up(self.down(x))).flatten(2))


def test_swap_and_its_report() -> None:
    model, x = Model().eval(), values(2, 3, 8, 8)
    expected = model(x)
    report = fastconv.swap_(model)
    assert codes(report) == ["", "", "", "output_padding", "not_served"]
    assert [row.kind for row in report.rows] == ["Conv2d", "ConvTranspose2d", "Conv1d", "ConvTranspose2d", "Conv3d"]
    assert (report.swapped, report.total) == (3, 5)
    assert "im2col_gemm" in report.rows[1].candidates
    assert (report.rows[1].shape, report.rows[3].output_padding) == ("8x16x2x2", (2, 2))
    assert "Conv3d" in report.rows[4].reason
    assert relative_error(model(x), expected) < 1e-5
    assert [row.last_input_shape for row in report.rows[1:3]] == [(2, 8, 4, 4), (2, 16, 64)]
    assert "for 2x16x64" in str(report)
    assert codes(fastconv.swap_(model))[:3] == ["already_swapped"] * 3
    report.undo()
    assert report.undone
    assert [type(model.up), type(model.row)] == [nn.ConvTranspose2d, nn.Conv1d]
    assert torch.equal(model(x), expected)
    with pytest.raises(fastconv.UnsupportedError, match="not_served"):
        fastconv.swap_(model, strict=True)


def test_a_named_algorithm_has_to_serve_every_convolution_of_a_transposed_one() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(8, 8, 3, padding=1), nn.ConvTranspose2d(8, 80, 5, 2), nn.Conv1d(8, 8, 3))
    report = fastconv.swap_(model, algorithm="winograd_f2", dry_run=True)
    assert [row.swapped for row in report.rows] == [True, False, False]


def test_fuse_names_what_stays_apart() -> None:
    model, x = Model().eval(), values(2, 3, 8, 8)
    fused = fastconv.fuse(model)
    assert relative_error(fused(x), model(x)) < 1e-5
    rows = {row.name: row for row in fused.report.rows}
    assert (rows["up"].fused, rows["up"].reason_code) == ("conv", "kind")
    assert "ConvTranspose2d" in rows["up"].reason
    assert (rows["row"].fused, rows["row"].reason_code, rows["row"].last_input_shape) == ("conv", "", (2, 16, 64))
    assert type(fused.up) is fastconv.ConvTranspose2d


@pytest.mark.parametrize("padding", ["same", "valid", 2])
def test_fuse_takes_every_padding_of_a_conv1d(padding: str | int) -> None:
    model, x = nn.Sequential(nn.Conv1d(4, 4, 3, padding=padding, dilation=2), nn.ReLU()).eval(), torch.randn(2, 4, 12)
    fused = fastconv.fuse(model)
    assert relative_error(fused(x), model(x)) < 1e-5
    assert [row.reason_code for row in fused.report.rows] == ["kind"]


def test_the_derivatives_stay_in_the_closed_system() -> None:
    x, weight, bias, _ = transposed_case(TRANSPOSED[3], "cpu")
    args = ([2, 2], [1, 1], [1, 1], 1, "auto", "fp32")
    y = transposed.conv_transpose2d(x, weight, None, [2, 2], [1, 1], [1, 1], [1, 1], 1, "im2col_gemm", "fp32", 4)
    assert relative_error(y, autograd.input_gradient(x, weight, list(y.shape), *args, 4)) < 1e-6
    assert bias.shape[0] == y.shape[1]
