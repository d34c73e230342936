"""fastconv.conv2d against torch.nn.functional.conv2d: values, shapes, memory formats, refusals."""

import itertools
import logging
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import harness
import numpy as np
import processes
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from shapes import Shape

import fastconv
from fastconv import functional, reference, settings
from fastconv.testing import errors, nan_surrounded, poisoned_memory

NAMES = [row.name for row in fastconv.algorithms()]
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def assert_close(result, expected, tolerance=None):
    assert result.shape == expected.shape
    if expected.numel() > 0:
        found = errors(result.cpu(), expected.cpu())
        assert found.relative_l2 <= (tolerance or TOLERANCE[result.dtype]), found


def significant_strides(tensor):
    """Strides that address anything: those of sizes above 1, in a tensor that is not empty."""
    if tensor.numel() == 0:
        return None
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def assert_same_layout(result, expected):
    assert result.shape == expected.shape
    assert result.dtype == expected.dtype
    assert significant_strides(result) == significant_strides(expected)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        if result.dim() == 4:
            assert result.is_contiguous(memory_format=memory_format) == expected.is_contiguous(
                memory_format=memory_format
            )


def outcome(function, *args, **kwargs):
    """The result, or the type of the exception."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return type(error)


pairs = st.one_of(st.integers(-1, 3), st.tuples(st.integers(0, 3), st.integers(0, 3)))


@st.composite
def calls(draw):
    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    c_per_group, k_per_group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    wrong = draw(st.sampled_from([0] * 9 + [1]))
    n = draw(st.sampled_from([None, 0, 1, 3]))
    shape = [c_per_group * groups + wrong, draw(st.integers(1, 8)), draw(st.integers(1, 8))]
    kernel = [draw(st.integers(1, 4)), draw(st.integers(1, 4))]
    return {
        "x": shape if n is None else [n, *shape],
        "w": [k_per_group * groups, c_per_group, *kernel],
        "bias": draw(st.sampled_from([None, 0, 0, 1])),
        "stride": draw(pairs),
        "padding": draw(st.one_of(pairs, st.sampled_from(["same", "valid", "full"]))),
        "dilation": draw(pairs),
        "groups": groups,
        "channels_last": draw(st.booleans()),
    }


@given(calls())
def test_argument_space(call):
    x, w = torch.randn(call["x"]), torch.randn(call["w"])
    if call["channels_last"] and x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    bias = None if call["bias"] is None else torch.randn(w.shape[0] + call["bias"])
    args = (x, w, bias, call["stride"], call["padding"], call["dilation"], call["groups"])
    expected = outcome(F.conv2d, *args)
    result = outcome(fastconv.conv2d, *args)
    if isinstance(expected, type):
        assert result is expected
        return
    assert_same_layout(result, expected)
    assert_close(result, reference.conv2d(*args))


X, W, B = torch.randn(2, 4, 6, 6), torch.randn(4, 4, 3, 3), torch.randn(4)
BAD = {
    "input None": ((None, W), {}),
    "weight array": ((X, W.numpy()), {}),
    "bias number": ((X, W, 1.0), {}),
    "stride float": ((X, W), {"stride": 1.0}),
    "stride bool": ((X, W), {"stride": True}),
    "stride list of float": ((X, W), {"stride": [1.0, 1]}),
    "stride empty": ((X, W), {"stride": []}),
    "stride three": ((X, W), {"stride": (1, 1, 1)}),
    "stride zero": ((X, W), {"stride": 0}),
    "stride string": ((X, W), {"stride": "1"}),
    "stride None": ((X, W), {"stride": None}),
    "padding float": ((X, W), {"padding": 1.0}),
    "padding negative": ((X, W), {"padding": -1}),
    "padding three": ((X, W), {"padding": (1, 1, 1)}),
    "padding unknown": ((X, W), {"padding": "full"}),
    "padding same, strided": ((X, W), {"padding": "same", "stride": 2}),
    "padding None": ((X, W), {"padding": None}),
    "dilation zero": ((X, W), {"dilation": 0}),
    "dilation float": ((X, W), {"dilation": 1.5}),
    "groups zero": ((X, W), {"groups": 0}),
    "groups negative": ((X, W), {"groups": -1}),
    "groups float": ((X, W), {"groups": 1.0}),
    "groups bool": ((X, W), {"groups": True}),
    "groups not a divisor": ((X, W), {"groups": 3}),
    "channels": ((X, W), {"groups": 2}),
    "bias size": ((X, W, torch.randn(3)), {}),
    "bias dimensions": ((X, W, torch.randn(4, 1)), {}),
    "bias dtype": ((X, W, B.double()), {}),
    "weight dtype": ((X, W.double()), {}),
    "input dtype": ((X.double(), W), {}),
    "long and float": ((X.long(), W), {}),
    "bool": ((X.bool(), W.bool()), {}),
    "complex and real": ((X.to(torch.complex64), W), {}),
    "input 2-d": ((X[0, 0], W), {}),
    "input 5-d": ((X[None], W), {}),
    "weight 3-d": ((X, W[0]), {}),
    "weight 5-d": ((X, W[None]), {}),
    "unbatched, channels": ((X[0, :3], W), {}),
    "input smaller than kernel": ((X[:, :, :2], W), {}),
    "no output channels": ((X, W[:0]), {}),
}


@pytest.mark.parametrize("name", BAD)
def test_exception_types_of_torch(name):
    args, kwargs = BAD[name]
    expected = outcome(F.conv2d, *args, **kwargs)
    assert isinstance(expected, type)
    assert outcome(fastconv.conv2d, *args, **kwargs) is expected


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"stride": 0}, ["stride", "0", "positive"]),
        ({"padding": -1}, ["padding", "-1", "non-negative"]),
        ({"padding": "full"}, ["padding", "'full'", "'same'"]),
        ({"groups": 3}, ["4", "groups = 3"]),
        ({"dilation": (1, 2, 3)}, ["dilation", "(1, 2, 3)", "pair"]),
        ({"bias": torch.randn(5)}, ["bias", "[5]", "[4]"]),
        ({"residual": torch.randn(2, 4, 3, 4)}, ["residual", "[2, 4, 3, 4]", "[2, 4, 4, 4]"]),
    ],
)
def test_messages_name_argument_value_and_expectation(kwargs, words):
    with pytest.raises(RuntimeError) as caught:
        fastconv.conv2d(X, W, **kwargs)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("argument", ["algorithm", "precision", "activation"])
@pytest.mark.parametrize("value", ["best", "", "AUTO"])
def test_unknown_names_are_value_errors(argument, value):
    with pytest.raises(ValueError, match=f"{argument} is '{value}'; expected"):
        fastconv.conv2d(X, W, **{argument: value})


def test_argument_types_that_torch_takes():
    for stride in (np.int64(2), torch.tensor(2), [2], (2, 2), torch.Size([2, 2]), (np.int32(2), torch.tensor(2))):
        torch.testing.assert_close(fastconv.conv2d(X, W, stride=stride), F.conv2d(X, W, stride=2))
    complex_x, complex_w = X.to(torch.complex64), W.to(torch.complex64)
    torch.testing.assert_close(fastconv.conv2d(complex_x, complex_w), F.conv2d(complex_x, complex_w))
    torch.testing.assert_close(fastconv.conv2d(X.int(), W.int()), F.conv2d(X.int(), W.int()))
    with pytest.raises(fastconv.UnsupportedError, match="complex64"):
        fastconv.conv2d(complex_x, complex_w, algorithm="direct")


def strided_variants(shape):
    """Tensors of one shape with many strides."""
    base = torch.randn(shape)
    yield "contiguous", base
    yield "channels_last", base.contiguous(memory_format=torch.channels_last)
    for order in ((0, 2, 1, 3), (1, 0, 2, 3), (3, 2, 1, 0), (0, 3, 2, 1)):
        inverse = [order.index(d) for d in range(4)]
        yield f"permuted {order}", base.permute(order).contiguous().permute(inverse)
    yield "expanded batch", base[:1].expand(shape)
    yield "expanded channels", base[:, :1].expand(shape)
    yield "every second row", torch.randn(shape[0], shape[1], 2 * shape[2], shape[3])[:, :, ::2]
    wide = torch.randn(shape[0], 2 * shape[1], *shape[2:]).contiguous(memory_format=torch.channels_last)
    yield "channels_last slice", wide[:, : shape[1]]


@pytest.mark.parametrize("shape", [(3, 4, 5, 6), (1, 4, 5, 6), (3, 1, 5, 6), (3, 4, 1, 6), (2, 4, 1, 1), (0, 4, 5, 6)])
@pytest.mark.parametrize("kernel", [(5, 3), (1, 1)])
def test_layout_is_that_of_torch(shape, kernel, device, full_precision):
    weights = [("contiguous", torch.randn(5, shape[1], *kernel))]
    weights.append(("channels_last", weights[0][1].contiguous(memory_format=torch.channels_last)))
    for (x_name, x), (w_name, w) in itertools.product(strided_variants(shape), weights):
        if shape[0] == 0 and x_name.startswith("expanded"):
            continue
        x, w = nan_surrounded(x.to(device)) if "expanded" not in x_name else x.to(device), w.to(device)
        padding = (kernel[0] // 2, kernel[1] // 2)
        y = fastconv.conv2d(x, w, padding=padding)
        suggests = "channels_last" if functional.ops.format_of(x, w) == torch.channels_last else "contiguous"
        assert y.is_contiguous(memory_format=getattr(torch, suggests.replace("contiguous", "contiguous_format")))
        assert_close(y, reference.conv2d(x, w, padding=padding))
        if device == "cpu":
            expected = F.conv2d(x, w, padding=padding)
            assert significant_strides(y) == significant_strides(expected), (x_name, w_name)


CASES = [
    {"x": (2, 3, 7, 5), "w": (5, 3, 3, 3), "padding": 1},
    {"x": (1, 4, 9, 9), "w": (4, 4, 3, 3), "padding": "same"},
    {"x": (3, 6, 8, 7), "w": (9, 2, 2, 4), "groups": 3, "stride": (2, 1), "padding": (1, 3), "dilation": (1, 2)},
    {"x": (2, 5, 4, 4), "w": (7, 5, 1, 1)},
    {"x": (2, 4, 6, 6), "w": (4, 1, 5, 5), "groups": 4, "padding": "same"},
    {"x": (3, 7, 5), "w": (5, 3, 3, 3), "padding": 2},
]


def shape_of(x_shape, w_shape, stride=1, padding=0, dilation=1, groups=1):
    """The sizes of a case in words of the registry's tests."""
    if padding == "same":
        padding = (w_shape[2] // 2, w_shape[3] // 2)
    stride, padding, dilation = (
        each if isinstance(each, tuple) else (each,) * 2 for each in (stride, padding, dilation)
    )
    n, c, h, w = x_shape
    return Shape(n, c, h, w, w_shape[0], *w_shape[2:], stride, padding, dilation, groups)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "x".join(map(str, case["w"])))
