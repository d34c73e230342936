"""The operator `max_pool2d`, of values alone, and the layer that `fuse` puts where a max-pool stays apart."""

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from apart import again, check_captured, check_traced, check_transforms, ran, special
from fusing import Function, check, fuse_quietly, hooked, parts, sequence
from harness import LAYOUTS, hostile
from layers import DEVICES
from rewriting import check as check_rewritten
from torch import Tensor, nn
from torch.library import opcheck

import fastconv
from fastconv import ops
from fastconv.nn import MaxPool2d
from fastconv.ops import pooling
from fastconv.rewrites import Asked
from fastconv.testing import poisoned_memory

pytestmark = pytest.mark.usefixtures("full_precision")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# kernel, stride, padding, dilation
WINDOWS: list[tuple[Any, Any, Any, Any]] = [
    (2, 2, 0, 1), (3, 2, 1, 1), (3, 2, 0, 1), (3, 1, 1, 1), (2, 1, 1, 1), (3, 3, 1, 1),
    (1, 1, 0, 1), (1, 2, 0, 1), (5, 1, 2, 1), (9, 1, 4, 1), (13, 1, 6, 1), (4, 3, 2, 1),
    ((2, 3), (3, 1), (1, 0), 1), ((3, 2), (2, 2), (1, 1), 1), ((1, 7), (1, 2), (0, 3), 1), ((7, 1), (2, 1), (3, 0), 1),
    (3, 2, 1, 2), (2, 2, 1, (2, 3)), ((3, 3), (1, 2), (1, 1), (1, 2)), (2, 1, 1, 5), (2, 7, 0, 1),
]  # fmt: skip
# Vectors of channels and none, one channel, one pixel, more than a block's tile of a row and of rows.
SIZES = [(2, 16, 13, 14), (1, 3, 9, 21), (3, 1, 15, 8), (2, 8, 1, 1), (1, 24, 2, 70), (5, 5, 6, 5), (1, 40, 33, 11)]


def windows(sizes: tuple[int, ...]) -> list[tuple[list[int], list[int], list[int], list[int], bool]]:
    """Those of WINDOWS that PyTorch takes for an input of these sizes."""
    found = []
    for window, ceil_mode in itertools.product(WINDOWS, (False, True)):
        pairs = [list(value) if isinstance(value, tuple) else [value, value] for value in window]
        try:
            F.max_pool2d(torch.empty(sizes, device="meta"), *pairs, ceil_mode=ceil_mode)
        except RuntimeError:
            continue
        found.append((*pairs, ceil_mode))
    return found  # type: ignore[return-value]


@pytest.mark.sanitize
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", SIZES)
def test_it_is_pytorchs(sizes: tuple[int, ...], layout: str, dtype: torch.dtype, device: str) -> None:
    """Values, NaN and infinities too, and memory format, whatever surrounds the input."""
    x = special(sizes, dtype)
    x[-1, -1] = -math.inf  # a map of that alone
    given = hostile(x.to(device), layout)
    tried = windows(sizes)
    assert len(tried) >= 8
    for window in tried:
        expected = F.max_pool2d(x.double(), *window[:4], ceil_mode=window[4])
        with poisoned_memory():
            y = pooling.max_pool2d(given, *window)
        torch.testing.assert_close(y.cpu().double(), expected, rtol=0, atol=0, equal_nan=True, msg=str(window))
        theirs = F.max_pool2d(given, *window[:4], ceil_mode=window[4])
        assert (y.dtype, y.stride()) == (dtype, theirs.stride()), window


