"""What the tests of layers that stand between convolutions share: max-pools and upsamplings, PyTorch's in all but their
kernels."""

import copy
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from fusing import fuse_quietly, sequence
from torch import Tensor, nn

Form = Callable[[Tensor], Tensor]


def special(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random values with NaN, infinities and zeros of both signs among them."""
    x = torch.randn(shape).to(dtype)
    chosen = torch.rand(shape)
    for i, value in enumerate((math.nan, math.inf, -math.inf, 0.0, -0.0)):
        x[(chosen > 0.06 * i) & (chosen < 0.06 * i + 0.02)] = value
    return x


def check_transforms(forms: Sequence[Form], theirs: Form, x: Tensor, least: int) -> None:
    """Gradients, torch.func and inference mode give what they give of PyTorch's. least: the image size of a hessian."""
    v = torch.randn_like(x)

    def squares(f: Form) -> Form:
        return lambda x: (f(x) ** 2).sum()

    transforms: Sequence[Callable[[Form, Tensor], Tensor]] = (
        lambda f, x: torch.func.grad(squares(f))(x),
        lambda f, x: torch.func.vmap(f)(x.expand(4, *x.shape)),
        lambda f, x: torch.func.vmap(f, in_dims=1)(x.expand(4, *x.shape).transpose(0, 1)),
        lambda f, x: torch.func.vmap(torch.func.grad(squares(f)))(x.expand(4, *x.shape)),
        lambda f, x: torch.func.jvp(f, (x,), (v,))[1],
        lambda f, x: torch.func.hessian(squares(f))(x[:1, :1, :least, :least]),
    )
    for ours in forms:
        y = squares(ours)(x.requires_grad_())
        torch.testing.assert_close(torch.autograd.grad(y, x)[0], torch.autograd.grad(squares(theirs)(x), x)[0])
        x = x.detach()
        for transform in transforms:
            torch.testing.assert_close(transform(ours, x), transform(theirs, x))
        with torch.autocast(x.device.type, torch.bfloat16):
            assert ours(x).dtype is torch.float32
        with torch.inference_mode():
            assert torch.equal(ours(x), theirs(x))


def check_traced(layer: nn.Module, operator: Form, x: Tensor) -> None:
    """Compiled, exported, scripted, traced: the same values, by PyTorch's own operators where others read a graph."""
    expected = layer(x)
    for function in (layer, operator):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
        assert torch.equal(compiled(x), expected)
    program = torch.export.export(layer, (x,))
    assert torch.equal(program.module()(x), expected)
    assert not any("fastconv" in str(node.target) for node in program.graph.nodes)  # PyTorch's: Inductor knows it
    with torch.no_grad():
        assert torch.equal(torch.jit.script(layer)(x), expected)
        assert torch.equal(torch.jit.trace(layer, x)(x), expected)
    assert torch.equal(torch.fx.symbolic_trace(sequence(layer))(x), expected)


def check_captured(layer: nn.Module, theirs: Form, x: Tensor) -> None:
    """In a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(y, theirs(x))


def ran(operator: str, function: Callable[[], Any]) -> str:
    """Whose operator of a name that begins so a call ran, as PyTorch's profiler tells."""
    with torch.profiler.profile() as profile:
        function()
    names = {event.name.partition("::") for event in profile.events()}  # kernels' begin otherwise
    return " and ".join(sorted({library for library, _, name in names if name.startswith(operator)}))


def again(fused: Any, x: Tensor) -> Iterator[Any]:
    """Copies of a fused model, each of which computes the same."""
    for copied in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused)), fuse_quietly(fused)):
        assert torch.equal(copied(x), fused(x))
        yield copied