@pytest.mark.parametrize("name", ["auto", *NAMES])
def test_every_algorithm_answers_or_says_why(name, case, device):
    case = dict(case)
    x_shape, w_shape = case.pop("x"), case.pop("w")
    batched = x_shape if len(x_shape) == 4 else (1, *x_shape)
    for dtype, layout in itertools.product(
        (torch.float32, torch.float16, torch.bfloat16), (torch.contiguous_format, torch.channels_last)
    ):
        x = torch.randn(x_shape, dtype=dtype, device=device)
        if x.dim() == 4:
            x = x.contiguous(memory_format=layout)
        w = torch.randn(w_shape, dtype=dtype, device=device)
        bias = torch.randn(w_shape[0], dtype=dtype, device=device)
        expected = reference.conv2d(x, w, bias, **case)
        residual = torch.randn(expected.shape, dtype=dtype, device=device)
        for activation in (None, "relu", "relu6", "silu", "leaky_relu"):
            epilogue = {"residual": residual, "activation": activation, "negative_slope": 0.3}
            plan = fastconv.explain(
                batched, w_shape, **case, dtype=dtype, device=device, precision="fp32", bias=True, residual=True,
                activation=activation,
                layout="nhwc" if functional.ops.format_of(x, w) == torch.channels_last else "nchw",
                packs=activation is None,  # the first call with this weight, which packs it
            )  # fmt: skip
            row = {row.algorithm: row for row in plan.rows}.get(name)

            def call(x=x, w=w, bias=bias, epilogue=epilogue):
                return fastconv.conv2d(x, w, bias, **case, algorithm=name, precision="fp32", **epilogue)

            if row is not None and not row.fits:
                with pytest.raises(fastconv.UnsupportedError) as caught:
                    call()
                assert row.reason in str(caught.value)
                break
            with poisoned_memory():
                y = call()
            ran = fastconv.last_call()
            assert ran["algorithm"] == (name if name != "auto" else plan.choice)
            assert y.shape == expected.shape
            its = harness.Case(
                shape_of(batched, w_shape, **case), x.reshape(batched), w, bias,
                residual.reshape(-1, *residual.shape[-3:]), harness.Epilogue(True, True, activation or "none", 0.3),
            )  # fmt: skip
            assert not harness.check(y.reshape(its.residual.shape), its, ran["algorithm"], ran["class"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_dtype_and_empty_batch(dtype, device):
    x, w = torch.randn(0, 3, 5, 5, dtype=dtype, device=device), torch.randn(4, 3, 3, 3, dtype=dtype, device=device)
    y = fastconv.conv2d(x, w, torch.randn(4, dtype=dtype, device=device), activation="silu")
    assert y.shape == (0, 4, 3, 3)
    assert y.dtype == dtype
    x = torch.randn(1, 3, 5, 5, dtype=dtype, device=device)
    assert_close(fastconv.conv2d(x, w, activation="silu"), reference.conv2d(x, w, activation="silu"))


@pytest.mark.parametrize("place", ["cpu", "meta"])
@pytest.mark.parametrize("kernel", [(3, 4, 3, 3), (3, 4, 1, 1), (0, 4, 3, 3), (3, 0, 3, 3), (3, 0, 1, 1)])
def test_empty_inputs_are_those_of_torch(kernel, place):
    c = kernel[1]
    shapes = [(2, c, 6, 6), (2, c, 0, 6), (2, c, 6, 0), (0, c, 0, 6), (0, c, 6, 6), (c, 0, 6), (c, 6, 6)]
    for shape, padding, bias in itertools.product(shapes, (0, 1, 2), (False, True)):
        args = [torch.ones(shape), torch.ones(kernel), torch.ones(kernel[0]) if bias else None]
        expected = outcome(F.conv2d, *args, padding=padding)  # on the CPU: of meta tensors PyTorch checks less
        result = outcome(fastconv.conv2d, *[t if t is None else t.to(place) for t in args], padding=padding)
        if isinstance(expected, type):
            assert result is expected, (shape, padding)
        else:
            assert result.shape == expected.shape, (shape, padding)
            residual = torch.ones(expected.shape, device=place)
            args = [t if t is None else t.to(place) for t in args]
            assert fastconv.conv2d(*args, padding=padding, residual=residual).shape == expected.shape


def test_meta_device():
    y = fastconv.conv2d(X.to("meta"), W.to("meta"), padding="same", activation="relu")
    assert (y.device.type, y.shape) == ("meta", X.shape)


@pytest.fixture
def torch_switches():
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic, cudnn.enabled
    yield cudnn
    # Through the old API, which sets the new one's switches too: PyTorch refuses to read a mixture of both.
    cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic, cudnn.enabled = before


def test_precision_follows_torch(torch_switches):
    resolve = settings.resolve_precision
    for switch, expected in (("ieee", "fp32"), ("tf32", "tf32"), ("none", "fp32")):
        torch_switches.conv.fp32_precision = switch
        assert resolve(None, is_cuda=True) == expected
    for allowed in (True, False):
        torch_switches.allow_tf32 = allowed
        assert resolve(None, is_cuda=True) == ("tf32" if allowed else "fp32")
    torch_switches.conv.fp32_precision = "tf32"  # after the old API: reading `allow_tf32` may raise now
    assert resolve(None, is_cuda=True) == "tf32"
    assert resolve(None, is_cuda=False) == "fp32"
    for precision in ("ieee", "fp32", "tf32"):
        assert resolve(precision, is_cuda=True) == resolve(precision, is_cuda=False) == precision


def test_precision_of_a_call_is_recorded():
    for precision, expected in ((None, "fp32"), ("ieee", "ieee"), ("tf32", "tf32")):
        fastconv.conv2d(X, W, precision=precision)
        assert fastconv.last_call()["class"] == expected
    fastconv.conv2d(X.half(), W.half(), precision="ieee")
    assert fastconv.last_call()["class"] == "fp16"


def test_backend_flags(torch_switches):
    torch_switches.benchmark, torch_switches.deterministic, torch_switches.enabled = False, False, True
    assert settings.switches.backend_flags == 4
    torch_switches.benchmark, torch_switches.deterministic, torch_switches.enabled = True, True, False
    assert settings.switches.backend_flags == 3
    assert settings.unpack_flags(3) == (True, True, False)
    torch_switches.deterministic = False
    torch.use_deterministic_algorithms(True)  # the other switch of the same meaning
    try:
        assert settings.switches.backend_flags == 3
    finally:
        torch.use_deterministic_algorithms(False)


def test_log_names_the_call_before_it_runs(monkeypatch, caplog):
    monkeypatch.setattr(settings, "log_calls", True)
    with caplog.at_level(logging.DEBUG, logger="fastconv"), pytest.raises(RuntimeError):
        fastconv.conv2d(X, W, groups=3)
    assert "input [2, 4, 6, 6]" in caplog.text
    assert "groups 3" in caplog.text


ENVIRONMENT = """
import torch, fastconv
x, w = torch.randn(1, 4, 6, 6), torch.randn(4, 4, 3, 3)
fastconv.conv2d(x, w, {arguments})
print(fastconv.last_call()["algorithm"])
"""


@pytest.mark.parametrize(
    ("variables", "arguments", "expected"),
    [
        ({"FASTCONV_DISABLE": "1"}, "algorithm='direct'", "torch"),
        ({"FASTCONV_ALGORITHM": "direct"}, "", "direct"),
        ({"FASTCONV_ALGORITHM": "best"}, "", "FASTCONV_ALGORITHM is 'best'; expected one of auto, direct"),
    ],
)
def test_environment(variables, arguments, expected):
    run = processes.run(ENVIRONMENT.format(arguments=arguments), environment={**os.environ, **variables})
    assert expected in run.stdout + run.stderr


def test_registry_rows():
    for row in fastconv.algorithms():
        assert row.summary
        assert set(row.devices) <= {"cpu", "cuda"}
        assert row.accuracy
        assert row.dtypes


def test_error_metrics_see_errors():
    expected = torch.randn(100).double()
    assert errors(expected, expected) == type(errors(expected, expected))(0.0, 0.0, 0.0)
    assert errors(expected * 1.01, expected).relative_l2 == pytest.approx(0.01)
    assert errors(expected * 0.99, expected).bias == pytest.approx(-0.01)  # also where the output's mean is zero
    assert errors(expected + 0.1 * expected.sign(), expected).bias == pytest.approx(0.1 / expected.abs().mean())
    assert errors(expected[:0], expected[:0]) == errors(expected, expected)
    spoiled = expected.clone()
    spoiled[3] = float("nan")
    assert not errors(spoiled, expected).relative_l2 < 1
    assert not errors(spoiled, expected).maximum < 1
    with pytest.raises(ValueError, match="shape"):
        errors(expected[:3], expected)


def test_nan_surrounded():
    for _, tensor in strided_variants((2, 3, 4, 5)):
        if 0 in tensor.stride():
            continue
        surrounded = nan_surrounded(tensor)
        assert surrounded.stride() == tensor.stride()
        assert torch.equal(surrounded, tensor)
        whole = torch.as_strided(surrounded, (surrounded.storage_offset(),), (1,), 0)
        assert whole.isnan().all()


@pytest.mark.parametrize("m", [2, 4])
@pytest.mark.parametrize("padding", [0, 1, 2])
def test_winograd_reference_is_a_convolution(m, padding):
    x, w = torch.randn(2, 3, 7, 9).double(), torch.randn(5, 3, 3, 3).double()
    stages = reference.winograd_conv2d(x, w, m, padding)
    torch.testing.assert_close(stages.y, F.conv2d(x, w, padding=padding), rtol=1e-12, atol=1e-12)
    assert stages.u.shape == (m + 2, m + 2, 5, 3)
    assert stages.v.shape[:2] == stages.m.shape[:2] == (m + 2, m + 2)


def test_a_weight_without_values_is_refused():
    """A module that was made on the meta device and never filled."""
    x, w = torch.randn(1, 4, 9, 9), torch.randn(4, 4, 3, 3)
    for arguments in ({"weight": w.to("meta")}, {"bias": w[:, 0, 0, 0].to("meta")}, {"residual": w.to("meta")}):
        with pytest.raises(RuntimeError, match="is on meta; expected input's cpu"):
            fastconv.conv2d(x, **{"weight": w} | arguments)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_a_residual_is_the_output_s_like(dtype):
    """Also of a dtype that is PyTorch's to compute."""
    x, w = torch.ones(1, 2, 5, 5, dtype=dtype), torch.ones(3, 2, 3, 3, dtype=dtype)
    residual = torch.full((1, 3, 3, 3), 2, dtype=dtype)
    torch.testing.assert_close(fastconv.conv2d(x, w, residual=residual), F.conv2d(x, w) + residual)
    for wrong in (residual[..., :1], residual.float()):
        with pytest.raises(RuntimeError, match="residual is"):
            fastconv.conv2d(x, w, residual=wrong)


def test_a_slope_is_a_number():
    with pytest.raises(TypeError, match="negative_slope is None; expected a number"):
        fastconv.conv2d(torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3), negative_slope=None)


@pytest.fixture
def little_memory() -> Iterator[None]:
    """16 GiB more than now: where memory is promised without limit, asking for what is not there ends a process."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + 2**34, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("change", ["stride", "padding", "dilation"])
@pytest.mark.parametrize("value", [2**31, 2**40, 2**60, 2**62 + 1, 2**63 - 1])
def test_absurd_geometry_ends_in_an_error_or_a_result(change, value):
    """direct_tiled read far outside of the input once."""
    x, w = torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3)
    for algorithm in ("auto", "direct", "direct_tiled"):
        for pair in ((value, value), (1, value)):
            try:
                y = fastconv.conv2d(x, w, **{change: pair}, algorithm=algorithm)
            except RuntimeError:  # UnsupportedError, too
                continue
            assert change == "stride"
            expected = F.conv2d(x.double(), w.double())[:, :, : 3 if pair[0] == 1 else 1, :1]
            assert errors(y, expected).relative_l2 < 1e-5
