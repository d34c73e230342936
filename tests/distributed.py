"""Two processes that compute with swapped models in each way of torch.distributed, against one that is not swapped.

usage: python tests/distributed.py cpu|cuda FILE      writes {scenario: findings} as JSON; cuda: a GPU for each, NCCL
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

os.environ["FASTCONV_CACHE_DIR"] = ""

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fastconv

PROCESSES = 2


class Net(nn.Module):
    """With two convolutions that differ in nothing but their geometry, and read the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
        self.grouped = nn.Conv2d(8, 8, 3, padding="same", groups=2)
        self.wide = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.deep = nn.Conv2d(8, 8, 3, padding=0, stride=2, bias=False)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.grouped(self.stem(x))
        return self.head(self.pool(self.wide(x).square()) + self.pool(self.deep(x).square()))

    def pool(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


class PooledNet(Net):
    """The same function by an operator whose gradient is channels_last where its input is: that of a mean is not."""

    def pool(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x, x.shape[2:]).flatten(1)


class Views(nn.Module):
    """The layers that are views of a Conv2d."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 8, 4, stride=2, padding=1, bias=False)
        self.wide = nn.ConvTranspose2d(8, 4, 3)
        self.row = nn.Conv1d(4, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.row(self.wide(self.up(self.stem(x))).flatten(2))


Model = TypeVar("Model", bound=nn.Module)


def made(kind: type[Model]) -> Model:
    torch.manual_seed(0)
    return kind()


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().double()


def error(found: Tensor, expected: Tensor) -> float:
    return float((full(found) - expected).norm() / expected.norm())


def reference(x: Tensor, kind: type[nn.Module] = Net) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, gradient of the input and of the parameters of a model in float64, for the sum of squares."""
    model, x = made(kind).double(), x.double().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return y.detach(), x.grad, [p.grad for p in model.parameters()]


def compared(model: nn.Module, x: Tensor, whole: Tensor, kind: type[nn.Module] = Net) -> dict[str, Any]:
    """What the model computes of x, of which `whole` is all: errors of output and gradients, and how they lie."""
    expected, expected_x, expected_parameters = reference(whole, kind)
    x = x.detach().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    found = {"output": error(y, expected), "input gradient": error(x.grad, expected_x)}
    for (name, parameter), gradient in zip(model.named_parameters(), expected_parameters, strict=True):
        found[name] = error(parameter.grad, gradient)
    with torch.no_grad():
        found["inference"] = error(model(x), expected)
    return {"errors": found, "placements": str(getattr(y, "placements", None))}


def images(count: int = 4) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(1)
    return torch.randn(count, 3, 10, 13, generator=generator, device="cpu").to(torch.get_default_device())


def split(mesh: Any, x: Tensor, *placements: Any) -> Tensor:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x, mesh, placements)


def distributed(mesh: Any, dim: int | None, count: int, swap_first: bool) -> dict[str, Any]:
    """distribute_module, every parameter everywhere; the images everywhere, or split along dim."""
    from torch.distributed.tensor import Replicate, Shard, distribute_module

    model = made(Net)
    if swap_first:
        fastconv.swap_(model, strict=True)
    model = distribute_module(model, mesh)
    if not swap_first:
        fastconv.swap_(model, strict=True)
    x = images(count)
    found = compared(model, split(mesh, x, Replicate() if dim is None else Shard(dim)), x)
    return found | {"ours": type(model.wide) is fastconv.Conv2d}


def parts_of_filters(mesh: Any, dim: int) -> dict[str, Any]:
    """Convolutions with a part of their filters (0) or of their channels (1) in each process."""
    from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

    def partition(name: str, module: nn.Module, mesh: Any) -> None:
        if name in ("wide", "deep"):
            module.weight = nn.Parameter(distribute_tensor(module.weight.data, mesh, [Shard(dim)]))

    model = made(Net)
    fastconv.swap_(model, strict=True)
    return compared(distribute_module(model, mesh, partition), split(mesh, images(), Replicate()), images())


def views(mesh: Any, images_dim: int | None, weights_dim: int | None, swap_first: bool) -> dict[str, Any]:
    """Transposed and one-dimensional convolutions: their images, or their weights, in parts along a dimension."""
    from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

    def partition(name: str, module: nn.Module, mesh: Any) -> None:
        if name in ("up", "wide", "row") and weights_dim is not None:
            module.weight = nn.Parameter(distribute_tensor(module.weight.data, mesh, [Shard(weights_dim)]))

    model = made(Views)
    if swap_first:
        fastconv.swap_(model, strict=True)
    model = distribute_module(model, mesh, partition)
    if not swap_first:
        fastconv.swap_(model, strict=True)
    x = split(mesh, images(), Replicate() if images_dim is None else Shard(images_dim))
    kinds = (type(model.up), type(model.row))
    return compared(model, x, images(), Views) | {"ours": kinds == (fastconv.ConvTranspose2d, fastconv.Conv1d)}


