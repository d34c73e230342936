"""Forward-mode derivatives: no tangent is lost, however the mode is entered or nested."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.func import grad, hessian, jvp, vmap
from torch.utils._pytree import tree_leaves

import fastconv
from fastconv import ops
from fastconv.ops import autograd

ACTIVATIONS = {
    None: lambda y: y,
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "leaky_relu": lambda y: F.leaky_relu(y, 0.3),
}


def tensors(seed):
    """Input, weight, bias, residual."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (2, 4, 6, 6), (4, 2, 3, 3), (4,), (2, 4, 2, 4)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


ARGS, TANGENTS = tensors(0), tensors(1)


def dual(f, which):
    with forward_ad.dual_level():
        args = [forward_ad.make_dual(a, TANGENTS[i]) if i in which else a for i, a in enumerate(ARGS)]
        return forward_ad.unpack_dual(f(*args)).tangent


def dual_cotangent(f):
    x = ARGS[0].clone().requires_grad_()
    y = f(x, *ARGS[1:])
    with forward_ad.dual_level():
        (gradient,) = torch.autograd.grad(y, x, forward_ad.make_dual(ARGS[3], TANGENTS[3]))
        return forward_ad.unpack_dual(gradient).tangent


def loss_gradients(f):
    return grad(lambda *args: f(*args).square().sum(), argnums=(0, 1))


USES = {
    "input": lambda f: dual(f, [0]),
    "weight": lambda f: dual(f, [1]),
    "bias and residual": lambda f: dual(f, [2, 3]),
    "all": lambda f: dual(f, range(4)),
    "without gradients": torch.no_grad()(lambda f: dual(f, [0, 1])),
    "of a gradient made before": dual_cotangent,
    "jvp": lambda f: jvp(f, ARGS, TANGENTS)[1],
    "jvp of jvp": lambda f: jvp(lambda *args: jvp(f, args, TANGENTS)[1], ARGS, TANGENTS)[1],
    "jvp of grad": lambda f: jvp(loss_gradients(f), ARGS, TANGENTS)[1],
    "grad of jvp": lambda f: loss_gradients(lambda *args: jvp(f, args, TANGENTS)[1])(*ARGS),
    "hessian": lambda f: hessian(lambda b: f(*ARGS[:2], b, ARGS[3]).square().sum())(ARGS[2]),
    "vmap of jvp": lambda f: vmap(lambda x: jvp(lambda w: f(x, w, *ARGS[2:]), ARGS[1:2], TANGENTS[1:2])[1])(
        torch.stack([ARGS[0], TANGENTS[0]])
    ),
    "compiled": lambda f: torch.compile(lambda: jvp(f, ARGS, TANGENTS)[1], fullgraph=True, backend="aot_eager")(),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("use", USES)
def test_tangents_are_those_of_torch(use, activation):
    if use == "of a gradient made before" and activation == "silu":
        pytest.skip("PyTorch has no forward derivative of silu_backward")
    torch._dynamo.reset()
    geometry = {"stride": (2, 1), "padding": (0, 0), "groups": 2}

    def ours(x, w, bias, residual):
        return fastconv.conv2d(
            x, w, bias, **geometry, residual=residual, activation=activation, negative_slope=0.3, algorithm="auto"
        )

    def theirs(x, w, bias, residual):
        return ACTIVATIONS[activation](F.conv2d(x, w, bias, **geometry) + residual)

    for found, wanted in zip(tree_leaves(USES[use](ours)), tree_leaves(USES[use](theirs)), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def test_a_packed_weight_says_that_it_has_none():
    x, w = torch.randn(1, 4, 5, 5), torch.randn(4, 4, 3, 3)
    packed = ops.pack_weight(w, 1, "direct", "fp32")
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward mode"):
        autograd.conv2d_packed(
            forward_ad.make_dual(x, x), packed, w.shape, None, None, [1, 1], [0, 0], [1, 1], 1, False, "direct", "fp32",
            "none", 0.0,
        )  # fmt: skip
