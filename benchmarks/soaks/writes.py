"""The ways of writing a parameter or a buffer of a module: what `weights-soak` does between two calls."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Write = Callable[[random.Random, nn.Module, str], None]  # of the tensor with that name


def names(module: nn.Module) -> list[str]:
    """What can be written: everything but counters."""
    return [name for name, value in module.state_dict().items() if value.is_floating_point()]


def drawn(draw: random.Random, module: nn.Module) -> str:
    """One of them, filters mostly."""
    known = names(module)
    filters = [name for name in known if module.state_dict()[name].dim() > 1]
    return draw.choice(filters if draw.random() < 0.6 else known)


def fresh(name: str, value: Tensor) -> Tensor:
    """Another value of like magnitude."""
    other = torch.randn(value.shape, device=value.device, dtype=torch.float32)
    if name.endswith("var"):
        other = other.abs() + 0.5
    elif value.dim() > 1:
        other /= value[0].numel() ** 0.5
    return torch.empty_like(value, requires_grad=False).copy_(other)


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


def _found(module: nn.Module, name: str) -> Any:
    owner, leaf = _owner(module, name)
    return getattr(owner, leaf)


def _over(draw: random.Random, name: str, value: Tensor) -> None:
    """Writes over all of it, a part of it, or one element."""
    other = fresh(name, value)
    index = draw.randrange(len(value))
    match draw.choice(("all", "all", "one of them", "one element")):
        case "all":
            value.copy_(other)
        case "one of them":
            value[index].copy_(other[index])
        case _:
            place = index, *[-1] * (value.dim() - 1)
            value[place] = 3.0


def in_place(draw: random.Random, module: nn.Module, name: str) -> None:
    value = _found(module, name)
    with torch.no_grad():
        if draw.random() < 0.3:
            torch._foreach_copy_([value], [fresh(name, value)])
        else:
            _over(draw, name, value)


def inference(draw: random.Random, module: nn.Module, name: str) -> None:
    with torch.inference_mode():
        _over(draw, name, _found(module, name))


def data(draw: random.Random, module: nn.Module, name: str) -> None:
    _over(draw, name, _found(module, name).data)


def new_data(draw: random.Random, module: nn.Module, name: str) -> None:
    value = _found(module, name)
    value.data = fresh(name, value)


def numpy(draw: random.Random, module: nn.Module, name: str) -> None:
    value = _found(module, name).detach()
    value.numpy()[...] = fresh(name, value).numpy()


def parameter(draw: random.Random, module: nn.Module, name: str) -> None:
    owner, leaf = _owner(module, name)
    value = getattr(owner, leaf)
    other = fresh(name, value)
    setattr(owner, leaf, nn.Parameter(other, value.requires_grad) if isinstance(value, nn.Parameter) else other)


def optimizer(draw: random.Random, module: nn.Module, name: str) -> None:
    """A step with a gradient as it may be. A buffer is none of an optimizer's: it is averaged, as a norm does."""
    value = _found(module, name)
    if not isinstance(value, nn.Parameter):
        value.lerp_(fresh(name, value), 0.5)
        return
    value.grad = fresh(name, value)
    kind: Any = draw.choice((torch.optim.SGD, torch.optim.Adam))
    step = {"foreach": True} if draw.random() < 0.5 else {"fused": True} if draw.random() < 0.5 else {}
    kind([value], lr=0.5, **step).step()
    value.grad = None


def _state(draw: random.Random, module: nn.Module, name: str) -> dict[str, Tensor]:
    """Another state: of the tensor alone, or of all."""
    wanted = [name] if draw.random() < 0.5 else names(module)
    return {key: fresh(key, value) if key in wanted else value for key, value in module.state_dict().items()}


def load_state_dict(draw: random.Random, module: nn.Module, name: str) -> None:
    module.load_state_dict(_state(draw, module, name))


def assign(draw: random.Random, module: nn.Module, name: str) -> None:
    module.load_state_dict(_state(draw, module, name), assign=True)


def to(draw: random.Random, module: nn.Module, name: str) -> None:
    """To another dtype or device, where it is written, and back; into either memory format at last."""
    value = _found(module, name)
    dtype, device = value.dtype, value.device
    if device.type == "cuda" and draw.random() < 0.5:
        module.cpu()
    else:
        module.double()
    _over(draw, name, _found(module, name).data)
    module.to(device=device, dtype=dtype)
    if draw.random() < 0.5:
        module.to(memory_format=draw.choice((torch.contiguous_format, torch.channels_last)))
        if torch.__version__ < "2.14":  # whose compiled code does not see that (docs/using/limits.md)
            torch.compiler.reset()


def replay(draw: random.Random, module: nn.Module, name: str) -> None:
    """The replay of a captured graph."""
    value = _found(module, name).detach()
    other = fresh(name, value)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value.copy_(other)
    graph.replay()
    torch.cuda.synchronize()  # before the graph, and what it reads, is gone


WRITES: dict[str, Write] = {
    "in_place": in_place, "inference": inference, "data": data, "new_data": new_data, "numpy": numpy,
    "parameter": parameter, "optimizer": optimizer, "load_state_dict": load_state_dict, "assign": assign, "to": to,
    "replay": replay,
}  # fmt: skip


def is_possible(write: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a tensor there can be written so."""
    if write == "replay":
        return device.type == "cuda"
    return write != "numpy" or (device.type == "cpu" and dtype != torch.bfloat16)