@pytest.mark.sanitize
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_of_a_range_of_channels(dtype: torch.dtype, device: str) -> None:
    """Of a larger tensor in channels_last, with whole accesses and without, also in two passes."""
    for begin, c, channels in ((0, 16, 40), (8, 24, 40), (8, 5, 16), (3, 8, 16), (0, 6, 13)):
        whole = special((2, channels, 9, 14), dtype).to(device).contiguous(memory_format=torch.channels_last)
        x = whole[:, begin : begin + c]
        for kernel, stride, padding in ((2, 2, 0), (3, 2, 1), (4, 3, 2), (9, 1, 4)):
            window = *([each, each] for each in (kernel, stride, padding)), [1, 1], False
            expected = F.max_pool2d(x.double(), kernel, stride, padding)
            with poisoned_memory():
                y = pooling.max_pool2d(x, *window)
            torch.testing.assert_close(
                y.double(), expected, rtol=0, atol=0, equal_nan=True, msg=f"{begin} {c} {kernel}"
            )
            assert y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_left_to_pytorch(device: str) -> None:
    """Images without a batch, an empty batch, other dtypes."""
    arguments = [3, 3], [2, 2], [1, 1], [1, 1], True
    for x in (torch.randn(5, 9, 8), torch.randn(0, 5, 9, 8), torch.randn(2, 5, 9, 8, dtype=torch.float64)):
        x = x.to(device)
        expected = F.max_pool2d(x, *arguments[:4], ceil_mode=True)
        y = pooling.max_pool2d(x, *arguments)
        assert torch.equal(y, expected)
        assert y.dtype is expected.dtype
        assert torch.equal(MaxPool2d(3, 2, 1, ceil_mode=True)(x), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_more_images_than_a_grid_has_in_its_second_dimension(device: str) -> None:
    x = torch.randn(2, 40000, 3, 3, device=device)
    for format in LAYOUTS.values():
        given = x.to(memory_format=format)
        expected = F.max_pool2d(given, 3, 2, 1)
        assert torch.equal(pooling.max_pool2d(given, [3, 3], [2, 2], [1, 1], [1, 1], False), expected)


def test_bad_arguments() -> None:
    x = torch.randn(2, 3, 8, 9)
    good: dict[str, Any] = {
        "x": x, "kernel": [3, 3], "stride": [2, 2], "padding": [1, 1], "dilation": [1, 1], "ceil_mode": False,
    }  # fmt: skip
    for changed, message in (
        ({"kernel": [0, 3]}, r"kernel is \[0, 3\]; expected one or two integers of at least 1"),
        ({"kernel": [3, 3, 3]}, r"kernel is \[3, 3, 3\]; expected one or two integers"),
        ({"kernel": []}, r"kernel is \[\]; expected one or two integers"),
        ({"stride": [2, 0]}, r"stride is \[2, 0\]; expected one or two integers of at least 1"),
        ({"padding": [-1, 0]}, r"padding is \[-1, 0\]; expected one or two integers of at least 0"),
        ({"padding": [1, 2]}, r"padding is \[1, 2\]; expected at most half the kernel \[3, 3\]"),
        ({"dilation": [0, 1]}, r"dilation is \[0, 1\]; expected one or two integers of at least 1"),
        ({"x": x[0, 0]}, r"x has shape \[8, 9\]; expected \[N, C, H, W\] or \[C, H, W\]"),
        ({"kernel": [11, 3]}, r"x has shape \[2, 3, 8, 9\]; .* no window of kernel \[11, 3\]"),
        ({"dilation": [5, 1], "padding": [0, 0]}, r"no window of kernel \[3, 3\] and dilation \[5, 1\] fits"),
    ):
        with pytest.raises(RuntimeError, match=message):
            pooling.max_pool2d(**good | changed)
    x = torch.randn(2, 3, 9, 9)
    assert torch.equal(pooling.max_pool2d(x, [3], [], [1], [1], False), F.max_pool2d(x, 3, None, 1))


# --- What PyTorch makes of the operator and of the layer

CALL: tuple[Any, ...] = ([3, 3], [2, 2], [1, 1], [1, 1], False)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_and_transforms(device: str) -> None:
    forms = (lambda x: ops.max_pool2d_op(x, *CALL), MaxPool2d(3, 2, 1))
    check_transforms(forms, lambda x: F.max_pool2d(x, 3, 2, 1), torch.randn(2, 3, 9, 8, device=device), 4)


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str) -> None:
    for format in LAYOUTS.values():
        for size in (5, 16):
            x = torch.randn(2, size, 9, 8, device=device).to(memory_format=format)
            opcheck(ops.max_pool2d_op, (x, *CALL))
            opcheck(ops.max_pool2d_op, (x.clone().requires_grad_(), *CALL))


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_and_exported(device: str) -> None:
    layer, x = MaxPool2d(3, 2, 1, ceil_mode=True), torch.randn(2, 3, 9, 8, device=device)
    check_traced(layer, lambda x: ops.max_pool2d_op(x, *CALL[:4], True), x)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: CUDA graphs")
def test_in_a_cuda_graph() -> None:
    check_captured(MaxPool2d(3, 2, 1), lambda x: F.max_pool2d(x, 3, 2, 1), torch.randn(2, 8, 9, 8, device="cuda"))


@pytest.mark.parametrize("device", DEVICES)
def test_which_kernel_a_layer_runs(device: str) -> None:
    """Ours where it is faster: on a GPU, without a gradient, in the dtypes that it has."""
    layer = MaxPool2d(3, 2, 1)
    x = torch.randn(2, 8, 9, 8, device=device)
    assert ran("max_pool2d", lambda: layer(x)) == ("fastconv" if device == "cuda" else "aten")
    assert ran("max_pool2d", lambda: layer(x.clone().requires_grad_())) == "aten"
    assert ran("max_pool2d", lambda: MaxPool2d(3, 2, 1, return_indices=True)(x)) == "aten"


