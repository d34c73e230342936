"""The operators under PyTorch's machinery: opcheck, gradients, torch.func, autocast. Compiled: test_compile.py."""

import itertools

import pytest
import torch
import torch.nn.functional as F
import torch.testing._internal.two_tensor
from torch.func import grad, vmap
from torch.library import opcheck

import fastconv
from fastconv import ops, reference
from fastconv.ops import autograd, plain
from fastconv.testing import errors

OWN = [row.name for row in fastconv.algorithms() if row.name != "torch"]
CHANNELS_LAST = torch.channels_last

# input, weight, stride, padding, dilation, groups
SHAPES = {
    "3x3": ((2, 4, 7, 5), (6, 4, 3, 3), [1, 1], [1, 1], [1, 1], 1),
    "strided, grouped": ((3, 4, 7, 8), (6, 2, 3, 2), [2, 1], [0, 2], [1, 2], 2),
    "1x1": ((1, 5, 4, 3), (3, 5, 1, 1), [1, 1], [0, 0], [1, 1], 1),
    "padding beyond the kernel": ((2, 3, 4, 4), (2, 3, 3, 3), [1, 1], [3, 3], [1, 1], 1),
    "depthwise, strided": ((2, 4, 9, 9), (8, 1, 3, 3), [2, 2], [1, 1], [1, 1], 4),
}


def make(shape, dtype=torch.float32, device="cpu", requires_grad=True, channels_last=False):
    tensor = torch.randn(shape, dtype=dtype, device=device)
    if channels_last and tensor.dim() == 4:
        tensor = tensor.contiguous(memory_format=CHANNELS_LAST)
    return tensor.requires_grad_(requires_grad)


def opcheck_all(operator, args):
    results = opcheck(operator, args, raise_exception=False)
    assert all(result == "SUCCESS" for result in results.values()), results


def fits(name, x_shape, w_shape, geometry, dtype, device):
    stride, padding, dilation, groups = geometry
    plan = fastconv.explain(
        x_shape, w_shape, stride, padding, dilation, groups, dtype=dtype, device=device, precision="fp32"
    )
    return {row.algorithm: row.fits for row in plan.rows}[name]


@pytest.mark.parametrize(
    ("shape", "dtype", "channels_last", "epilogue"),
    [
        ("3x3", torch.float32, False, ("silu", 0.0)),
        ("3x3", torch.float16, True, ("relu", 0.0)),
        ("strided, grouped", torch.float32, True, ("leaky_relu", -0.2)),
        ("strided, grouped", torch.float64, False, ("none", 0.0)),
        ("1x1", torch.float32, False, ("leaky_relu", 0.1)),
        ("1x1", torch.bfloat16, True, ("none", 0.0)),
        ("padding beyond the kernel", torch.float32, False, ("relu6", 0.0)),
        ("1x1", torch.float16, True, ("hardswish", 0.0)),
    ],
)
def test_opcheck_conv2d(shape, dtype, channels_last, epilogue, device):
    x_shape, w_shape, *geometry = SHAPES[shape]
    x, w = (make(s, dtype, device, channels_last=channels_last) for s in (x_shape, w_shape))
    bias = make(w_shape[0], dtype, device)
    size = ops.output_size(x_shape, w_shape, *geometry[:3])
    residual = make([x_shape[0], w_shape[0], *size], dtype, device)
    opcheck_all(ops.conv2d_op, (x, w, bias, residual, *geometry, "auto", "fp32", *epilogue, 4))


@pytest.mark.parametrize("shape", ["3x3", "strided, grouped"])
def test_opcheck_gradients(shape, device):
    x_shape, w_shape, *geometry = SHAPES[shape]
    x, w = make(x_shape, device=device, channels_last=True), make(w_shape, device=device)
    y = make([x_shape[0], w_shape[0], *ops.output_size(x_shape, w_shape, *geometry[:3])], device=device)
    opcheck_all(ops.input_gradient_op, (y, w, x_shape, *geometry, "auto", "fp32", 4))
    opcheck_all(ops.weight_gradient_op, (x, y, w_shape, *geometry, "auto", "fp32", 4))


