"""The operators under torch.compile and torch.export."""

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch.func import grad, vmap

import fastconv
from fastconv import ops, settings


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv2d(3, 6, 3)
        self.second = torch.nn.Conv2d(6, 6, 2, groups=3)

    def forward(self, x):
        x = fastconv.conv2d(x, self.first.weight, self.first.bias, 1, "same", activation="silu")
        return fastconv.conv2d(
            x, self.second.weight, self.second.bias, (2, 1), 1, groups=3, activation="leaky_relu", precision="fp32"
        )


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile(backend, device):
    torch._dynamo.reset()
    network = Network().to(device)
    compiled = torch.compile(network, fullgraph=True, dynamic=True, backend=backend)
    for shape, channels_last in (((2, 3, 7, 9), False), ((4, 3, 12, 5), False), ((3, 3, 8, 6), True)):
        format = torch.channels_last if channels_last else torch.contiguous_format
        x = torch.randn(shape, device=device).contiguous(memory_format=format).requires_grad_()
        y, expected = compiled(x), network(x)
        assert y.stride() == expected.stride()
        torch.testing.assert_close(y, expected)
        inputs = [x, *network.parameters()]
        cotangent = torch.randn_like(y)
        for found, wanted in zip(
            torch.autograd.grad(y, inputs, cotangent), torch.autograd.grad(expected, inputs, cotangent), strict=True
        ):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_compiled_code_follows_the_switches():
    torch._dynamo.reset()
    frames = torch._dynamo.testing.CompileCounter()
    x, w = torch.randn(1, 3, 5, 5), torch.randn(2, 3, 3, 3)
    compiled = torch.compile(fastconv.conv2d, fullgraph=True, backend=frames)
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark
    try:
        for benchmark, count in ((before, 1), (before, 1), (not before, 2)):
            cudnn.benchmark = benchmark
            compiled(x, w)
            assert frames.frame_count == count
    finally:
        cudnn.benchmark = before


LAYERS = {
    "layer": (fastconv.Conv2d, {}, None),
    "without a bias": (fastconv.Conv2d, {"bias": False, "stride": (2, 1), "dilation": 2}, None),
    "activation": (fastconv.FusedConv2d, {"activation": "leaky_relu", "negative_slope": 1 / 3}, None),
    "residual": (fastconv.FusedConv2d, {"activation": "relu", "stride": 2}, (2, 6, 4, 5)),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_is_one_operator_of_its_settings(name, dtype):
    kind, arguments, residual = LAYERS[name]
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    layer = kind(3, 6, 3, padding=1, algorithm="im2col_gemm", max_workspace=1 << 40, max_error=2.5, **arguments)
    layer = layer.to(dtype).eval()
    inputs = [torch.randn(shape, dtype=dtype) for shape in ((2, 3, 7, 9), residual) if shape is not None]
    found = torch.compile(layer, fullgraph=True, backend=backend)(*inputs)
    assert torch.equal(found, layer(*inputs))
    *_, node, output = graphs[0].graph.nodes
    assert node.target is ops.conv2d_op
    assert output.all_input_nodes == [node]
    assert (node.args[3] is None) == (residual is None)
    pairs = [tuple(each) for each in node.args[4:7]]
    assert pairs == [tuple(layer.stride), tuple(layer.padding), tuple(layer.dilation)]
    assert node.args[8:10] == ("im2col_gemm", "fp32")
    assert node.args[13:15] == (2.5, 1 << 40)


@pytest.mark.parametrize("shape", [(6, 7, 9), (6, 1, 1), (1, 6, 7, 9), (2, 6, 7, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("padding", [1, "same"])
def test_a_residual_that_is_broadcast_or_promoted(shape, dtype, padding):
    torch._dynamo.reset()
    layer = fastconv.FusedConv2d(3, 6, 3, padding=padding, activation="relu", algorithm="im2col_gemm").eval()
    x, residual = torch.randn(2, 3, 7, 9), torch.randn(shape, dtype=dtype)
    y = torch.compile(layer, fullgraph=True, backend="eager")(x, residual)
    torch.testing.assert_close(y, layer(x, residual))


@pytest.mark.parametrize("before", ["ieee", "tf32"])
def test_compiled_code_follows_the_precision_switch(before):
    torch._dynamo.reset()
    conv = torch.backends.cudnn.conv
    original = torch.backends.cudnn.allow_tf32
    compiled = torch.compile(
        lambda x: (x, settings.resolve_precision(None, is_cuda=True)), fullgraph=True, backend="eager"
    )
    try:
        for switch in (before, {"ieee": "tf32", "tf32": "ieee"}[before], before):
            conv.fp32_precision = switch
            assert compiled(torch.zeros(1))[1] == {"ieee": "fp32", "tf32": "tf32"}[switch]
    finally:
        torch.backends.cudnn.allow_tf32 = original  # the old API sets the new one's switches too


TRANSFORMS = {
    "grad": lambda f, x, w: grad(f, 1)(x, w),
    "grad of grad": lambda f, x, w: grad(lambda w: grad(f, 1)(x, w).square().sum())(w),
    "vmap": lambda f, x, w: vmap(f, (0, None))(x[:, None], w),
    "vmap of grad": lambda f, x, w: vmap(grad(f, 1), (0, None))(x[:, None], w),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_compiled_transforms_are_those_of_torch(transform, device):
    torch._dynamo.reset()
    x, w = torch.randn(2, 4, 5, 5, device=device), torch.randn(6, 2, 3, 3, device=device)

    def ours(x, w):
        return fastconv.conv2d(x, w, groups=2, activation="silu", precision="fp32").square().sum()

    def torchs(x, w):
        return F.silu(F.conv2d(x.double(), w.double(), groups=2)).square().sum()

    compiled = torch.compile(lambda x, w: TRANSFORMS[transform](ours, x, w), fullgraph=True, backend="aot_eager")
    expected = TRANSFORMS[transform](torchs, x, w)
    for found in (compiled(x, w), TRANSFORMS[transform](ours, x, w)):
        torch.testing.assert_close(found, expected.to(found.dtype), rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_compile_with_autocast():
    torch._dynamo.reset()
    w, x = torch.randn(6, 2, 3, 3), torch.randn(2, 4, 5, 5)
    with torch.autocast("cpu", torch.bfloat16):
        y = torch.compile(fastconv.conv2d, fullgraph=True, backend="aot_eager")(x, w, groups=2)
    assert y.dtype == torch.bfloat16


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    network = Network().eval()
    dim = torch.export.Dim
    program = torch.export.export(
        network, (torch.randn(2, 3, 7, 9),), strict=strict,
        dynamic_shapes=({0: dim("n"), 2: dim("h", min=3), 3: dim("w", min=3)},),
    )  # fmt: skip
    x = torch.randn(5, 3, 11, 6)
    torch.testing.assert_close(program.module()(x), network(x))
