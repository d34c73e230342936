"""The gradients that are not a plain forward convolution: the weight gradient as a matrix product over the pixels, and
the input gradient with a stride, in turns. Against float64, like everything else."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch

import fastconv
from fastconv import _C, ops, testing

NAME = "implicit_gemm"  # the algorithm whose weight gradient serves the most
FAMILY = {row["name"]: row["family"] for row in _C.algorithms()}
# Those of the registry that have a weight gradient, and a kernel of ours for it.
NAMES = [row["algorithm"] for row in _C.weight_gradients(_C.ConvProblem(1, 8, 8, 8, 8, 3, 3), _C.cpu_device(1))
         if FAMILY[row["algorithm"]] != "library"]  # fmt: skip
FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
# Of sums of many independent products (docs/concepts/numerics.md, "The weight gradient"); half types end with one
# rounding.
LIMIT = {"fp32": 2e-6, "tf32": 1e-3, "fp16": 1e-3, "bf16": 8e-3}
DTYPE = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    n: int
    c: int
    h: int
    w: int
    k: int
    r: int
    s: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    groups: int = 1

    @property
    def geometry(self) -> tuple[list[int], list[int], list[int], int]:
        return [self.stride] * 2, [self.padding] * 2, [self.dilation] * 2, self.groups

    @property
    def weight_size(self) -> list[int]:
        return [self.k, self.c // self.groups, self.r, self.s]

    def __str__(self) -> str:
        return "{}x{}x{}x{}-{}-{}x{}-s{}p{}d{}g{}".format(*vars(self).values())


CASES = [
    Case(1, 1, 1, 1, 1, 1, 1),
    Case(2, 3, 13, 13, 7, 3, 3, padding=1),  # few channels: taps become channels
    Case(2, 64, 16, 16, 72, 3, 3, padding=1),  # neighbouring taps share their pixels
    Case(3, 32, 7, 7, 48, 3, 3, padding=1),  # images share a chunk
    Case(19, 40, 1, 1, 33, 1, 1),
    Case(1, 65, 9, 33, 130, 1, 3, padding=1),
    Case(1, 32, 12, 13, 64, 3, 3, stride=2, padding=1),
    Case(2, 30, 14, 14, 8, 5, 5, stride=3, padding=2),
    Case(1, 32, 20, 17, 32, 3, 3, padding=2, dilation=2),
    Case(1, 32, 9, 40, 16, 2, 7, padding=3),
    Case(1, 26, 9, 9, 1, 4, 1, dilation=2),
    Case(3, 5, 4, 9, 6, 3, 3, padding=2),
    Case(1, 70, 3, 3, 130, 3, 3),
    Case(3, 33, 33, 7, 65, 3, 3, padding=1),
    Case(1, 1, 3, 3, 1, 3, 3),
    Case(3, 33, 13, 9, 33, 3, 3, padding=1, groups=33),  # depthwise: lanes without a channel, a strip without rows
    Case(2, 70, 14, 33, 70, 3, 3, stride=2, padding=1, groups=70),
    Case(2, 32, 7, 7, 32, 5, 5, padding=2, groups=32),
    Case(1, 40, 15, 8, 40, 5, 5, stride=2, padding=3, groups=40),
    Case(5, 5, 9, 14, 5, 7, 7, padding=3, groups=5),
    Case(1, 34, 21, 10, 34, 7, 7, stride=2, padding=3, groups=34),
    Case(3, 72, 9, 7, 136, 1, 1),  # float32 in NHWC is converted on chip, in chunks that know nothing of images' ends
    Case(2, 264, 13, 11, 64, 1, 1),
    Case(40, 64, 3, 4, 256, 1, 1),  # several images to a chunk
    Case(1, 24, 5, 5, 8, 1, 1),
    Case(3, 65, 13, 13, 64, 3, 3, padding=1),  # an odd number of elements before the gradient's
]
POINTWISE = CASES[-5:-1]


def serves(name: str, case: Case, cls: str = "fp32") -> bool:
    """Whether the algorithm has a weight gradient for the case."""
    if FAMILY[name] == "direct":  # depthwise
        return case.groups == case.c == case.k and case.r == case.s and case.r in (3, 5, 7)
    if name == "im2col_gemm":
        return (case.r, case.s, case.stride, case.padding, case.groups) == (1, 1, 1, 0, 1)
    plain = (case.r, case.s, case.stride, case.dilation) == (3, 3, 1, 1)
    return case.groups == 1 and (name == NAME or (plain and case.padding <= 2 and cls == "fp32"))


def named(cases: list[Case]) -> list[tuple[str, Case]]:
    return [(name, case) for name in NAMES for case in cases if serves(name, case)]


def operands(
    case: Case, dtype: torch.dtype, layout: str, device: str, grad_scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [N, C, H, W] as behind a ReLU, and dY [N, K, P, Q]."""
    p, q = ops.output_size((case.h, case.w), (case.r, case.s), *case.geometry[:3])
    x = torch.randn(case.n, case.c, case.h, case.w, device=device).relu()
    grad = torch.randn(case.n, case.k, p, q, device=device) * grad_scale
    return tuple(t.to(dtype).contiguous(memory_format=FORMATS[layout]) for t in (x, grad))  # type: ignore[return-value]


