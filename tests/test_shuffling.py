"""Filters of 2 x 2 pixels (`ConvProblem::shuffle`): the operator over the registry, the weights that upsamplings and
transposed convolutions come to, and the rewrites of frozen graphs that make them."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from embedded import OUTSIDE, channels_of
from harness import ALGORITHMS, CLASSES, DEVICES, OWN, Epilogue, make_case, pack_weight, reference, shared, yardstick
from rewriting import OURS, check
from shapes import Shape
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import fastconv
from fastconv import _C, ops
from fastconv.compiler import ahead
from fastconv.rewrites import Taken
from fastconv.testing import poisoned_memory

aten = torch.ops.aten
FROZEN = replace(OURS, packed=True, scatters=True)
pytestmark = pytest.mark.usefixtures("full_precision")

# Filters of a pixel that fill tiles and that do not; windows of one to four taps; rows that end within a tile.
SHAPES = [
    Shape(2, 16, 9, 7, 128, 1, 1),
    Shape(3, 24, 8, 11, 256, 1, 1),
    Shape(2, 32, 9, 10, 256, 2, 2, padding=(1, 1)),
    Shape(2, 16, 7, 6, 512, 3, 3, padding=(1, 1)),
    Shape(2, 40, 6, 9, 192, 2, 2, padding=(1, 1)),
    Shape(1, 8, 5, 5, 12, 2, 3, padding=(1, 1)),
    Shape(2, 64, 4, 4, 384, 4, 4, padding=(2, 2)),
]
LARGE = [
    Shape(8, 128, 32, 32, 256, 1, 1),
    Shape(5, 512, 16, 16, 1024, 1, 1),
    Shape(3, 256, 33, 31, 512, 2, 2, padding=(1, 1)),
    Shape(16, 64, 64, 64, 256, 2, 2, padding=(1, 1)),
    Shape(1, 512, 64, 64, 2048, 2, 2, padding=(1, 1)),
    Shape(1, 1024, 8, 8, 2048, 2, 2, padding=(1, 1)),
    Shape(32, 512, 4, 4, 1024, 2, 2, padding=(1, 1)),  # sums in memory
    Shape(2, 1280, 8, 8, 640, 2, 2, padding=(1, 1)),
]


def parts(y: Tensor, k: int, p: int, q: int) -> dict[tuple[int, int], Tensor]:
    """Of a shuffled y [N, K/4, 2P, 2Q]: what belongs to pixel (a, b)."""
    assert y.shape[1:] == (k // 4, 2 * p, 2 * q)
    return {(a, b): y[:, :, a::2, b::2] for a in (0, 1) for b in (0, 1)}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("algorithm", OWN)
def test_the_operator(algorithm, cls, device):
    """Each pixel's channels are the filters' outputs, from windows that begin with the pixel or do not, in a tensor of
    its own and in a range of one, and nothing else is written."""
    if cls not in ALGORITHMS[algorithm]["accuracy"]:
        pytest.skip(f"{algorithm} does not offer class {cls}")
    wrong = []
    shapes = shared(algorithm, SHAPES + (LARGE if device == "cuda" else []), cls, "nhwc", device)
    for i, shape in enumerate(shapes):
        epilogue = [Epilogue(bias=True, activation="silu"), Epilogue(bias=True), Epilogue(activation="relu")][i % 3]
        case = make_case(shape, cls, "nhwc", device, epilogue)
        packed, measure = pack_weight(case.weight, 1, algorithm, cls), yardstick(case, cls)
        for shuffle in ("pixels", "windows") if min(shape.p, shape.q) > 1 else ("pixels",):
            fewer = int(shuffle == "windows")
            k, p, q = shape.k, shape.p - fewer, shape.q - fewer
            empty = torch.full((shape.n, k // 4, 2 * p, 2 * q), math.nan, dtype=case.input.dtype, device=device)
            first = 8 if i % 2 else 0
            out, whole = channels_of(empty, k // 4 + 2 * first, first, OUTSIDE)
            with poisoned_memory():
                torch.ops.fastconv.conv2d_packed_into(
                    out, case.input, packed, case.bias, None, None, None,
                    [*case.weight.shape, *shape.stride, *shape.padding, *shape.dilation, 1], True, algorithm,
                    CLASSES[cls][1], epilogue.activation, epilogue.negative_slope, "none", False, shuffle,
                )  # fmt: skip
            assert ops.last_call()["algorithm"] == algorithm
            outside = whole.clone()
            outside[:, first : first + k // 4] = OUTSIDE
            assert bool((outside == OUTSIDE).all()), f"{shape} {shuffle}: it writes beside the range"
            dense = reference(case).to(case.input.dtype)
            for (a, b), part in parts(out, k, p, q).items():
                filters = slice((2 * a + b) * k // 4, (2 * a + b + 1) * k // 4)
                y, x = a * fewer, b * fewer
                dense[:, filters, y : y + p, x : x + q] = part
            wrong += [f"{shape} {epilogue} {shuffle}: {text}" for text in measure.violations(dense, algorithm, cls)]
    assert not wrong, "\n".join(wrong)


def test_implicit_gemm_writes_in_place_where_a_block_has_one_pixels_filters():
    device = _C.h200_device()

    def row(algorithm: str, **fields: Any) -> dict[str, Any]:
        given = {"n": 4, "c": 64, "h": 32, "w": 32, "k": 512, "r": 2, "s": 2, "padding": (1, 1), "layout": "nhwc"}
        problem = _C.ConvProblem(**(given | {"shuffle": "windows"} | fields))
        return next(row for row in _C.candidates(problem, device) if row["algorithm"] == algorithm)

    for dtype in ("float32", "float16", "bfloat16"):
        assert not row("implicit_gemm", dtype=dtype)["shuffles_apart"]
        assert not row("implicit_gemm", dtype=dtype, k=256)["shuffles_apart"]  # half of a packed tile
        assert row("implicit_gemm", dtype=dtype, k=144)["shuffles_apart"]
    assert row("implicit_gemm", c=3)["shuffles_apart"]
    assert row("direct")["shuffles_apart"]
    assert row("direct", y_channels=256)["ok"]
    plain, shuffled = row("implicit_gemm", shuffle="none"), row("implicit_gemm")
    assert 0.5 < shuffled["cost_us"] / plain["cost_us"] < 1.5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layout": "nchw"}, "shuffle is 'pixels' of 16 filters in 1 groups in layout nchw; expected"),
        ({"k": 18}, "shuffle is 'pixels' of 18 filters"),
        ({"groups": 2}, "shuffle is 'pixels' of 16 filters in 2 groups"),
        ({"residual": True}, "expected no residual and pool"),
        ({"shuffle": "rows"}, "shuffle is 'rows'; expected one of none, pixels, windows"),
        ({"shuffle": "windows", "h": 1, "w": 1, "r": 1, "s": 1}, "expected at least"),
    ],
)
def test_problems_that_are_none(fields, message):
    given = {"n": 1, "c": 8, "h": 8, "w": 8, "k": 16, "r": 3, "s": 3, "layout": "nhwc", "shuffle": "pixels"}
    with pytest.raises(ValueError, match=message):
        _C.ConvProblem(**(given | fields))


def test_calls_that_are_mistaken():
    x, weight = torch.randn(1, 8, 6, 6), torch.randn(16, 8, 1, 1)
    packed = ops.pack_weight(weight, 1, "direct", "fp32")

    def call(x: Tensor, out: Tensor, shuffle: str) -> None:
        rest = ([16, 8, 1, 1, 1, 1, 0, 0, 1, 1, 1], out.stride(1) == 1, "direct", "fp32", "none", 0.0, "none", False)
        torch.ops.fastconv.conv2d_packed_into(out, x, packed, None, None, None, None, *rest, shuffle)

    last = {"memory_format": torch.channels_last}
    with pytest.raises(RuntimeError, match=r"out has shape \[1, 16, 6, 6\]; expected \[1, 4, 12, 12\]"):
        call(x.to(**last), torch.empty(1, 16, 6, 6).to(**last), "pixels")
    with pytest.raises(RuntimeError, match="shuffle is 'pixels' of a contiguous input; expected channels_last"):
        call(x, torch.empty(1, 4, 12, 12), "pixels")
    with pytest.raises(ValueError, match="shuffle is 'all'; expected one of none, pixels, windows"):
        call(x.to(**last), torch.empty(1, 4, 12, 12).to(**last), "all")


@pytest.mark.parametrize("taps", [(3, 3), (5, 5), (7, 7), (3, 7), (7, 3)])
def test_weights_of_upsamplings(taps):
    weight, x = torch.randn(6, 4, *taps).double(), torch.randn(2, 4, 5, 6).double()
    exact = F.conv2d(F.interpolate(x, scale_factor=2), weight, padding=[size // 2 for size in taps])
    assert torch.allclose(by_pixels(x, ops.shuffled_weight_op(weight, "upsampling")), exact)


@pytest.mark.parametrize("taps", [(2, 2), (4, 4), (6, 6), (8, 8), (2, 6), (8, 4)])
def test_weights_of_transposed_convolutions(taps):
    weight, x = torch.randn(4, 6, *taps).double(), torch.randn(2, 4, 5, 6).double()
    exact = F.conv_transpose2d(x, weight, stride=2, padding=[size // 2 - 1 for size in taps])
    assert torch.allclose(by_pixels(x, ops.shuffled_weight_op(weight, "transposed")), exact)


def test_weights_and_biases_of_pixel_shuffles():
    weight, bias, x = torch.randn(12, 4, 3, 3).double(), torch.randn(12).double(), torch.randn(2, 4, 5, 6).double()
    exact = F.pixel_shuffle(F.conv2d(x, weight, bias, padding=1), 2)
    of = "pixel_shuffle"
    y = by_pixels(x, ops.shuffled_weight_op(weight, of))
    offsets = ops.shuffled_weight_op(bias, of).unflatten(0, (2, 2, 3)).permute(2, 0, 1)
    assert torch.allclose(y + offsets.repeat(1, 5, 6), exact)
    assert torch.equal(ops.shuffled_weight_op(bias, "transposed"), bias.repeat(4))


def by_pixels(x: Tensor, weight: Tensor) -> Tensor:
    """The shuffle by PyTorch's operators."""
    r, s = weight.shape[2:]
    shifted = r % 2 == 0
    y = F.conv2d(x, weight, padding=(r // 2, s // 2))
    k, h, w = weight.shape[0] // 4, *x.shape[2:]
    result = torch.empty(x.shape[0], k, 2 * h, 2 * w, dtype=x.dtype)
    for a in (0, 1):
        for b in (0, 1):
            i, j = (a, b) if shifted else (0, 0)
            result[:, :, a::2, b::2] = y[:, (2 * a + b) * k :][:, :k, i : i + h, j : j + w]
    return result


# Rewrites ------------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """One of everything, for `forward(model, x)`."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.of = forward
        self.conv, self.five = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(8, 16, 5, padding=2, bias=False)
        self.up, self.up4 = nn.ConvTranspose2d(8, 16, 2, stride=2), nn.ConvTranspose2d(8, 16, 4, stride=2, padding=1)
        self.skip, self.strided = nn.Conv2d(8, 8, 2), nn.Conv2d(8, 8, 4, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.behind = nn.Conv2d(32, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.of(self, x)  # type: ignore[no-any-return]


def larger(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2.0, mode="nearest")


def model(forward: Any) -> nn.Module:
    torch.manual_seed(0)
    made = Model(forward)
    nn.init.normal_(made.norm.running_mean)
    return made.to(memory_format=torch.channels_last).eval()


def picture(*size: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(*(size or (2, 8, 6, 9))).to(memory_format=torch.channels_last)


TAKEN = {
    "upsampling": (lambda m, x: m.conv(larger(x)), ["upsample+conv"]),
    "by size": (lambda m, x: m.conv(F.interpolate(x, size=(12, 18))), ["upsample+conv"]),
    "a module": (lambda m, x: m.conv(nn.Upsample(scale_factor=2)(x)), ["upsample+conv"]),
    "5x5": (lambda m, x: m.five(larger(x)), ["upsample+conv"]),
    "norm and activation": (lambda m, x: F.relu(m.norm(m.conv(larger(x)))), ["upsample+conv+bn+relu"]),
    "transposed": (lambda m, x: m.up(x), ["conv"]),
    "transposed, shifted": (lambda m, x: m.up4(x), ["conv"]),
    "pixel shuffle": (lambda m, x: F.pixel_shuffle(F.relu(m.five(x)), 2), ["conv+relu+pixel_shuffle"]),
    "strided pixel shuffle": (lambda m, x: F.pixel_shuffle(m.strided(x), 2), ["conv+pixel_shuffle"]),
    "both into a concatenation": (
        lambda m, x: m.behind(torch.cat([m.up(x), m.conv(larger(x))], 1)), ["conv+cat", "upsample+conv+cat", "conv"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_taken(name, monkeypatch):
    forward, expected = TAKEN[name]
    direct(monkeypatch)
    backend = check(model(forward), picture(), FROZEN)
    assert sorted(backend.parts) == sorted(expected)
    shuffled = [node for graph in backend.graphs
                for node in graph.find_nodes(op="call_function", target=ops.conv2d_packed_scatter_op)
                if node.args[-1] in ("pixels", "windows")]  # fmt: skip
    assert len(shuffled) == sum(part != "conv" or len(expected) == 1 for part in expected)
    assert backend.count(aten._unsafe_index.Tensor) == 0
    assert backend.count(aten.convolution.default) == 0


def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the rewrites do does not hang on the kernels of this machine: here ranges are written directly. Nor is
    anything frozen where Inductor does not run."""
    from fastconv.rewrites import choosing, concatenation, convolution, shuffling

    def plan_of(call: Any, **around: Any) -> Any:
        return convolution.plan_of(call, **around) | {"norms_apart": False, "copies_x": False, "copies_y": False}

    for module in (choosing, concatenation):
        monkeypatch.setattr(module, "plan_of", plan_of)
    candidates = _C.candidates
    in_place = lambda *args: [row | {"shuffles_apart": False} for row in candidates(*args)]  # noqa: E731
    monkeypatch.setattr(shuffling._C, "candidates", in_place)
    monkeypatch.setattr(shuffling.Shuffled, "is_known", lambda self: True)


LEFT = {
    "by three": lambda m, x: m.conv(F.interpolate(x, scale_factor=3.0)),
    "one dimension": lambda m, x: m.conv(F.interpolate(x, scale_factor=(2.0, 1.0))),
    "bilinear": lambda m, x: m.conv(F.interpolate(x, scale_factor=2.0, mode="bilinear")),
    "exact nearest to another size": lambda m, x: m.conv(F.interpolate(x, size=(13, 18))),
    "read twice": lambda m, x: m.conv(y := larger(x)).sum(1, keepdim=True) + y.sum(1, keepdim=True),
    "other padding": lambda m, x: m.skip(larger(x)),
    "an odd size": lambda m, x: F.conv_transpose2d(x, m.up4.weight[:, :, :3, :3], stride=2, padding=1),
    "another padding": lambda m, x: F.conv_transpose2d(x, m.up4.weight, stride=2),
    "output padding": lambda m, x: F.conv_transpose2d(x, m.up.weight, stride=2, output_padding=1),
    "a pixel unshuffle": lambda m, x: F.pixel_unshuffle(m.conv(x[..., :8]), 2),
    "a shuffle by four": lambda m, x: F.pixel_shuffle(m.conv(x), 4),
    "a shuffle of what is read twice": lambda m, x: F.pixel_shuffle(y := m.conv(x), 2).sum(1) + y.sum(),
    "groups": lambda m, x: F.conv_transpose2d(x, m.up.weight, stride=2, groups=2),
}


@pytest.mark.parametrize("name", LEFT)
def test_left(name):
    backend = check(model(LEFT[name]), picture(), FROZEN)
    assert not any("upsample" in each for each in backend.parts)
    assert backend.count(ops.shuffled_weight_op) == 0


def test_only_frozen_weights_static_shapes_and_channels_last():
    forward = TAKEN["both into a concatenation"][0]
    for asked, x, options in ((OURS, picture(), {}), (FROZEN, picture(3, 8, 6, 9), {"dynamic": True})):
        backend = check(model(forward), x, asked, **options)
        assert backend.count(ops.shuffled_weight_op) == 0
    backend = check(Model(TAKEN["upsampling"][0]).eval(), picture().contiguous(), FROZEN)
    assert backend.count(ops.shuffled_weight_op) == 0


def test_an_exported_graph_has_upsamplings_by_name():
    forward = TAKEN["upsampling"][0]
    module, found = ahead.rewritten(model(forward), (picture(),), FROZEN)
    assert ["+".join(each.parts) for each in found if isinstance(each, Taken)] == ["upsample+conv"]
    plain = model(forward)
    assert torch.allclose(module(picture()), plain(picture()), atol=1e-5)
    assert not module.graph.find_nodes(op="call_function", target=ops.shuffled_weight_op)  # Python's: it is folded
    other = lambda m, x: m.conv(F.interpolate(x, scale_factor=2.04))  # noqa: E731  (12 x 18, too, of other pixels)
    _, found = ahead.rewritten(model(other), (picture(),), FROZEN)
    assert ["+".join(each.parts) for each in found if isinstance(each, Taken)] == ["conv"]


def test_an_algorithm_that_does_not_fit_leaves_the_graph_as_it_is():
    """Winograd is for 3x3, not for the 2x2 or 1x1 of pixels."""
    for name in ("upsampling", "transposed", "transposed, shifted"):
        backend = check(model(TAKEN[name][0]), picture(), replace(FROZEN, algorithm="winograd_f2"), limit=1e-4)
        assert backend.count(ops.shuffled_weight_op) == 0


def test_weights_that_inputs_decide_and_sums_beyond_the_type_are_left():
    def rows(plain: nn.Module, x: Tensor) -> list[Any]:
        function = fastconv.compile(plain, frozen=True, algorithm="direct")
        with torch.no_grad():
            y, expected = function(x), plain(x)
        assert torch.allclose(y, expected, rtol=1e-2, atol=1e-2)
        return function.report.rows  # type: ignore[no-any-return]

    scaled = lambda m, x: F.conv_transpose2d(x, m.up.weight * x.mean(), m.up.bias, stride=2)  # noqa: E731
    assert [row.reason_code for row in rows(model(scaled), picture())] == ["transposed"]
    large = model(TAKEN["upsampling"][0]).half()
    nn.init.constant_(large.conv.weight, 20000.0)
    assert [row.fused for row in rows(large, picture().half() * 1e-4)] == ["conv"]


def test_flops_are_those_that_are_computed():
    last = {"memory_format": torch.channels_last}
    x, out = torch.randn(1, 8, 6, 6).to(**last), torch.empty(1, 4, 12, 12).to(**last)
    packed = ops.pack_weight(torch.randn(16, 8, 1, 1), 1, "direct", "fp32")
    rest = ([16, 8, 1, 1, 1, 1, 0, 0, 1, 1, 1], True, "direct", "fp32", "none", 0.0, "none", False, "pixels")
    with FlopCounterMode(display=False) as counter:
        torch.ops.fastconv.conv2d_packed_into(out, x, packed, None, None, None, None, *rest)
    assert counter.get_total_flops() == 2 * 6 * 6 * 16 * 8


def test_not_finite_values_reach_what_they_reach():
    x = picture()
    x[0, 0, 2, 3], x[1, 3, 5, 8] = math.nan, math.inf
    for name in ("upsampling", "transposed", "transposed, shifted"):
        plain = model(TAKEN[name][0])
        function = fastconv.compile(plain, frozen=True, algorithm="direct")
        with torch.no_grad():
            y, expected = function(x), plain(x)
        finite = expected.isfinite()
        assert torch.equal(y.isfinite(), finite)
        assert torch.allclose(y[finite], expected[finite], atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_compiled(dtype, device):
    """Through Inductor, with sizes at which a GPU's own choice is this."""
    torch.manual_seed(0)

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.up = nn.Conv2d(64, 128, 3, padding=1), nn.ConvTranspose2d(128, 64, 2, stride=2)
            self.second, self.last = nn.Conv2d(128, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1)

        def forward(self, x: Tensor, skip: Tensor) -> Tensor:
            y = self.second(torch.cat([self.up(self.first(x)), skip], 1))
            return F.silu(self.last(larger(F.relu(y))))  # type: ignore[no-any-return]

    size = 32 if device == "cuda" else 6
    plain = Decoder().to(device, dtype, memory_format=torch.channels_last).eval()
    x, skip = (torch.randn(2, c, n, n).to(device, dtype, memory_format=torch.channels_last)
               for c, n in ((64, size), (64, 2 * size)))  # fmt: skip
    algorithm = "auto" if device == "cuda" else "direct"
    function = fastconv.compile(plain, frozen=True, algorithm=algorithm)
    with torch.no_grad():
        y, expected = function(x, skip), plain(x, skip)
        exact = plain.double()(x.double(), skip.double())
    assert (y.shape, y.stride()) == (expected.shape, expected.stride())
    error, own = ((values.double() - exact).norm() / exact.norm() for values in (y, expected))
    assert error <= 4 * own + 1e-6
    taken = {row.fused for row in function.report.rows}
    if device == "cpu" or torch.cuda.get_device_capability() == (9, 0):
        assert "upsample+conv+silu" in taken, taken


@pytest.mark.parametrize("kernel", [2, 4, 6])
def test_transposed_layers_are_planned_as_shuffles(kernel):
    """On a GPU one convolution writes every pixel where it belongs."""
    problem = _C.ConvProblem(
        n=8, c=128, h=64, w=64, k=256, r=kernel, s=kernel, stride=(2, 2), padding=(kernel // 2 - 1,) * 2, layout="nhwc",
    )  # fmt: skip
    planned = _C.choose_input_gradient("auto", problem, _C.h200_device())
    made = planned["convolution"]
    assert (planned["method"], planned["convolutions"]) == ("together", 1)
    assert (made.k, made.c, made.r, made.s) == (512, 256, kernel // 2, kernel // 2)
    if kernel < 6:  # of 3x3 windows Winograd's products are fewer, and a pass shuffles them
        row = _C.choose("auto", made, _C.h200_device())
        assert (row["algorithm"], row["shuffles_apart"]) == ("implicit_gemm", False)
