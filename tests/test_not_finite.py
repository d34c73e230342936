"""Infinities and NaN, in the input and in the weight (docs/concepts/numerics.md, "Not finite").

A finite output is right, and one that is not finite stands only where PyTorch's is, or in the same tile. Scales are the
danger: one that an infinity has a say in makes everything else vanish.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from harness import (
    ALGORITHMS,
    CLASSES,
    DEVICES,
    LAYOUTS,
    OWN,
    Case,
    Yardstick,
    conv2d,
    conv2d_packed,
    hostile,
    make_case,
    pack_weight,
    refresh_packed,
    refusal,
    yardstick,
)
from shapes import Shape
from test_gradients import CASES, DTYPE, LIMIT, NAMES, exact, operands, own, serves

from fastconv import ops, testing
from fastconv.testing import poisoned_memory

# The largest tile and the largest noise: what `auto` takes has no larger ones.
COARSEST = max(OWN, key=lambda name: ALGORITHMS[name]["noise_gain"])
VALUES = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}
# Scales belong to tiles, items, images and filters, and to 64 channels of them: several of each, and their tails.
SHAPES = [
    Shape(3, 72, 19, 22, 40, 3, 3, padding=(1, 1)),
    Shape(2, 136, 9, 30, 136, 3, 3, padding=(1, 1)),  # three groups of channels, two blocks of 128 filters
    Shape(5, 8, 7, 7, 72, 3, 3, padding=(1, 1)),  # images that share a piece of work
    Shape(4, 67, 9, 13, 19, 3, 3, padding=(0, 2)),  # no vectors of channels, none of filters
    Shape(3, 3, 9, 10, 5, 3, 3, padding=(1, 1)),
    Shape(3, 72, 13, 14, 24, 1, 1),
    Shape(3, 40, 13, 14, 24, 1, 1, stride=(2, 2)),
    Shape(3, 36, 15, 14, 20, 3, 3, stride=(2, 2), padding=(1, 1)),
    Shape(3, 12, 14, 13, 10, 5, 5, padding=(2, 2)),
    Shape(3, 40, 14, 11, 10, 3, 3, padding=(2, 2), dilation=(2, 2)),
    Shape(3, 3, 33, 30, 65, 7, 7, stride=(2, 2), padding=(3, 3)),  # a first layer
    Shape(3, 24, 9, 11, 18, 3, 3, padding=(1, 1), groups=3),
    Shape(3, 33, 12, 11, 33, 3, 3, padding=(1, 1), groups=33),
    Shape(3, 33, 12, 11, 33, 1, 1, groups=33),
]
# What is chosen where a GPU has work enough.
LARGE = [
    Shape(16, 128, 56, 56, 64, 3, 3, padding=(1, 1)),
    Shape(64, 96, 28, 28, 256, 1, 1),
    Shape(32, 64, 28, 28, 128, 3, 3, stride=(2, 2), padding=(1, 1)),
    Shape(70, 8, 26, 26, 72, 3, 3, padding=(1, 1)),
    Shape(133, 136, 14, 14, 8, 3, 3, padding=(1, 1)),
    Shape(267, 8, 7, 7, 72, 3, 3, padding=(1, 1)),
]
# The CPU's kernels compute every class in FP32 arithmetic, without scales: maps of a few tiles will do.
SMALLER = [replace(shape, h=min(shape.h, 13), w=min(shape.w, 11)) for shape in SHAPES]
PLACES = [
    *(pytest.param(shape, cls, "cpu", id=f"{shape}-{cls}-cpu") for shape in SMALLER for cls in ("fp32", "bf16")),
    *(pytest.param(shape, cls, "cuda", id=f"{shape}-{cls}-cuda", marks=pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device")) for shape in SHAPES + LARGE for cls in CLASSES),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    with poisoned_memory():
        yield


def spoil(case: Case, operand: str, value: float) -> Case:
    """The case with `value` at the first element of the last image or filter's last channel, in the middle of the
    first one's first channel, and in the second one, which is zero but for that."""
    tensor = getattr(case, operand).clone()
    channels, rows, columns = tensor.shape[1:]
    tensor[0, 0, rows // 2, columns // 2] = value
    tensor[-1, channels - 1, 0, 0] = value
    if len(tensor) > 2:
        tensor[1] = 0.0
        tensor[1, channels // 2, rows - 1, columns // 2] = value
    layout = "nhwc" if getattr(case, operand).is_contiguous(memory_format=torch.channels_last) else "nchw"
    return replace(case, **{operand: hostile(tensor, layout)})


def without(case: Case, operand: str) -> Case:
    """The case with zeros for what is not finite."""
    return replace(case, **{operand: getattr(case, operand).nan_to_num(0.0, 0.0, 0.0)})


@dataclass
class Allowed:
    """Where an output must and where it may be infinite or NaN: bool, of the output's shape."""

    must: torch.Tensor  # its window holds such an element
    may: torch.Tensor  # or multiplies one by the zero of a padding, which PyTorch does or does not, by kernel

    def with_tiles(self, tile: tuple[int, int]) -> torch.Tensor:
        """`may`, and all outputs of its tiles."""
        met = F.max_pool2d(self.may.float(), tile, ceil_mode=True)
        p, q = self.may.shape[2:]
        return met.repeat_interleave(tile[0], 2)[:, :, :p].repeat_interleave(tile[1], 3)[:, :, :, :q] > 0


def allowed(case: Case, operand: str) -> Allowed:
    s = case.shape
    x, weight = (
        (~tensor.isfinite()).float() if name == operand else torch.ones_like(tensor, dtype=torch.float32)
        for name, tensor in (("input", case.input), ("weight", case.weight))
    )
    padding = (s.padding[1], s.padding[1], s.padding[0], s.padding[0])
    met, with_zeros = (
        F.conv2d(F.pad(x, padding, value=value), weight, None, s.stride, 0, s.dilation, s.groups) > 0.5
        for value in (0.0, 0.0 if operand == "input" else 1.0)
    )
    return Allowed(met, with_zeros)


def violations(
    output: torch.Tensor, where: Allowed, whole: Yardstick, algorithm: str, cls: str, tile: tuple[int, int]
) -> list[str]:
    """What is wrong with an output whose finite elements are to be those of `whole`; empty if nothing is."""
    finite = output.isfinite()
    lost, strayed = finite & where.must, ~finite & ~where.with_tiles(tile)
    found = [f"{int(bad.sum())} {text}, the first at {bad.nonzero()[0].tolist()}"
             for bad, text in ((lost, "finite, but their windows hold it"), (strayed, "not finite far from it"))
             if bool(bad.any())]  # fmt: skip
    return found + whole.violations(torch.where(finite, output, whole.expected.to(output.dtype)), algorithm, cls)


@pytest.mark.parametrize("operand", ["input", "weight"])
@pytest.mark.parametrize(("shape", "cls", "device"), PLACES)
def test_what_is_not_finite_stays_where_it_is_read(shape, cls, operand, device):
    """By every algorithm; also where it has come into a weight that was packed before."""
    algorithms = [name for name in OWN if cls in ALGORITHMS[name]["accuracy"] and device in ALGORITHMS[name]["devices"]]
    algorithms = [name for name in algorithms if not refusal(name, shape, cls, "nchw", device)]
    if not algorithms:
        pytest.skip(f"no algorithm of ours takes {shape} in class {cls} on {device}")
    wrong = []
    whole = None
    for (name, value), layout in zip(VALUES.items(), itertools.cycle(LAYOUTS), strict=False):
        sound = make_case(shape, cls, layout, device)
        case = spoil(sound, operand, value)
        where = allowed(case, operand)
        if whole is None:
            whole = yardstick(without(case, operand), cls)
        for algorithm in algorithms:
            tile = ALGORITHMS[algorithm]["tile"]
            outputs = {"plain": conv2d(case, algorithm, cls)}
            if operand == "weight":
                packed = pack_weight(sound.weight, shape.groups, algorithm, cls)
                refresh_packed(packed, sound.weight.clone(), case.weight, shape.groups, algorithm, cls)
                outputs["refreshed"] = conv2d_packed(case, packed, algorithm, cls, layout)
            for how, output in outputs.items():
                found = violations(output, where, whole, algorithm, cls, tile)
                wrong += [f"{algorithm} {layout} {how}, {name}: {text}" for text in found]
    assert not wrong, f"{shape}\n" + "\n".join(wrong)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("algorithm", OWN)
def test_every_algorithm_is_among_them(algorithm, cls):
    if cls not in ALGORITHMS[algorithm]["accuracy"]:
        pytest.skip(f"{algorithm} does not offer class {cls}")
    assert any(not refusal(algorithm, shape, cls, "nchw", "cpu") for shape in SMALLER)


@pytest.mark.parametrize("operand", ["input", "weight"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pytorch_is_between_must_and_may(shape, operand):
    """The rule asks for what PyTorch does, in one layout or the other. On the CPU: its CUDA kernels may spread more."""
    for value in VALUES.values():
        for layout in LAYOUTS:
            case = spoil(make_case(shape, "fp32", layout), operand, value)
            where = allowed(case, operand)
            theirs = ~F.conv2d(case.input, case.weight, None, shape.stride, shape.padding, shape.dilation,
                               shape.groups).isfinite()  # fmt: skip
            assert not bool((where.must & ~theirs).any()), layout
            assert not bool((theirs & ~where.may).any()), layout


def test_violations_are_seen():
    """A lost infinity, one too many, and a finite output that has vanished."""
    case = spoil(make_case(SHAPES[0], "fp32", "nchw"), "input", VALUES["inf"])
    where, whole = allowed(case, "input"), yardstick(without(case, "input"), "fp32")
    right = torch.where(where.must, torch.nan, whole.expected.float())

    def judge(output: torch.Tensor) -> list[str]:
        return violations(output, where, whole, "winograd_f4", "fp32", (4, 4))

    assert judge(right) == []
    at = where.must.nonzero()[0].tolist()
    lost, strayed, vanished = right.clone(), right.clone(), right.clone()
    lost[tuple(at)] = whole.expected[tuple(at)].float()
    strayed[2, 0, 17, 21] = torch.nan
    vanished[0, 0, 0, 0] = 0.0
    assert "windows hold it" in judge(lost)[0]
    assert "far from it" in judge(strayed)[0]
    assert judge(vanished)


@pytest.mark.parametrize("operand", ["input", "weight"])
@pytest.mark.parametrize("cls", ["fp32", "bf16"])
@pytest.mark.parametrize("device", DEVICES)
def test_input_gradient(cls, operand, device):
    """A convolution of dY with the flipped filters, by the algorithm that `auto` takes: its tiles are those of dX."""
    shape = Shape(3, 40, 19, 22, 72, 3, 3, padding=(1, 1))  # of that convolution
    sound = make_case(shape, cls, "nhwc", device)
    for value in VALUES.values():
        case = spoil(sound, operand, value)
        filters = case.weight.transpose(0, 1).flip(2, 3).contiguous(memory_format=torch.channels_last)
        size = [shape.n, shape.k, shape.p, shape.q]
        dx = ops.input_gradient_op(case.input, filters, size, [1, 1], [1, 1], [1, 1], 1, "direct", CLASSES[cls][1], 4)
        where, whole = allowed(case, operand), yardstick(without(case, operand), cls)
        assert violations(dx, where, whole, COARSEST, cls, ALGORITHMS[COARSEST]["tile"]) == []


@pytest.mark.parametrize("value", ["inf", "nan"])
@pytest.mark.parametrize("of_x", [True, False], ids=["x", "dy"])
@pytest.mark.parametrize("cls", LIMIT)
@pytest.mark.parametrize("case", [CASES[i] for i in (2, 3, 6, 15, 21, 23)], ids=str)
def test_weight_gradient(case, cls, of_x, value, device):
    """What is not finite stays with its channel, or its filter, of the weight; there it may reach all taps."""
    names = [name for name in NAMES if serves(name, case, cls)]
    for layout in LAYOUTS:
        x, grad = operands(case, DTYPE[cls], layout, device)
        spoilt = x if of_x else grad
        spoilt[0, 0, spoilt.shape[2] // 2, spoilt.shape[3] // 2] = VALUES[value]
        spoilt[-1, -1, 0, 0] = VALUES[value]
        marks, ones = (~spoilt.isfinite()).double(), torch.ones_like(grad if of_x else x, dtype=torch.float64)
        must = (exact(marks if of_x else ones, ones if of_x else marks, case) > 0.5).to(device)
        may = must.flatten(2).any(2)[:, :, None, None].expand_as(must)
        expected = exact(x.nan_to_num(0.0, 0.0, 0.0), grad.nan_to_num(0.0, 0.0, 0.0), case).to(device)
        for name in names:
            dw = own(x, grad, case, cls, layout, name)
            finite = dw.isfinite()
            assert not bool((finite & must).any()), (name, layout, "lost")
            assert not bool((~finite & ~may).any()), (name, layout, "strayed")
            errors = testing.errors(torch.where(finite, dw, expected.to(dw.dtype)), expected)
            assert errors.relative_l2 <= LIMIT[cls], (name, layout, errors)
