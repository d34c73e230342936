"""The operators `upsample_nearest2d` and `upsample_nearest2d_into`, and the layer that `fuse` puts where pixels are
repeated."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from apart import again, check_captured, check_traced, check_transforms, ran, special
from fusing import Function, check, fuse_quietly, hooked, sequence
from harness import LAYOUTS, hostile
from layers import DEVICES
from rewriting import check as check_rewritten
from torch import Tensor, nn
from torch.library import opcheck

from fastconv import ops
from fastconv.nn import Upsample
from fastconv.ops import upsampling
from fastconv.rewrites import Asked
from fastconv.testing import poisoned_memory

pytestmark = pytest.mark.usefixtures("full_precision")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SCALES = [(2, 2), (1, 1), (3, 3), (4, 4), (1, 2), (3, 1), (2, 5), (8, 7)]
# Vectors of channels and none, one channel, one pixel, one row and column, more than a block's threads in a row.
SIZES = [(2, 16, 13, 14), (1, 3, 9, 21), (3, 1, 15, 8), (2, 8, 1, 1), (1, 24, 2, 70), (5, 5, 6, 1), (1, 40, 33, 11)]


def bits(x: Tensor) -> Tensor:
    return x.cpu().contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def pytorchs(x: Tensor, scale_h: int, scale_w: int) -> Tensor:
    return F.interpolate(x, scale_factor=(float(scale_h), float(scale_w)))


def repeated(x: Tensor, scale_h: int, scale_w: int) -> Tensor:
    return x.repeat_interleave(scale_h, 2).repeat_interleave(scale_w, 3)


@pytest.mark.sanitize
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", SIZES)
def test_it_is_pytorchs(sizes: tuple[int, ...], layout: str, dtype: torch.dtype, device: str) -> None:
    """Every bit, and memory format, whatever surrounds the input and wherever it begins."""
    x = special(sizes, dtype)
    for scales, offset in itertools.product(SCALES, (0, 1)):
        given = hostile(x.to(device), layout, offset)
        with poisoned_memory():
            y = upsampling.upsample_nearest2d(given, *scales)
        assert torch.equal(bits(y), bits(repeated(x, *scales))), (scales, offset)
        theirs = pytorchs(given, *scales)
        assert torch.equal(bits(y), bits(theirs))
        assert (y.dtype, y.stride()) == (dtype, theirs.stride())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("c", [8, 24, 5, 1])
def test_ranges_of_channels(c: int, dtype: torch.dtype, device: str) -> None:
    """Of input and output, aligned to accesses of 16 bytes and not; what lies around the output stays what it was."""
    for scales, before, after in itertools.product(((2, 2), (1, 1), (3, 1)), (0, 8, 3), (0, 16, 2)):
        around = special((2, before + c + after, 7, 5), dtype).to(device).contiguous(memory_format=torch.channels_last)
        x = around[:, before : before + c]
        shape = (2, after + c + before, 7 * scales[0], 5 * scales[1])
        for format in LAYOUTS.values():
            whole = special(shape, dtype).to(device).contiguous(memory_format=format)
            expected = whole.clone()
            expected[:, after : after + c] = repeated(x, *scales)
            with poisoned_memory():
                upsampling.upsample_nearest2d_into(whole[:, after : after + c], x, *scales)
            assert torch.equal(bits(whole), bits(expected)), (scales, before, after)
        assert torch.equal(bits(upsampling.upsample_nearest2d(x, *scales)), bits(repeated(x, *scales)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [5, 7, 25, 41, 47, 55, 61, 83])
def test_where_pytorch_rounds_to_other_pixels_so_do_we(scale: int, device: str) -> None:
    """41 * float32(1 / 41) is less than one: PyTorch reads pixel 0 for pixel 41."""
    x = torch.randn(1, 8, 3, 9, device=device).contiguous(memory_format=torch.channels_last)
    for scales in ((1, scale), (scale, 2)):
        assert torch.equal(upsampling.upsample_nearest2d(x, *scales), pytorchs(x, *scales))
    assert torch.equal(Upsample(scale_factor=scale)(x), F.interpolate(x, scale_factor=scale))


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_left_to_pytorch(device: str) -> None:
    """An empty batch, other dtypes; of the layer other dimensions, sizes, factors and modes."""
    for x in (torch.randn(0, 8, 9, 8), torch.randn(2, 8, 9, 8, dtype=torch.float64)):
        x = x.to(device, memory_format=torch.channels_last)
        y = upsampling.upsample_nearest2d(x, 2, 3)
        assert torch.equal(y, pytorchs(x, 2, 3))
        assert (y.dtype, y.stride()) == (x.dtype, pytorchs(x, 2, 3).stride())
        out = torch.empty_like(y)
        upsampling.upsample_nearest2d_into(out, x, 2, 3)
        assert torch.equal(out, y)
    x = torch.randn(2, 8, 9, 8, device=device).contiguous(memory_format=torch.channels_last)
    arguments: tuple[dict[str, Any], ...] = (
        {"scale_factor": 2}, {"scale_factor": (2.0, 3.0)}, {"scale_factor": 1.5}, {"scale_factor": (1.5, 2)},
        {"size": (18, 16)}, {"size": 20}, {"scale_factor": 2, "mode": "nearest-exact"},
        {"scale_factor": 2, "mode": "bilinear", "align_corners": True}, {"scale_factor": 2.0, "mode": "bicubic"},
        {"scale_factor": 0.5}, {"scale_factor": 2, "recompute_scale_factor": True},
    )  # fmt: skip
    for each in arguments:
        assert torch.equal(Upsample(**each)(x), F.interpolate(x, **each)), each
    for x in (torch.randn(2, 3, 5, device=device), torch.randn(2, 3, 5, 2, 3, device=device)):
        assert torch.equal(Upsample(scale_factor=2)(x), F.interpolate(x, scale_factor=2))


@pytest.mark.parametrize("device", DEVICES)
def test_more_rows_than_a_grid_has_in_its_second_dimension(device: str) -> None:
    x = torch.randn(3, 8, 30000, 1, device=device).contiguous(memory_format=torch.channels_last)
    assert torch.equal(upsampling.upsample_nearest2d(x, 2, 2), repeated(x, 2, 2))


def test_bad_arguments() -> None:
    x = torch.randn(2, 3, 8, 9)
    out = torch.empty(2, 3, 16, 27)
    for arguments, message in (
        ((x[0], 2, 3), r"x has shape \[3, 8, 9\]; expected \[N, C, H, W\]"),
        ((x, 0, 3), r"scale_h is 0; expected 1 to 2147483647"),
        ((x, 2, -1), r"scale_w is -1; expected 1 to 2147483647"),
        ((x, 2, 2**31), r"scale_w is 2147483648; expected 1 to 2147483647"),
    ):
        for call in (upsampling.upsample_nearest2d, lambda *args: upsampling.upsample_nearest2d_into(out, *args)):
            with pytest.raises(RuntimeError, match=message):
                call(*arguments)
    for other, message in (
        (out[:, :2], r"out has shape \[2, 2, 16, 27\]; expected \[2, 3, 16, 27\]"),
        (out.half(), "out is float16; expected x's float32"),
    ):
        with pytest.raises(RuntimeError, match=message):
            upsampling.upsample_nearest2d_into(other, x, 2, 3)


# --- What PyTorch makes of the operator and of the layer


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_and_transforms(device: str) -> None:
    x = torch.randn(2, 3, 5, 4, device=device).contiguous(memory_format=torch.channels_last)
    forms = (lambda x: ops.upsample_nearest2d_op(x, 2, 3), Upsample(scale_factor=(2, 3)))
    check_transforms(forms, lambda x: pytorchs(x, 2, 3), x, 2)


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str) -> None:
    for format in LAYOUTS.values():
        for size in (5, 16):
            x = torch.randn(2, size, 9, 8, device=device).contiguous(memory_format=format)
            opcheck(ops.upsample_nearest2d_op, (x, 2, 3))
            opcheck(ops.upsample_nearest2d_op, (x.clone().requires_grad_(), 2, 3))


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_and_exported(device: str) -> None:
    x = torch.randn(2, 8, 9, 8, device=device).contiguous(memory_format=torch.channels_last)
    check_traced(Upsample(scale_factor=(2, 3)), lambda x: ops.upsample_nearest2d_op(x, 2, 3), x)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: CUDA graphs")
def test_in_a_cuda_graph() -> None:
    x = torch.randn(2, 8, 9, 8, device="cuda").contiguous(memory_format=torch.channels_last)
    check_captured(Upsample(scale_factor=2), lambda x: F.interpolate(x, scale_factor=2), x)


@pytest.mark.parametrize("device", DEVICES)
def test_which_kernel_a_layer_runs(device: str) -> None:
    """Ours where it is faster: on a GPU in channels_last, without a gradient, in the dtypes that it has."""
    layer = Upsample(scale_factor=2)
    x = torch.randn(2, 8, 9, 8, device=device).contiguous(memory_format=torch.channels_last)
    assert ran("upsample", lambda: layer(x)) == ("fastconv" if device == "cuda" else "aten")
    assert ran("upsample", lambda: layer(x.clone().requires_grad_())) == "aten"
    assert ran("upsample", lambda: layer(x.contiguous())) == "aten"
    assert ran("upsample", lambda: Upsample(scale_factor=1.5)(x)) == "aten"
    assert ran("upsample", lambda: Upsample(size=(18, 16))(x)) == "aten"


# --- fuse

UPSAMPLINGS: dict[str, Any] = {
    "module": lambda self, x: self.activation(F.relu(self.conv(x))),
    "function": lambda self, x: F.interpolate(self.conv(x), scale_factor=2),
    "all arguments": lambda self, x: F.interpolate(self.conv(x), None, (2.0, 3.0), "nearest", None, False),
    "of the input": lambda self, x: F.relu(self.conv(F.interpolate(x, scale_factor=[2, 1], mode="nearest"))),
    "read again": lambda self, x: F.interpolate(y := F.relu(self.conv(x)), scale_factor=3).sum() * y,
}
OTHERS: dict[str, Any] = {
    "a size": lambda self, x: F.interpolate(self.conv(x), (16, 18)),
    "a size that is computed": lambda self, x: F.interpolate(self.conv(x), x.shape[2:]),
    "no integer": lambda self, x: F.interpolate(self.conv(x), scale_factor=(2, 1.5)),
    "smaller": lambda self, x: F.interpolate(self.conv(x), scale_factor=0.5),
    "another mode": lambda self, x: F.interpolate(self.conv(x), scale_factor=2, mode="bilinear"),
    "computed again": lambda self, x: F.interpolate(self.conv(x), scale_factor=2, recompute_scale_factor=True),
    "input as a keyword": lambda self, x: self.activation(input=F.relu(self.conv(x))),
}


@pytest.mark.parametrize("name", [*UPSAMPLINGS, *OTHERS])
def test_fuse_makes_it_ours(name: str) -> None:
    expected = int(name in UPSAMPLINGS)
    forward = (UPSAMPLINGS | OTHERS)[name]
    for layer in (nn.Upsample(scale_factor=2), nn.UpsamplingNearest2d(scale_factor=(2, 2))):
        fused = check(Function(forward, layer), torch.randn(2, 6, 8, 9), strict=True)
        assert sum(type(module) is Upsample for module in fused.modules()) == expected
        assert fused.report.upsamplings == expected
        assert [each.report.upsamplings for each in again(fused, torch.randn(2, 6, 8, 9))] == [expected] * 3


def test_several_and_what_the_report_says() -> None:
    class Pyramid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(6, 6, 3, padding=1)
            self.up = nn.Upsample(scale_factor=2, mode="nearest")
            self.upsample_1 = nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            y = self.up(self.up(self.conv(x)))
            return y + F.interpolate(x, scale_factor=4) + self.upsample_1

    fused = check(Pyramid(), torch.randn(2, 6, 8, 9))
    assert fused.report.upsamplings == 3
    assert "upsamplings by integers: 3 ours, on a GPU in channels_last" in str(fused.report)
    assert '"upsamplings": 3' in fused.report.to_json()
    assert sorted(name for name, m in fused.named_modules() if type(m) is Upsample) == ["up", "upsample_2"]


@pytest.mark.parametrize("shape", [(2, 6, 7), (6, 7, 8), (2, 6, 3, 4, 5)])
def test_one_number_is_for_any_dimensions(shape: tuple[int, ...]) -> None:
    """A model's input tells how many there are: rows, an unbatched image, a volume."""
    convolution = nn.Conv3d if len(shape) == 5 else nn.Conv2d if shape[0] == 6 else nn.Conv1d
    for layer in (nn.Upsample(scale_factor=2), nn.Upsample(scale_factor=2.0)):
        fused = check(sequence(convolution(6, 6, 1), nn.ReLU(), layer, convolution(6, 6, 1)), torch.randn(shape))
        assert fused.report.upsamplings == 1