# --- fuse

POOLS: dict[str, Any] = {
    "module": lambda self, x: self.activation(F.relu(self.conv(x))),
    "function": lambda self, x: F.max_pool2d(F.relu(self.conv(x)), 3, stride=2, padding=1),
    "torch": lambda self, x: torch.max_pool2d(F.relu(self.conv(x)), 3, [2, 2], 1),
    "input as a keyword": lambda self, x: self.activation(input=F.relu(self.conv(x))),
    "behind a sum": lambda self, x: F.max_pool2d(F.relu(self.conv(x) + x), 2),
    "of the input": lambda self, x: F.relu(self.conv(F.max_pool2d(x, 2, 1, ceil_mode=True))),
    "read again": lambda self, x: F.max_pool2d(y := F.relu(self.conv(x)), 2).sum() * y,
}


@pytest.mark.parametrize("name", POOLS)
def test_fuse_makes_it_ours(name: str) -> None:
    model, x = Function(POOLS[name], nn.MaxPool2d(3, 2, 1)), torch.randn(2, 6, 8, 9)
    fused = check(model, x, strict=True)
    found = [module for module in fused.modules() if isinstance(module, nn.MaxPool2d)]
    expected = 0 if name == "input as a keyword" else 1
    assert [type(module) for module in found] == [MaxPool2d] * expected or not expected
    assert fused.report.pools == expected
    assert fused.report.left.get("alone", {}).get("max-pool", 0) == 0
    assert [each.report.pools for each in again(fused, x)] == [expected] * 3


def test_a_pool_that_several_calls_share_and_several_pools() -> None:
    class Pyramid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(6, 6, 3, padding=1)
            self.pool = nn.MaxPool2d(5, 1, 2)
            self.max_pool_1 = nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            y = self.pool(self.pool(x))
            return torch.cat([x, y, F.max_pool2d(x, 9, 1, 4), F.max_pool2d(x, 13, 1, 6)], 1) + self.max_pool_1

    fused = check(Pyramid(), torch.randn(2, 6, 8, 9))
    assert fused.report.pools == 4
    text = str(fused.report)
    assert "max-pools that stand alone: 4 ours, on a GPU" in text
    assert "left apart [alone]: 1 sum\n" in text
    assert '"pools": 4' in fused.report.to_json()
    assert sorted(name for name, m in fused.named_modules() if type(m) is MaxPool2d) == [
        "max_pool_2", "max_pool_3", "pool",
    ]  # fmt: skip


def test_pools_that_fuse_leaves() -> None:
    """One with hooks, and one that also says where its winners stood; of a class of its own, what its forward calls."""

    class Own(nn.MaxPool2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    x = torch.randn(2, 6, 8, 9)
    for pool, expected in ((hooked(nn.MaxPool2d(3, 2)), 0), (Own(3, 2), 1)):
        fused = check(sequence(nn.Conv2d(6, 6, 3), nn.ReLU(), pool), x)
        assert fused.report.pools == expected
        assert fused.report.left.get("alone", {}).get("max-pool", 0) == 1 - expected
    places = check(Function(lambda self, x: (y := F.max_pool2d(self.conv(x), 3, return_indices=True))[0] + y[1]), x)
    assert places.report.pools == 0
    inside = check(sequence(nn.Conv2d(6, 6, 3), nn.MaxPool2d(2)), x)
    assert (parts(inside), inside.report.pools) == (["conv+max_pool"], 0)
    assert "max-pools" not in str(inside.report)


def test_compile_leaves_pools_to_inductor() -> None:
    backend = check_rewritten(sequence(nn.Conv2d(6, 6, 3), nn.MaxPool2d(3, 2)), torch.randn(2, 6, 8, 9), Asked())
    assert backend.count(ops.max_pool2d_op) == 0


def test_a_layer_in_training_and_a_fused_model_with_a_gradient() -> None:
    fused = fuse_quietly(sequence(nn.Conv2d(6, 6, 3), nn.ReLU(), nn.MaxPool2d(3, 2)))
    x = torch.randn(2, 6, 8, 9, requires_grad=True)
    fused(x).sum().backward()
    assert x.grad is not None
    assert fastconv.fuse(sequence(nn.Conv2d(6, 6, 3), nn.MaxPool2d(3, 2)).eval()).report.pools == 1