def exact(x: torch.Tensor, grad: torch.Tensor, case: Case) -> torch.Tensor:
    like = torch.empty(case.weight_size, dtype=torch.float64)
    return torch.ops.aten.convolution_backward(
        grad.double().cpu(), x.double().cpu(), like, None, *case.geometry[:3], False, [0, 0], case.groups,
        [False, True, False],
    )[1]  # fmt: skip


def own(x: torch.Tensor, grad: torch.Tensor, case: Case, cls: str, layout: str, name: str = NAME) -> torch.Tensor:
    """Our weight gradient; skips, naming the reason, where the device has none."""
    precision = cls if cls in ("fp32", "tf32") else "fp32"
    arguments = (x, grad, case.weight_size, *case.geometry, layout == "nhwc", name, precision)
    reason = ops.weight_gradient_reason(*arguments)
    if reason:
        assert reason.startswith("device"), reason
        pytest.skip(reason)
    return ops.weight_gradient_kernel_op(*arguments)


@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("name", "case", "cls"),
    [(name, case, cls) for name in NAMES for case in CASES for cls in LIMIT if serves(name, case, cls)],
    ids=str,
)
@pytest.mark.parametrize("layout", FORMATS)
def test_weight_gradient(name, case, cls, layout, device):
    x, grad = operands(case, DTYPE[cls], layout, device)
    x, grad = testing.nan_surrounded(x), testing.nan_surrounded(grad)
    with testing.poisoned_memory():
        dw = own(x, grad, case, cls, layout, name)
    assert dw.is_contiguous(memory_format=FORMATS[layout])
    errors = testing.errors(dw.cpu(), exact(x, grad, case))
    assert errors.relative_l2 <= LIMIT[cls], errors


@pytest.mark.parametrize(("name", "case"), named([CASES[2], CASES[3], CASES[16], *POINTWISE]), ids=str)
def test_weight_gradient_is_the_same_every_time(name, case, device):
    x, grad = operands(case, torch.float32, "nhwc", device)
    results = [own(x, grad, case, "fp32", "nhwc", name) for _ in range(3)]
    assert all(torch.equal(results[0], result) for result in results[1:])


@pytest.mark.parametrize(("name", "case"), named([CASES[1], CASES[3], CASES[6], CASES[15], *POINTWISE[:3]]), ids=str)
@pytest.mark.parametrize(("of_x", "of_grad"), [(1e-30, 1e25), (1e30, 1e-30), (1e-15, 1e-15), (1e18, 1e18)])
@pytest.mark.parametrize("layout", FORMATS)
def test_weight_gradient_at_any_magnitude(name, case, of_x, of_grad, layout, device):
    x, grad = operands(case, torch.float32, layout, device)
    x, grad = x * of_x, grad * of_grad
    errors = testing.errors(own(x, grad, case, "fp32", layout, name).cpu(), exact(x, grad, case))
    assert errors.relative_l2 <= LIMIT["fp32"], errors