def test_upsamplings_that_fuse_leaves() -> None:
    """One with hooks; of a class of its own, what its forward calls."""

    class Own(nn.Upsample):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    for layer, expected in ((hooked(nn.Upsample(scale_factor=2)), 0), (Own(scale_factor=2), 1)):
        fused = check(sequence(nn.Conv2d(6, 6, 3), nn.ReLU(), layer), torch.randn(2, 6, 8, 9))
        assert fused.report.upsamplings == expected
    assert "upsamplings" not in str(check(sequence(nn.Conv2d(6, 6, 3)), torch.randn(2, 6, 8, 9)).report)


def test_compile_leaves_upsamplings_to_inductor() -> None:
    model = sequence(nn.Conv2d(6, 6, 3), nn.Upsample(scale_factor=2))
    backend = check_rewritten(model, torch.randn(2, 6, 8, 9), Asked())
    assert backend.count(ops.upsample_nearest2d_op) == 0


def test_a_fused_model_with_a_gradient() -> None:
    fused = fuse_quietly(sequence(nn.Conv2d(6, 6, 3), nn.ReLU(), nn.Upsample(scale_factor=2)))
    x = torch.randn(2, 6, 8, 9, requires_grad=True)
    fused(x).sum().backward()
    assert x.grad is not None
