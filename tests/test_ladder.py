"""The sources' rungs (benchmarks/studies/ladder.py): right in FP32 and in FP16 arithmetic, within derived bounds."""

import pytest
import torch
from torch import nn

from benchmarks.studies import ladder
from fastconv import UnsupportedError, ops
from fastconv.models.layers import Layer

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: the ladders' kernels")
CASES = {  # n, layer
    "lenet1": (3, Layer("lenet1", 1, 26, 23, 4, 7, 7, 1, 0)),
    "lenet2": (2, Layer("lenet2", 4, 20, 25, 16, 7, 7, 1, 0)),
    "padded": (2, Layer("padded", 5, 19, 17, 33, 3, 3, 1, 1)),
    "strided": (3, Layer("strided", 3, 31, 30, 18, 5, 5, 2, 2)),
}


def bound(x, weight, layer, unit, smallest):
    """Of a sum of C R R products, one after the other, each with one rounding: gamma = L u / (1 - L u) of the sum of
    their magnitudes, and what is lost below the smallest normal number."""
    length = layer.c * layer.r * layer.s
    gamma = length * unit / (1 - length * unit)
    magnitude = nn.functional.conv2d(x.double().abs(), weight.double().abs(), None, layer.stride, layer.padding)
    return gamma * magnitude + length * smallest


def data(n, layer, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, layer.c, layer.h, layer.w, generator=generator)
    weight = torch.randn(layer.k, layer.c, layer.r, layer.s, generator=generator) / (layer.c * layer.r * layer.s) ** 0.5
    return x.to(dtype), weight.to(dtype)


def exact(x, weight, layer):
    return nn.functional.conv2d(x.cpu().double(), weight.cpu().double(), None, layer.stride, layer.padding)


def test_every_rung_has_a_class_and_says_what_it_does_not_serve():
    lenet = CASES["lenet2"][1]
    assert all(not rung.why_not(lenet, 4) for rung in ladder.RUNGS.values())
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert ladder.serving(ladder.RUNGS, lenet, "ieee", "nchw", cuda) == ladder.of_class("ieee")
    assert ladder.serving(ladder.RUNGS, lenet, "fp16", "nchw", cuda) == ladder.of_class("fp16")
    assert set(ladder.of_class("ieee")) | set(ladder.of_class("fp16")) == set(ladder.RUNGS)
    assert ladder.serving(ladder.RUNGS, lenet, "fp32", "nchw", cuda) == []
    assert ladder.serving(ladder.RUNGS, lenet, "ieee", "nhwc", cuda) == []
    assert ladder.serving(ladder.RUNGS, lenet, "ieee", "nchw", cpu) == []
    assert ladder.serving(["direct", "ladder_fused"], lenet, "ieee", "nchw", cuda) == ["ladder_fused"]
    large = Layer("large", 2048, 9, 9, 4)
    assert "constant memory" in ladder.RUNGS["ladder_direct_constant_memory"].why_not(large, 4)
    assert not ladder.RUNGS["ladder_direct_constant_memory"].why_not(large, 2)
    assert "size is 3" in ladder.RUNGS["ladder_fused_8x8"].why_not(large, 4)
    assert "one group" in ladder.RUNGS["ladder_fused"].why_not(Layer("grouped", 4, 9, 9, 4, groups=2), 4)


@pytest.mark.skipif(not hasattr(torch.ops.fastconv, "ladder"), reason="needs a library with CUDA's kernels")
def test_the_operator_refuses_tensors_of_the_cpu():
    n, layer = CASES["lenet1"]
    with pytest.raises(RuntimeError, match="input is on the CPU; the ladder's kernels are CUDA's"):
        ladder.convolve("ladder_fused", *data(n, layer, torch.float32))


def test_a_network_is_swapped_by_a_rung(monkeypatch):
    called = []

    def convolve(name, x, weight, stride, padding):
        called.append(name)
        return nn.functional.conv2d(x, weight, None, stride, padding)

    monkeypatch.setattr(ladder, "convolve", convolve)
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 4, 5, stride=2, bias=False))
    x = torch.randn(2, 2, 12, 12)
    with torch.no_grad():
        expected = model(x)
        assert ladder.swap_(model, "ladder_fused") == 2
        assert torch.allclose(model(x), expected, atol=1e-6)
    assert called == ["ladder_fused"] * 2


