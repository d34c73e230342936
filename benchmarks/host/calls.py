"""What is called, by ours and by PyTorch, and how: a layer or a network in the forms in which it is used."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastconv
from benchmarks.harness.runs import time_limit

Call = Callable[[], Any]
# no_grad: in inference. forward: recorded for gradients, which nobody asks for. forward_backward: with the gradients of
# input and parameters. compile: torch.compile, in inference. threads_N: no_grad, by N threads on one module, each on a
# stream of its own, PER_THREAD calls of each: the time in which every thread makes one.
THREADS = {f"threads_{n}": n for n in (1, 2, 8)}
CALLS = ("no_grad", "forward", "forward_backward", "compile", *THREADS)
PER_THREAD = 20


class Block(nn.Module):
    """relu(norm(conv(x)) + residual): what a fused layer replaces."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv
        self.norm = nn.BatchNorm2d(conv.out_channels)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.activation(self.norm(self.conv(x)) + residual)


class Functional(nn.Module):
    """A function on a layer's parameters."""

    def __init__(self, conv: nn.Conv2d, function: Callable[..., Tensor] = F.conv2d) -> None:
        super().__init__()
        self.weight, self.bias, self.function = conv.weight, conv.bias, function
        self.geometry = conv.stride, conv.padding, conv.dilation, conv.groups

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, self.bias, *self.geometry)

    def ours(self) -> Functional:
        self.function = fastconv.conv2d
        return self


def _swapped(module: nn.Module, **options: Any) -> nn.Module:
    fastconv.swap_(module, **options)
    return module


@dataclass(frozen=True)
class Form:
    """peer: the name of PyTorch's module that stands beside it. calls: in which both are timed. plain: makes that
    module of a copy of the layer or network. ours: makes ours of another such module. residual: it reads one."""

    peer: str
    calls: tuple[str, ...]
    plain: Callable[[Any], nn.Module]
    ours: Callable[[Any], nn.Module]
    residual: bool = False


def _same(module: nn.Module) -> nn.Module:
    return module


def _frozen(module: nn.Module) -> nn.Module:
    return _swapped(module, frozen=True)


LAYER_FORMS = {
    "swapped": Form("nn.Conv2d", CALLS, _same, _swapped),
    "frozen": Form("nn.Conv2d", ("no_grad", "compile", *THREADS), _same, _frozen),
    "functional": Form("F.conv2d", CALLS[:3], Functional, Functional.ours),
    "fused": Form("modules", ("no_grad", "compile"), Block, fastconv.fuse, residual=True),
}
NETWORK_FORMS = {
    name: Form("network", ("no_grad",), _same, ours)
    for name, ours in (("swapped", _swapped), ("frozen", _frozen), ("fused", fastconv.fuse))
}


@dataclass
class Subject:
    """What is called: `base`, PyTorch's layer or network in eval mode, on x [N, C, H, W]; device, dtype and memory
    format are theirs. residual: of the output's shape, for the forms that read one."""

    base: nn.Module
    x: Tensor
    residual: Tensor | None
    forms: dict[str, Form]
    compile_limit_s: float | None = None
    deadline: float | None = None  # as that of networks.forms.Case

    def module(self, name: str, ours: bool) -> nn.Module:
        """PyTorch's module of a form, or ours."""
        form = self.forms[name]
        module = form.plain(copy.deepcopy(self.base)).to(self.x.device, self.x.dtype).eval()
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return form.ours(module) if ours else module

    def arguments(self, name: str, gradient: bool = False) -> tuple[Tensor, ...]:
        x = self.x.detach().requires_grad_(gradient)
        return (x, self.residual) if self.forms[name].residual and self.residual is not None else (x,)

    def call(self, name: str, module: nn.Module, how: str) -> Call:
        """One call of a form's module in a way of CALLS; compiled where it has to be."""
        arguments = self.arguments(name, how in ("forward", "forward_backward"))
        if how == "forward":
            return lambda: module(*arguments)
        if how == "forward_backward":
            return _with_gradients(module, arguments)
        if how in THREADS:
            return _by_threads(module, arguments, THREADS[how])
        run: Callable[..., Any] = module
        if how == "compile":
            run = torch.compile(module, dynamic=False)
            with torch.no_grad(), time_limit(self.compile_limit_s, self.deadline):
                run(*arguments)

        def without_gradients() -> Any:
            with torch.no_grad():
                return run(*arguments)

        return without_gradients

    def output(self, name: str, module: nn.Module, dtype: torch.dtype | None = None) -> Tensor:
        """What the module computes, in another dtype if asked for."""
        with torch.no_grad():
            module = module if dtype is None else copy.deepcopy(module).to(dtype)
            y: Tensor = module(*(tensor.to(dtype or tensor.dtype) for tensor in self.arguments(name)))
        return y


def _with_gradients(module: nn.Module, arguments: tuple[Tensor, ...]) -> Call:
    with torch.no_grad():
        gradient = torch.randn_like(module(*arguments))
    leaves = [arguments[0], *module.parameters()]

    def run() -> None:
        module(*arguments).backward(gradient)
        for leaf in leaves:  # as zero_grad() does
            leaf.grad = None

    return run


def _by_threads(module: nn.Module, arguments: tuple[Tensor, ...], count: int) -> Call:
    device = arguments[0].device
    pool = ThreadPoolExecutor(count)
    begin = threading.Barrier(count)  # a thread each, although one might be done before the next begins
    streams = [torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(count)]

    def work(stream: torch.cuda.Stream | None) -> None:
        begin.wait()
        with torch.no_grad(), torch.cuda.stream(stream):  # type: ignore[arg-type]
            for _ in range(PER_THREAD):
                module(*arguments)
        if stream is not None:
            stream.synchronize()

    return lambda: list(pool.map(work, streams))