def parallelized(mesh: Any, swap_first: bool) -> dict[str, Any]:
    """parallelize_module: a style for the convolutions, which gives each process a part of the batch, and PyTorch's
    own for the linear layer."""
    from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, parallelize_module

    class BatchParallel(ParallelStyle):
        def _apply(self, module: nn.Module, mesh: Any) -> nn.Module:
            return distribute_module(
                module,
                mesh,
                input_fn=lambda _, inputs, mesh: tuple(
                    x.redistribute(placements=[Shard(0)])
                    if hasattr(x, "redistribute")
                    else distribute_tensor(x, mesh, [Replicate()]).redistribute(placements=[Shard(0)])
                    for x in inputs
                ),
            )

    model = made(Net)
    if swap_first:
        fastconv.swap_(model, strict=True)
    plan: dict[str, Any] = {name: BatchParallel() for name in ("stem.0", "grouped", "wide", "deep")}
    plan["head"] = ColwiseParallel(output_layouts=Replicate(), use_local_output=False)
    parallelize_module(model, mesh, plan)
    if not swap_first:
        fastconv.swap_(model, strict=True)
    return compared(model, split(mesh, images(), Replicate()), images())


def fully_sharded(mesh: Any, swap_first: bool) -> dict[str, Any]:
    """fully_shard on one convolution and on the whole; each process has its part of the batch. undo() takes back."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    model: Any = made(Net)
    report = fastconv.swap_(model, strict=True) if swap_first else None
    fully_shard(model.wide, mesh=mesh)
    fully_shard(model, mesh=mesh)
    classes = [type(model.wide).__mro__[:3], type(model.stem[0])]
    if report is None:
        report = fastconv.swap_(model, strict=True)
    expected, _, gradients = reference(images())
    x = images().chunk(PROCESSES)[dist.get_rank()]
    y = model(x)
    (y.square().sum() * PROCESSES).backward()  # FSDP takes the mean over processes
    errors = {"output": error(y, expected.chunk(PROCESSES)[dist.get_rank()])}
    for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
        errors[name] = error(parameter.grad, gradient)
    with torch.no_grad():
        errors["inference"] = error(model(x), expected.chunk(PROCESSES)[dist.get_rank()])
    swapped = all(isinstance(m, fastconv.Conv2d) for m in (model.wide, model.deep, model.stem[0]))
    ran = [row.algorithm for row in report.rows]
    report.undo()
    with torch.no_grad():
        errors["undone"] = error(model(x), expected.chunk(PROCESSES)[dist.get_rank()])
    undone = [type(model.wide).__mro__[:3], type(model.stem[0])]
    if swap_first:
        classes = [(type(model.wide), FSDPModule, nn.Conv2d), nn.Conv2d]
    return {
        "errors": errors,
        "ours": swapped and "auto" not in ran and isinstance(model.wide, FSDPModule),
        "undone": report.undone and undone == classes,
    }


def data_parallel(mesh: Any) -> dict[str, Any]:
    """DistributedDataParallel around a swapped model."""
    model = made(Net)
    fastconv.swap_(model, strict=True)
    wrapped = nn.parallel.DistributedDataParallel(model)
    expected, _, gradients = reference(images())
    y = wrapped(images().chunk(PROCESSES)[dist.get_rank()])
    (y.square().sum() * PROCESSES).backward()
    errors = {"output": error(y, expected.chunk(PROCESSES)[dist.get_rank()])}
    errors |= {n: error(p.grad, g) for (n, p), g in zip(model.named_parameters(), gradients, strict=True)}
    return {"errors": errors}


class Checkpointed(nn.Module):
    """A part whose activations are computed again in the backward."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


STEPS, RATE = 3, 0.1