@pytest.mark.parametrize("name", OWN)
def test_opcheck_packed(name, device):
    fitting = [
        (shape, channels_last)
        for shape, channels_last in (("3x3", False), ("strided, grouped", True))
        if fits(name, *SHAPES[shape][:2], SHAPES[shape][2:], torch.float32, device)
    ]
    turn = OWN.index(name) % 2  # of two shapes one: what is checked are the operators
    for shape, channels_last in fitting[turn : turn + 1] or fitting:
        x_shape, w_shape, *geometry = SHAPES[shape]
        x, w = make(x_shape, device=device), make(w_shape, device=device, channels_last=channels_last)
        groups = geometry[3]
        opcheck_all(ops.pack_weight_op, (w, groups, name, "fp32"))
        packed = ops.pack_weight(w, groups, name, "fp32")
        bias = make(w_shape[0], device=device)
        opcheck_all(
            ops.conv2d_packed_op,
            (x, packed, w_shape, bias, None, *geometry, channels_last, name, "fp32", "silu", 0.0),
        )
        snapshot = w.detach().clone(memory_format=torch.contiguous_format)
        opcheck_all(ops.refresh_packed_op, (packed, snapshot, (w * 2).detach().requires_grad_(), groups, name, "fp32"))


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_packing_does_not_depend_on_the_weights_format(name, dtype, device):
    for x_shape, w_shape, *geometry in SHAPES.values():
        if not fits(name, x_shape, w_shape, geometry, dtype, device):
            continue
        groups = geometry[3]
        w, other = (make(w_shape, dtype, device).detach() for _ in range(2))
        expected = ops.pack_weight(w, groups, name, "fp32")
        formats = (torch.contiguous_format, torch.channels_last)
        for of_weight in formats:
            weight = w.contiguous(memory_format=of_weight)
            assert torch.equal(ops.pack_weight(weight, groups, name, "fp32"), expected)
            for of_snapshot in formats:
                snapshot = other.clone(memory_format=of_snapshot)
                packed = ops.pack_weight(snapshot, groups, name, "fp32")
                ops.refresh_packed(packed, snapshot, weight, groups, name, "fp32")
                assert torch.equal(packed, expected)


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_packed_is_the_same_convolution(name, dtype, device):
    for x_shape, w_shape, *geometry in SHAPES.values():
        if not fits(name, x_shape, w_shape, geometry, dtype, device):
            continue
        for channels_last in (False, True):
            x, w = make(x_shape, dtype, device, False), make(w_shape, dtype, device, False, channels_last)
            packed = ops.pack_weight(w, geometry[3], name, "fp32")
            assert packed.numel() == ops.packed_bytes(w, geometry[3], name, "fp32")
            suggests = ops.format_of(w) == CHANNELS_LAST  # of a 1x1 filter both formats are true
            call = (*geometry, suggests, name, "fp32", "relu", 0.0)
            y = autograd.conv2d_packed(x, packed, w_shape, None, None, *call)
            expected = autograd.conv2d(x, w, None, None, *geometry, name, "fp32", "relu", 0.0, 4)
            assert torch.equal(y, expected)
            assert y.stride() == expected.stride()
            snapshot = w.clone(memory_format=torch.contiguous_format)
            w[1:2] *= 3  # one filter changes
            ops.refresh_packed(packed, snapshot, w, geometry[3], name, "fp32")
            assert torch.equal(packed, ops.pack_weight(w, geometry[3], name, "fp32"))


def test_packing_is_not_differentiable():
    w = make((4, 4, 3, 3))
    packed = ops.pack_weight(w, 1, "direct", "fp32")
    assert not packed.requires_grad
    version = packed._version
    ops.refresh_packed(packed, w.detach().clone(), w, 1, "direct", "fp32")
    assert not packed.requires_grad
    assert packed._version >= version


