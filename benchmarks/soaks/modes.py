"""The models of `weights-soak`, and the modes in which they are called: what the documents promise of each about a
weight that changes (docs/using/swap.md, fuse.md and compile.md)."""

from __future__ import annotations

import copy
import itertools
import math
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import fastconv
from benchmarks.harness import ours
from benchmarks.harness.runs import LAYOUTS
from benchmarks.soaks.algorithms import random_layers
from fastconv.models.layers import Layer

Call = Callable[[Tensor], tuple[Tensor, ...]]


class Block(nn.Module):
    """A convolution with a norm and a ReLU, and one with a residual. folded: as `fuse` leaves it."""

    def __init__(self, layer: Layer, folded: bool) -> None:
        super().__init__()
        self.a = _conv(layer, bias=folded)
        self.norm = nn.Identity() if folded else nn.BatchNorm2d(layer.k)
        self.b = nn.Conv2d(layer.k, layer.k, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.a(x)))
        return torch.relu(self.b(y) + y)


class Dense(nn.Module):
    """A concatenation, and a norm before a convolution, which `fuse` and frozen compilation compute inside. Its values
    are wider than the input by channels that are no whole accesses, mostly."""

    def __init__(self, layer: Layer, folded: bool) -> None:
        super().__init__()
        self.a = nn.Conv2d(layer.c, layer.k, 3, padding=1)
        self.norm = nn.BatchNorm2d(layer.c + layer.k)
        self.b = nn.Conv2d(layer.c + layer.k, layer.k, layer.r, padding=layer.r // 2)
        self.c = nn.Conv2d(layer.k, layer.k, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([x, self.a(x)], 1)
        return self.c(torch.relu(self.b(torch.relu(self.norm(y)))))


def _conv(layer: Layer, bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(
        layer.c, layer.k, (layer.r, layer.s), layer.stride, layer.padding, layer.dilation, layer.groups, bias
    )


# Modules; True: as `fuse` leaves them.
KINDS: dict[str, Callable[[Layer, bool], nn.Module]] = {
    "conv2d": lambda layer, _: _conv(layer),
    "conv1d": lambda layer, _: nn.Conv1d(layer.c, layer.k, layer.s, layer.stride, layer.padding),
    "transposed": lambda layer, _: nn.ConvTranspose2d(layer.c, layer.k, layer.r, layer.stride, layer.padding),
    "block": Block,
    "dense": Dense,
}
LAYERS = ("conv2d", "conv2d", "conv2d", "conv1d", "transposed")


@dataclass
class Subject:
    """A model in a mode, which lives as long as its round."""

    name: str  # kind, layer, algorithm and layout: for who looks for a failure
    module: nn.Module  # what is written
    call: Call
    plain: nn.Module  # PyTorch's, of the same names
    exact: nn.Module  # in float64
    inputs: list[Tensor]
    terms: int  # of the longest sum
    allowed: float  # how many times PyTorch's error
    captured: Captured | None = None


@dataclass(frozen=True)
class Mode:
    """seen: the writes that the next call sees; None: all. Others it sees after `refresh`, and until then it is as
    before or as afterwards. again: the writes after which a graph is captured again."""

    make: Callable[[nn.Module, Asked], tuple[nn.Module, Call]]
    kinds: Sequence[str]
    seen: frozenset[str] | None = None
    again: frozenset[str] = frozenset()
    folds: bool = False  # the module is what `fuse` makes
    compiles: bool = False  # for a size, and in seconds: few models, one input
    halves: bool = False  # only: under autocast, of a model in float32
    trains: bool = False  # its calls give the gradient of the input, too
    on_gpu: bool = False
    weight: int = 8  # how often it is drawn


@dataclass(frozen=True)
class Asked:
    """How a model is to be called."""

    accuracy: str
    algorithm: str
    draw: random.Random
    example: Tensor
    arguments: dict[str, Any] = field(default_factory=dict)  # as swap_, fuse and compile take them


def _inferred(module: Callable[[Tensor], Tensor], draw: random.Random) -> Call:
    """In either way; compiled code would be of both, and is called in one."""

    def call(x: Tensor) -> tuple[Tensor, ...]:
        with draw.choice((torch.no_grad, torch.inference_mode))():
            return (module(x),)

    return call


def without_gradient(module: Callable[[Tensor], Tensor]) -> Call:
    def call(x: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (module(x),)

    return call


def _swapped(module: nn.Module, asked: Asked) -> tuple[nn.Module, Call]:
    fastconv.swap_(module, **asked.arguments)
    return module, _inferred(module, asked.draw)


def _frozen(module: nn.Module, asked: Asked) -> tuple[nn.Module, Call]:
    fastconv.swap_(module, frozen=True, **asked.arguments)
    return module, _inferred(module, asked.draw)


def with_gradient(module: nn.Module) -> Call:
    """Output and gradient of the input; the parameters' gradients are computed, too."""

    def call(x: Tensor) -> tuple[Tensor, ...]:
        leaf = x.detach().requires_grad_()
        y = module(leaf)
        y.backward(torch.ones_like(y).cumsum(-1) / y.shape[-1])
        for parameter in module.parameters():
            parameter.grad = None
        assert leaf.grad is not None
        return y.detach(), leaf.grad

    return call


def _trained(module: nn.Module, asked: Asked) -> tuple[nn.Module, Call]:
    fastconv.swap_(module, **asked.arguments)
    return module, with_gradient(module)


def autocast(module: Callable[[Tensor], Tensor], accuracy: str) -> Call:
    def call(x: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad(), torch.autocast(x.device.type, ours.dtype_of(accuracy)):
            return (module(x),)

    return call


def _autocast(module: nn.Module, asked: Asked) -> tuple[nn.Module, Call]:
    fastconv.swap_(module, **asked.arguments)
    return module, autocast(module, asked.accuracy)


def _function(module: Any, asked: Asked) -> tuple[nn.Module, Call]:
    geometry = module.stride, module.padding, module.dilation, module.groups

    def convolve(x: Tensor) -> Tensor:
        return fastconv.conv2d(x, module.weight, module.bias, *geometry, **asked.arguments)

    return module, _inferred(convolve, asked.draw)


def _fused(module: nn.Module, asked: Asked) -> tuple[nn.Module, Call]:
    fused = fastconv.fuse(module, **asked.arguments)
    return fused, _inferred(fused, asked.draw)


def _compiled(module: nn.Module, asked: Asked) -> tuple[nn.Module, Call]:
    return module, without_gradient(fastconv.compile(module, **asked.arguments))


def _compiled_frozen(module: nn.Module, asked: Asked) -> tuple[nn.Module, Call]:
    return module, without_gradient(fastconv.compile(module, frozen=True, **asked.arguments))


def _swapped_compiled(module: nn.Module, asked: Asked) -> tuple[nn.Module, Call]:
    fastconv.swap_(module, **asked.arguments)
    return module, without_gradient(torch.compile(module))


def _exported(module: nn.Module, asked: Asked) -> tuple[nn.Module, Call]:
    fastconv.swap_(module, **asked.arguments)
    with torch.no_grad():
        loaded = torch.export.export(module, (asked.example,)).module()
    return loaded, without_gradient(loaded)


class Captured:
    """A call in a CUDA graph, captured when it is called first, and again."""

    def __init__(self, call: Call, x: Tensor) -> None:
        self.call, self.x = call, x.clone(memory_format=torch.preserve_format)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.outputs: tuple[Tensor, ...] = ()

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.graph is None:
            self.call(self.x)  # packs, and makes plans
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.outputs = self.call(self.x)
        self.x.copy_(x)
        self.graph.replay()
        return tuple(output.clone() for output in self.outputs)

    def again(self) -> None:
        self.graph = None


def _graph(make: Callable[[nn.Module, Asked], tuple[nn.Module, Call]]) -> Callable[..., tuple[nn.Module, Call]]:
    def captured(module: nn.Module, asked: Asked) -> tuple[nn.Module, Call]:
        made, _ = make(module, asked)
        return made, Captured(without_gradient(made), asked.example)

    return captured


_BLOCKS = ("block", "dense")
_LOADS = frozenset({"load_state_dict", "assign", "to"})
_FROZEN = _LOADS | {"parameter", "new_data"}
_ANEW = frozenset({"assign", "to", "parameter", "new_data"})  # another memory than a graph has captured
MODES: dict[str, Mode] = {
    "swapped": Mode(_swapped, (*LAYERS, "block")),
    "trained": Mode(_trained, LAYERS, trains=True),
    "autocast": Mode(_autocast, (*LAYERS, "block"), halves=True),
    "frozen": Mode(_frozen, (*LAYERS, "block"), seen=_FROZEN),
    "function": Mode(_function, ("conv2d",)),
    "fused": Mode(_fused, _BLOCKS, seen=_LOADS, folds=True, weight=16),
    "compiled": Mode(_compiled, _BLOCKS, compiles=True),
    "compiled_frozen": Mode(
        _compiled_frozen, _BLOCKS, seen=frozenset({"load_state_dict", "assign"}), compiles=True, weight=1
    ),
    "swapped_compiled": Mode(_swapped_compiled, ("block",), compiles=True),
    "exported": Mode(_exported, (*LAYERS, "block"), compiles=True),
    "swapped_graph": Mode(_graph(_swapped), (*LAYERS, "block"), again=_ANEW, on_gpu=True, compiles=True),
    "fused_graph": Mode(
        _graph(_fused), _BLOCKS, seen=_LOADS, again=_ANEW, folds=True, on_gpu=True, compiles=True
    ),
}  # fmt: skip


def is_possible(mode: Mode, device: torch.device, halves: bool) -> bool:
    """Whether there is such a call on the device; halves: in a class of a half type."""
    return (device.type == "cuda" or not mode.on_gpu) and (halves or not mode.halves)


SIZES = ((48, 24, 4), (96, 32, 6))  # most channels, largest map and batch, on a CPU and on a GPU


def subject(mode: Mode, accuracy: str, draw: random.Random, device: torch.device) -> Subject:
    """A random model of the mode, with the algorithm and layout that it is drawn with."""
    kind = draw.choice(mode.kinds)
    own = ["auto", *(each.name for each in fastconv.algorithms() if each.family != "library")]
    while True:
        layer, n = next(random_layers(draw.randrange(2**32), *SIZES[device.type == "cuda"]))
        algorithm, layout = draw.choice(own), draw.choice(tuple(LAYOUTS))
        expected = _expected_error(kind, layer, n, accuracy, layout, algorithm, device)
        if expected is not None:
            break
    half = accuracy in ("fp16", "bf16")
    dtype = torch.float32 if mode.halves else ours.dtype_of(accuracy)
    order = LAYOUTS[layout]
    module = KINDS[kind](layer, False).eval().to(device, dtype)
    plain = KINDS[kind](layer, mode.folds).eval().to(device, dtype).requires_grad_(False)
    heights = (layer.h, layer.h + 3)[: 1 if mode.compiles else 2]  # of the second size another algorithm may be
    shapes = [(n, layer.c, layer.w + layer.s) if kind == "conv1d" else (n, layer.c, h, layer.w) for h in heights]
    inputs = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    if kind != "conv1d":
        module, plain = module.to(memory_format=order), plain.to(memory_format=order)
        inputs = [x.contiguous(memory_format=order) for x in inputs]
    arguments = {"algorithm": algorithm, "precision": None if half else ours.precision_of(accuracy)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of models in which a named algorithm fits nothing
        written, call = mode.make(module, Asked(accuracy, algorithm, draw, inputs[0], arguments))
    terms = max(layer.c + layer.k, layer.k) * layer.r * layer.s
    return Subject(
        f"{kind} {layer} batch {n} {layout} {algorithm}", written, call, plain, copy.deepcopy(plain).double(), inputs,
        terms, max(2.0 if half else 4.0, 1.5 * expected),
        captured=call if isinstance(call, Captured) else None,
    )  # fmt: skip


def _expected_error(
    kind: str, layer: Layer, n: int, accuracy: str, layout: str, algorithm: str, device: torch.device
) -> float | None:
    """Over PyTorch's, as the planner has it; of auto its widest limit. None if the algorithm does not fit."""
    if algorithm == "auto":
        return 4.0
    if kind in ("conv1d", "transposed"):  # other convolutions than the layer's, for algorithms that serve all
        return 4.0 if algorithm in ("direct", "im2col_gemm", "implicit_gemm") else None
    taller = Layer(**{**layer.fields(), "h": layer.h + 3})
    rows = [ours.candidates(each, n, accuracy, layout, device) for each in (layer, taller)]
    found = [row for row in itertools.chain(*rows) if row["algorithm"] == algorithm]
    return max(row["expected_error"] for row in found) if all(row["ok"] for row in found) else None


def serial_sum(terms: int) -> float:
    """What is expected of a sum of so many products, in roundoffs: docs/concepts/numerics.md, "Expected errors"."""
    return math.sqrt(0.15 + 0.044 * terms)