def trained(mesh: Any, sharded: bool, reentrant: bool | None = None) -> dict[str, Any]:
    """Steps of SGD on a swapped model in channels_last, under DistributedDataParallel or fully_shard, with some of its
    activations checkpointed or (None) not; against one process with the unswapped model in float64."""
    from torch.distributed.fsdp import fully_shard

    losses, parameters = steps(made(PooledNet).double(), images().double())
    model: Any = made(PooledNet)
    if not sharded:  # FSDP2 refuses parameters that are not contiguous
        model = model.to(memory_format=torch.channels_last)
    fastconv.swap_(model, strict=True)
    layers = [module for module in model.modules() if isinstance(module, fastconv.Conv2d)]
    if reentrant is not None:
        model.grouped, model.wide = Checkpointed(model.grouped, reentrant), Checkpointed(model.wide, reentrant)
    kept: list[bool] = []

    def note(module: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> None:
        (x,) = inputs
        kept.extend(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in (x, y))
        if x.requires_grad:  # its gradient is a layer's own
            x.register_hook(lambda gradient: kept.append(gradient.is_contiguous(memory_format=torch.channels_last)))

    for layer in layers:
        layer.register_forward_hook(note)
    if sharded:
        fully_shard(model.wide, mesh=mesh)
        fully_shard(model, mesh=mesh)
    wrapped = model if sharded else nn.parallel.DistributedDataParallel(model)
    found, _ = steps(wrapped, images().chunk(PROCESSES)[dist.get_rank()].contiguous(memory_format=torch.channels_last))
    mean = torch.tensor(found, dtype=torch.float64)
    dist.all_reduce(mean)
    errors = {"losses": error(mean / PROCESSES, torch.tensor(losses, dtype=torch.float64))}
    pairs = zip(model.named_parameters(), parameters, strict=True)
    errors |= {name: error(parameter, expected) for (name, parameter), expected in pairs}
    formats = [p.grad.stride() == p.stride() for p in model.parameters()]
    noted = len(kept) >= STEPS * (3 * len(layers) - 1)  # the images have no gradient
    return {"errors": errors, "channels_last": noted and all(kept) and all(formats)}


def steps(model: nn.Module, x: Tensor) -> tuple[list[float], list[Tensor]]:
    """The losses of some steps of SGD on x, and the parameters after them."""
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [full(parameter) for parameter in model.parameters()]


SCENARIOS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "replicated": lambda mesh: distributed(mesh, None, 4, True),
    "batch": lambda mesh: distributed(mesh, 0, 4, True),
    "uneven batch": lambda mesh: distributed(mesh, 0, 3, True),
    "channels of the images": lambda mesh: distributed(mesh, 1, 4, True),
    "rows of the images": lambda mesh: distributed(mesh, 2, 4, True),
    "batch, distributed before the swap": lambda mesh: distributed(mesh, 0, 4, False),
    "filters": lambda mesh: parts_of_filters(mesh, 0),
    "channels of the filters": lambda mesh: parts_of_filters(mesh, 1),
    "views, batch": lambda mesh: views(mesh, 0, None, True),
    "views, batch, distributed before the swap": lambda mesh: views(mesh, 0, None, False),
    "views, dimension 0 of the weights": lambda mesh: views(mesh, None, 0, True),
    "views, dimension 1 of the weights": lambda mesh: views(mesh, None, 1, True),
    "tensor parallel": lambda mesh: parallelized(mesh, True),
    "tensor parallel before the swap": lambda mesh: parallelized(mesh, False),
    "fully sharded": lambda mesh: fully_sharded(mesh, True),
    "fully sharded before the swap": lambda mesh: fully_sharded(mesh, False),
    "data parallel": data_parallel,
}
# Trained in channels_last, with activations kept, or computed again by each kind of checkpoint.
TRAINED: dict[str, Callable[[Any], dict[str, Any]]] = {
    f"{name}, {how}": functools.partial(trained, sharded=sharded, reentrant=reentrant)
    for name, sharded in (("data parallel", False), ("fully sharded", True))
    for how, reentrant in (("trained", None), ("checkpointed", False), ("checkpointed, reentrant", True))
}
SCENARIOS |= TRAINED


def process(rank: int, kind: str, store: str, result: str) -> None:
    torch.set_num_threads(1)
    if kind == "cuda":
        torch.cuda.set_device(rank)
        torch.set_default_device(torch.device(kind, rank))
        torch.backends.cudnn.allow_tf32 = False  # layers follow it, and so does F.conv2d, to which some fall back
    backend = {"cpu": "gloo", "cuda": "nccl"}[kind]
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=PROCESSES)
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(kind, (PROCESSES,))
    found = {}
    for name, scenario in SCENARIOS.items():
        try:
            found[name] = scenario(mesh)
        except Exception as exception:  # the same in both processes: the next scenario still runs
            found[name] = {"exception": f"{type(exception).__name__}: {exception}"}
    gathered: list[Any] = [None] * PROCESSES
    dist.all_gather_object(gathered, found)
    if rank == 0:
        Path(result).write_text(json.dumps(gathered))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = (sys.argv[1], f"{folder}/store", sys.argv[2])
        # A forked process has what is imported; of a process that has asked for GPUs CUDA does not work in it.
        method = "fork" if sys.argv[1] == "cpu" else "spawn"
        torch.multiprocessing.start_processes(process, arguments, PROCESSES, start_method=method)