def test_packed_memory_is_as_it_was_made():
    """A kernel writes and reads it by whole pieces of 16 bytes, wherever its pointer leads."""
    w = make((4, 4, 3, 3))
    packed, snapshot = ops.pack_weight(w, 1, "winograd_f4", "fp32"), w.detach().clone()
    shifted = torch.empty(len(packed) + 1, dtype=torch.uint8)[1:]
    for wrong in (packed[:1].expand(len(packed)), shifted, packed.view(torch.int8)):
        with pytest.raises(RuntimeError, match="packed weight is not contiguous uint8, aligned to 16 bytes"):
            ops.refresh_packed(wrong, snapshot, w, 1, "winograd_f4", "fp32")
        with pytest.raises(RuntimeError, match="packed weight is not contiguous uint8, aligned to 16 bytes"):
            autograd.conv2d_packed(
                make((1, 4, 9, 9)), wrong, (4, 4, 3, 3), None, None, (1, 1), (1, 1), (1, 1), 1, False, "winograd_f4",
                "fp32", "none", 0.0,
            )  # fmt: skip


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("activation", ["none", "silu", "relu", "gelu"])
def test_packed_gradients(name, activation, device):
    for x_shape, w_shape, *geometry in SHAPES.values():
        if not fits(name, x_shape, w_shape, geometry, torch.float32, device):
            continue
        x, w, bias = make(x_shape, device=device), make(w_shape, device=device), make(w_shape[0], device=device)
        packed = ops.pack_weight(w, geometry[3], name, "fp32")
        y = autograd.conv2d_packed(x, packed, w_shape, bias, None, *geometry, False, name, "fp32", activation, 0.0)
        cotangent = torch.randn_like(y)
        x64, w64, b64 = (t.detach().double().requires_grad_() for t in (x, w, bias))
        y64 = reference.conv2d(x64, w64, b64, *geometry, activation=None if activation == "none" else activation)
        result = torch.autograd.grad(y, (x, bias), cotangent)
        expected = torch.autograd.grad(y64, (x64, b64), cotangent.double())
        for found, wanted in zip(result, expected, strict=True):
            assert errors(found, wanted).relative_l2 < 1e-5