@needs_cuda
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ladder.RUNGS)
def test_a_rung_is_within_its_bound(name, case, monkeypatch):
    n, layer = CASES[case]
    half = ladder.class_of(name) == "fp16"
    dtype, unit, smallest = (torch.float16, 2.0**-11, 2.0**-25) if half else (torch.float32, 2.0**-24, 2.0**-150)
    if why := ladder.RUNGS[name].why_not(layer, dtype.itemsize):
        pytest.skip(why)
    monkeypatch.setattr(ladder, "WORKSPACE", 1)  # one image at a time
    x, weight = data(n, layer, dtype)
    y = ladder.convolve(name, x.cuda(), weight.cuda(), layer.stride, layer.padding)
    assert y.dtype == dtype
    difference = (y.cpu().double() - exact(x, weight, layer)).abs()
    assert (difference <= bound(x, weight, layer, unit, smallest)).all()
    assert difference.max() > 0  # computed, and in this type


@needs_cuda
@pytest.mark.parametrize("name", ladder.of_class("fp16"))
def test_sums_in_half_stand_still_where_an_ulp_is_two(name):
    """3136 ones: 2048 + 1 is 2048 in half, so that a sum in half ends there; one in FP32 would be 3136."""
    x, weight = torch.ones(1, 64, 9, 9, device="cuda").half(), torch.ones(4, 64, 7, 7, device="cuda").half()
    assert (ladder.convolve(name, x, weight) == 2048).all()


@needs_cuda
@pytest.mark.parametrize("name", ["ladder_direct_constant_memory", "ladder_fused_constant_memory"])
def test_constant_memory_is_filled_slice_by_slice(name):
    layer = Layer("slices", 512, 6, 7, 11)  # of 3 filters of 18 KiB
    x, weight = data(2, layer, torch.float32)
    y = ladder.convolve(name, x.cuda(), weight.cuda(), 1, 1).cpu().double()
    assert ((y - exact(x, weight, layer)).abs() <= bound(x, weight, layer, 2.0**-24, 2.0**-150)).all()


@needs_cuda
@pytest.mark.parametrize("name", ["ladder_unroll", "ladder_direct_constant_memory", "ladder_half_fused_4x64"])
def test_a_contender_is_replayed_from_a_graph(name):
    n, layer = CASES["lenet2"]
    dtype = torch.float16 if ladder.class_of(name) == "fp16" else torch.float32
    x, weight = (each.cuda() for each in data(n, layer, dtype))
    call = ladder.contender(name, x, weight, layer)
    expected = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call()
    x.neg_()  # every sum is rounded as before, but for its sign
    graph.replay()
    assert torch.equal(y, -expected)


@needs_cuda
def test_the_operator_says_what_has_no_kernel():
    x, weight = torch.randn(1, 2, 9, 9, device="cuda"), torch.randn(3, 2, 4, 4, device="cuda")
    output = x.new_empty(1, 3, 6, 6)
    for flags, text in (
        (("direct", True, True, False, 16, 16), "size is 4; expected 3, 5 or 7"),
        (("fused", False, False, True, 16, 16), "constant_filters without restricted"),
        (("fused", True, False, False, 8, 8), "a tile other than 16x16"),
        (("unroll", True, False, False, 16, 16), "workspace does not hold"),
    ):
        with pytest.raises(UnsupportedError, match=text):
            ops.ladder(x, weight, 1, 0, *flags, output, None)
    with pytest.raises(RuntimeError, match="form is 'winograd'; expected direct, unroll or fused"):
        ops.ladder(x, weight, 1, 0, "winograd", True, False, False, 16, 16, output, None)
    with pytest.raises(RuntimeError, match="output has shape"):
        ops.ladder(x, weight, 1, 1, "direct", True, False, False, 16, 16, output, None)