@pytest.mark.parametrize(("name", "case"), named([CASES[2], CASES[3], CASES[6], CASES[15], *POINTWISE[:3]]), ids=str)
def test_weight_gradient_of_images_of_unlike_magnitude(name, case, device):
    """Images whose x and dY differ by many powers of ten, but whose products do not: each has its own scales. One is
    zero, its dY large, and one has a value that no sample may find."""
    case = Case(5, *list(vars(case).values())[1:])
    x, grad = operands(case, torch.float32, "nhwc", device)
    factors = torch.tensor([1.0, 1e12, 1e-18, 1e20, 1e-3], device=device)[:, None, None, None]
    x, grad = x * factors, grad / factors
    x[3], grad[3] = 0.0, 1e30
    x[0, 1, 2, 3] = 1e5
    x, grad = (t.contiguous(memory_format=torch.channels_last) for t in (x, grad))
    errors = testing.errors(own(x, grad, case, "fp32", "nhwc", name).cpu(), exact(x, grad, case))
    assert errors.relative_l2 <= LIMIT["fp32"], errors


def test_weight_gradient_says_why_not(device):
    case = Case(1, 4, 5, 5, 6, 3, 3)
    x, grad = operands(case, torch.float32, "nchw", device)
    rest = ([1, 1], [0, 0], [1, 1])

    def reason(algorithm="auto", precision="fp32", groups=1, x=x, grad=grad):
        size = [6, 4 // groups, 3, 3]
        return ops.weight_gradient_reason(x, grad, size, *rest, groups, False, algorithm, precision)

    assert reason("torch").startswith("algorithm: ")
    assert reason(NAME, "ieee").startswith("precision: ")
    assert reason(NAME, x=x.double(), grad=grad.double()).startswith("dtype: ")
    assert reason(NAME, groups=2).startswith("groups: ")
    with pytest.raises(RuntimeError, match=r"groups is 2"):
        ops.weight_gradient_kernel_op(x, grad, [6, 2, 3, 3], *rest, 2, False, NAME, "fp32")
    with pytest.raises((RuntimeError, ValueError), match=r"grad has shape \[1, 6, 2, 3\]"):
        reason(grad=grad[:, :, :2])


def test_choice_for_a_gpu_that_is_not_there():
    def choose(algorithm="auto", device=None, **changes):
        arguments = {
            "n": 64,
            "c": 256,
            "h": 56,
            "w": 56,
            "k": 256,
            "r": 3,
            "s": 3,
            "padding": (1, 1),
            "precision": "fp32",
        }
        problem = _C.ConvProblem(**({"precision": "fp32"} | arguments | changes))
        return _C.choose_weight_gradient(algorithm, problem, device or _C.h200_device())

    row = choose()
    assert (row["algorithm"], row["reason"]) == ("winograd_f4", "")
    assert row["workspace_bytes"] > 2 * 2.25 * 64 * 256 * 56 * 56 * 4  # both operands transformed, two halves a value
    assert choose(stride=(2, 2))["algorithm"] == NAME
    assert choose(c=64, h=224, w=224, k=64)["algorithm"] == NAME  # the transforms would cost more than they save
    assert choose(algorithm=NAME)["workspace_bytes"] > 2 * 64 * 256 * 56 * 56 * 4  # both operands as two halves a value
    assert choose(layout="nhwc", dtype="float16", algorithm=NAME)["workspace_bytes"] < 100 << 20  # read where they lie
    pointwise = choose(k=64, r=1, s=1, padding=(0, 0), layout="nhwc")
    assert "converted on chip" in pointwise["config"]
    assert pointwise["workspace_bytes"] < 10 << 20  # partial sums alone
    depthwise = {"k": 256, "groups": 256}
    assert choose(**depthwise, layout="nchw")["algorithm"] == "direct_tiled"
    assert choose(**depthwise, layout="nhwc", r=7, s=7, padding=(3, 3))["algorithm"] == "direct_tiled"
    ampere = _C.h200_device()
    ampere.compute_capability = 80
    for changes, code in (
        ({"algorithm": "torch"}, "algorithm"),
        ({"groups": 2}, "groups"),
        ({**depthwise, "dtype": "float16", "layout": "nhwc", "r": 7, "s": 7, "padding": (3, 3)}, "cost"),
        ({"stride": (9, 1)}, "stride"),
        ({"n": 70000, "h": 3, "w": 3}, "size"),
        ({"precision": "ieee"}, "precision"),
        ({"device": ampere}, "device"),
        ({"c": 3, "h": 224, "w": 224, "k": 64}, "cost"),  # first layers: cuDNN is faster
        ({"device": _C.cpu_device(8)}, "cost"),
    ):
        row = choose(**changes)
        assert (row["algorithm"], row["code"]) == ("torch", code)
        assert row["reason"]


def test_opcheck_of_the_kernel(device):
    case = CASES[6]
    for layout in FORMATS:
        x, grad = operands(case, torch.float32, layout, device)
        own(x, grad, case, "fp32", layout)
        arguments = (x, grad, case.weight_size, *case.geometry, layout == "nhwc", NAME, "fp32")
        torch.library.opcheck(ops.weight_gradient_kernel_op, arguments)


@pytest.mark.parametrize(("name", "case"), named([CASES[1], CASES[6], CASES[8]]), ids=str)
def test_training_by_name(name, case, device):
    """First and second derivatives of a convolution that was asked for by name."""
    x = torch.randn(case.n, case.c, case.h, case.w, device=device, requires_grad=True)
    w = torch.randn(case.weight_size, device=device, requires_grad=True)
    doubles = [t.detach().double().cpu().requires_grad_() for t in (x, w)]
    stride, padding, dilation, groups = case.geometry
    y = fastconv.conv2d(x, w, None, stride, padding, dilation, groups, algorithm=name, precision="fp32")
    z = torch.nn.functional.conv2d(*doubles, None, stride, padding, dilation, groups)
    cotangent = torch.randn_like(y)
    found = torch.autograd.grad(y, (x, w), cotangent, create_graph=True)
    wanted = torch.autograd.grad(z, doubles, cotangent.double().cpu(), create_graph=True)
    directions = [torch.randn_like(t) for t in found]
    second = torch.autograd.grad(found, (x, w), directions)
    expected = torch.autograd.grad(wanted, doubles, [t.double().cpu() for t in directions])
    for a, b in zip((*found, *second), (*wanted, *expected), strict=True):
        assert testing.errors(a.detach().cpu(), b.detach()).relative_l2 < 5e-6


def test_input_gradient_with_any_stride(device):
    """Every residue of padding and size: rows without taps, rows beyond the last window, padding beyond the kernel."""
    options = itertools.product((1, 5, 8), (1, 2, 3, 5), (1, 2, 3), (0, 1, 3, 6), (1, 2, 3), (1, 2))
    tried = 0
    for size, kernel, stride, padding, dilation, groups in options:
        if size + 2 * padding < dilation * (kernel - 1) + 1:
            continue
        geometry = ([stride, 2], [padding, 1], [dilation, 1], groups)
        x = torch.randn(2, 4, size, size + 1, device=device, dtype=torch.float64, requires_grad=True)
        w = torch.randn(6, 4 // groups, kernel, 2, device=device, dtype=torch.float64)
        y = torch.nn.functional.conv2d(x, w, None, *geometry)
        grad = torch.randn_like(y)
        (expected,) = torch.autograd.grad(y, x, grad)
        # float64, so that nothing rounds: the convolutions inside are PyTorch's
        found = ops.input_gradient_op(grad, w, list(x.shape), *geometry, "direct", "fp32", 4)
        assert torch.allclose(found, expected), (size, kernel, geometry)
        tried += 1
    assert tried > 300


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(7, 2, 3), (11, 4, 2), (3, 2, 1)])
@pytest.mark.parametrize("c", [1, 3, 7])
def test_input_gradient_of_few_channels_with_a_stride_is_one_convolution(device, c, kernel, stride, padding):
    """However many zeros its filters have: the phases are filters of it."""
    geometry = ([stride] * 2, [padding] * 2, [1, 1], 1)
    problem = _C.ConvProblem(2, c, 37, 45, 5, kernel, kernel, stride=(stride,) * 2, padding=(padding,) * 2)
    planned = _C.choose_input_gradient("direct", problem, _C.cpu_device(1))
    assert (planned["method"], planned["convolutions"]) == ("together", 1)
    x = torch.randn(2, c, 37, 45, dtype=torch.float64, requires_grad=True)
    w = torch.randn(5, c, kernel, kernel, device=device)
    y = torch.nn.functional.conv2d(x, w.cpu().double(), None, *geometry)
    grad = torch.randn(y.shape, device=device)
    (expected,) = torch.autograd.grad(y, x, grad.cpu().double())
    for memory_format in (torch.contiguous_format, torch.channels_last):
        found = ops.input_gradient_by_convolutions(
            grad.to(memory_format=memory_format), w, None, list(x.shape), *geometry, True, "direct", "fp32"
        )
        assert testing.errors(found.cpu(), expected).relative_l2 < 5e-6