EPILOGUES = [
    {"activation": None},
    {"activation": "relu"},
    {"activation": "relu6"},
    {"activation": "silu"},
    {"activation": "leaky_relu", "negative_slope": 0.2},
    {"activation": "leaky_relu", "negative_slope": -0.3},
    {"activation": "leaky_relu", "negative_slope": 0.0},
    {"activation": "leaky_relu", "negative_slope": 0.1, "residual_after": True},
    {"activation": "silu", "residual_after": True},
    {"activation": "gelu"},
    {"activation": "gelu_tanh", "residual_after": True},
    {"activation": "hardswish"},
    {"activation": "sigmoid"},
    {"activation": "sigmoid", "residual_after": True},
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("algorithm", ["auto", "torch"])
def test_first_and_second_derivatives(shape, algorithm, device):
    """float32 gradients against PyTorch's float64 ones, of every argument, with every activation."""
    x_shape, w_shape, *geometry = SHAPES[shape]
    y_shape = [x_shape[0], w_shape[0], *ops.output_size(x_shape, w_shape, *geometry[:3])]
    for i, epilogue in enumerate(EPILOGUES):
        inputs = [make(s, device=device) for s in (x_shape, w_shape, w_shape[0], y_shape)]
        doubles = [t.detach().double().requires_grad_() for t in inputs]
        cotangent = make(y_shape, device=device)
        probes = [torch.randn_like(t) for t in inputs]

        def derivatives(function, tensors, cotangent, probes, **options):
            x, w, bias, residual = tensors
            y = function(x, w, bias, *geometry, residual=residual, **options)
            first = torch.autograd.grad(y, tensors, cotangent, create_graph=True)
            value = sum((f * p).sum() for f, p in zip(first, probes, strict=True))
            second = torch.autograd.grad(value, [x, w, cotangent])
            return [*first, *second]

        result = derivatives(
            fastconv.conv2d, inputs, cotangent, probes, algorithm=algorithm, precision="fp32", **epilogue
        )
        expected = derivatives(
            reference.conv2d, doubles, cotangent.detach().double().requires_grad_(), [p.double() for p in probes],
            **epilogue,
        )  # fmt: skip
        for found, wanted in zip(result, expected, strict=True):
            assert errors(found, wanted).relative_l2 < 2e-5, (i, epilogue)


@pytest.mark.parametrize("algorithm", ["auto", "torch"])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_gradcheck(algorithm, activation):
    """float64 goes through the same formulas."""
    tensors = [make(s, torch.float64) for s in ((1, 2, 3, 3), (2, 1, 2, 2), (2,), (1, 2, 4, 4))]

    def function(x, w, bias, residual):
        return fastconv.conv2d(
            x, w, bias, padding=1, groups=2, residual=residual, activation=activation, algorithm=algorithm
        )

    assert torch.autograd.gradcheck(function, tensors)
    assert torch.autograd.gradgradcheck(function, tensors)


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("algorithm", ["torch", "auto"])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_in_a_class_that_torch_is_not_switched_to(shape, algorithm, channels_last, device, monkeypatch):
    """The formulas with an explicit class, forced also where the switch agrees."""
    monkeypatch.setattr(plain, "is_of_class", lambda tensor, precision: False)
    x_shape, w_shape, *geometry = SHAPES[shape]
    inputs = [make(s, device=device, channels_last=channels_last) for s in (x_shape, w_shape)]
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    y = fastconv.conv2d(*inputs, None, *geometry, algorithm=algorithm, precision="fp32")
    cotangent = torch.randn_like(y)
    result = torch.autograd.grad(y, inputs, cotangent)
    expected = torch.autograd.grad(reference.conv2d(*doubles, None, *geometry), doubles, cotangent.double())
    for found, wanted in zip(result, expected, strict=True):
        assert errors(found, wanted).relative_l2 < 1e-5


def test_only_wanted_gradients_are_computed(device):
    x, w = make((1, 3, 5, 5), device=device), make((4, 3, 3, 3), device=device, requires_grad=False)
    y = fastconv.conv2d(x, w, activation="silu")
    y.sum().backward()
    assert x.grad is not None
    assert w.grad is None
    with torch.no_grad():
        assert fastconv.conv2d(x, w).grad_fn is None


def test_calls_below_autograd_are_seen_by_modes_and_subclasses():
    """What needs no gradient takes a shorter way to the kernel, which must not pass by those who listen."""
    seen = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x, w = torch.randn(1, 4, 5, 5), torch.randn(4, 4, 3, 3)
    expected = fastconv.conv2d(x, w)
    with Mode():
        assert torch.equal(fastconv.conv2d(x, w), expected)
    assert ops.conv2d_op in seen
    two = torch.testing._internal.two_tensor.TwoTensor(x, 2 * x)
    filters = torch.testing._internal.two_tensor.TwoTensor(w, w)
    geometry = ([1, 1], [0, 0], [1, 1], 1)
    y = autograd.conv2d(two, filters, None, None, *geometry, "direct", "fp32", "none", 0.0, 0)
    torch.testing.assert_close(y.b, 2 * y.a)
    leaf = x.clone().requires_grad_()
    with torch.inference_mode():
        assert fastconv.conv2d(leaf, w).is_inference()
    assert fastconv.conv2d(leaf.detach(), w, residual=expected.clone().requires_grad_()).requires_grad


def batch_of(tensor, dim, size):
    """A batch of tensors like `tensor` along `dim`, or the tensor itself for None."""
    return tensor if dim is None else torch.randn(size, *tensor.shape, dtype=tensor.dtype).movedim(0, dim)


@pytest.mark.parametrize("shape", ["3x3", "strided, grouped"])
@pytest.mark.parametrize("algorithm", ["auto", "direct"])
def test_vmap(shape, algorithm):
    x_shape, w_shape, *geometry = SHAPES[shape]
    y_shape = [x_shape[0], w_shape[0], *ops.output_size(x_shape, w_shape, *geometry[:3])]
    base = [torch.randn(s) for s in (x_shape, w_shape, w_shape[0], y_shape)]

    def call(x, w, bias, residual):
        return fastconv.conv2d(
            x, w, bias, *geometry, residual=residual, activation="relu", algorithm=algorithm, precision="fp32"
        )

    for in_dims in itertools.product((None, 0, 2), (None, 1), (None, 1), (None, 0)):
        if in_dims == (None,) * 4:
            continue
        args = [batch_of(t, d, 3) for t, d in zip(base, in_dims, strict=True)]
        expected = torch.stack(
            [
                reference.conv2d(
                    *[t if d is None else t.select(d, i) for t, d in list(zip(args, in_dims, strict=True))[:3]],
                    *geometry,
                    residual=args[3] if in_dims[3] is None else args[3][i],
                    activation="relu",
                )
                for i in range(3)
            ]
        )
        result = vmap(call, in_dims)(*args)
        assert errors(result, expected).relative_l2 < 1e-5, in_dims


def test_vmap_of_the_packed_operators():
    x, ws = torch.randn(3, 2, 4, 5, 5), torch.randn(3, 6, 4, 3, 3)
    packed = vmap(lambda w: ops.pack_weight(w, 1, "direct", "fp32"))(ws)
    geometry = ([1, 1], [1, 1], [1, 1], 1, False, "direct", "fp32", "none", 0.0)

    def call(x, p):
        return autograd.conv2d_packed(x, p, [6, 4, 3, 3], None, None, *geometry)

    expected = torch.stack([F.conv2d(a, w, padding=1) for a, w in zip(x, ws, strict=True)])
    torch.testing.assert_close(vmap(call)(x, packed), expected, rtol=1e-4, atol=1e-5)
    expected = torch.stack([F.conv2d(a, ws[0], padding=1) for a in x])
    torch.testing.assert_close(vmap(call, (0, None))(x, packed[0]), expected, rtol=1e-4, atol=1e-5)


def test_func_transforms():
    x, w = torch.randn(3, 2, 4, 5, 5).double(), torch.randn(6, 2, 3, 3).double()

    def ours(w, x):
        return fastconv.conv2d(x, w, padding=1, groups=2, activation="silu").square().sum()

    def theirs(w, x):
        return F.silu(F.conv2d(x, w, padding=1, groups=2)).square().sum()

    def compare(transform):
        torch.testing.assert_close(transform(ours), transform(theirs), rtol=1e-9, atol=1e-9)

    compare(lambda f: grad(f)(w, x[0]))
    compare(lambda f: vmap(grad(f), (None, 0))(w, x))  # per-sample gradients
    compare(lambda f: grad(lambda w: vmap(f, (None, 0))(w, x).sum())(w))
    compare(lambda f: grad(lambda w: grad(f)(w, x[0]).square().sum())(w))
    compare(lambda f: vmap(grad(f, argnums=(0, 1)))(torch.stack([w, 2 * w, -w]), x)[1])
    compare(lambda f: torch.func.jacrev(grad(f, argnums=1), argnums=1)(w, x[0, :1, :, :2, :2]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype, device):
    x, w, bias = (make(s, device=device) for s in ((2, 4, 6, 6), (8, 4, 3, 3), (8,)))
    with torch.autocast(device, dtype):
        y = fastconv.conv2d(x, w, bias, padding=1, activation="relu")
        assert fastconv.last_call()["class"] == {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
        assert F.conv2d(x, w, bias).dtype == y.dtype == dtype
        assert fastconv.conv2d(x.double(), w.double()).dtype == torch.float64
        packed = ops.pack_weight(w.to(dtype), 1, "direct", "fp32")
        again = autograd.conv2d_packed(
            x, packed, w.shape, bias, None, [1, 1], [1, 1], [1, 1], 1, False, "direct", "fp32", "relu", 0.0
        )
        assert again.dtype == dtype
    assert errors(again, reference.conv2d(x, w, bias, padding=1, activation="relu")).relative_l2 < 2e-2
    y.sum().backward()
    assert x.grad.dtype == w.grad.dtype == torch.float32


def test_fake_tensors_refuse_what_kernels_refuse():
    x, w = torch.empty(2, 4, 5, 5, device="meta"), torch.empty(6, 4, 3, 3, device="meta")
    for change in ({"groups": 2}, {"stride": 0}, {"padding": -1}, {"dilation": 3}, {"bias": x[0, 0, 0]}):
        with pytest.raises(RuntimeError, match="fastconv: "):
            fastconv.conv2d(x, w, **change)