@pytest.mark.sanitize
@pytest.mark.parametrize("case", [*POINTWISE[:2], Case(2, 33, 5, 3, 19, 1, 1), Case(19, 40, 1, 1, 8, 1, 1)], ids=str)
@pytest.mark.parametrize("cls", LIMIT)
@pytest.mark.parametrize("layout", FORMATS)
def test_input_gradient_as_one_product(case, cls, layout, device):
    """Whatever the format of the filter, which is read as it lies; on a CPU half types convolve the flipped one."""
    _, grad = operands(case, DTYPE[cls], layout, device)
    weight = torch.randn(case.weight_size, device=device).to(DTYPE[cls])
    grad, precision = testing.nan_surrounded(grad), cls if cls in ("fp32", "tf32") else "fp32"
    expected = torch.einsum("nkpq,kc->ncpq", grad.double().cpu(), weight.double().cpu()[:, :, 0, 0])
    for its in (
        weight,
        weight.contiguous(memory_format=torch.channels_last),
        weight.transpose(0, 1).contiguous().transpose(0, 1),
    ):
        with testing.poisoned_memory():
            dx = ops.input_gradient_by_convolutions(
                grad, testing.nan_surrounded(its), None, (case.n, case.c, case.h, case.w), *case.geometry, False,
                "im2col_gemm", precision,
            )  # fmt: skip
        assert fastconv.last_call()["algorithm"] == "im2col_gemm"
        assert dx.is_contiguous(memory_format=FORMATS[layout])
        errors = testing.errors(dx.cpu(), expected)
        assert errors.relative_l2 <= LIMIT[cls], errors


def test_a_bias_of_a_transposed_1x1_convolution_is_added(device):
    x, weight = torch.randn(2, 24, 5, 5, device=device), torch.randn(24, 16, 1, 1, device=device)
    bias = torch.randn(16, device=device)
    y = ops.input_gradient_by_convolutions(x, weight, bias, (2, 16, 5, 5), [1, 1], [0, 0], [1, 1], 1, False,
                                           "im2col_gemm", "fp32")  # fmt: skip
    expected = torch.nn.functional.conv_transpose2d(x.double(), weight.double(), bias.double())
    assert testing.errors(y.cpu(), expected.cpu()).relative_l2 <= LIMIT["fp32"]
