"""What is not built, and what it could save at most: bytes that it would not move at the card's measured bandwidth, and
gaps between launches, beside the times of committed rows. Nothing is timed here.

Convolutions are taken as they are, although statistics, norms and masks in their loaders and epilogues cost them time:
each number is a bound from above for what is saved.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import results
from benchmarks.layers.sets import bandwidth_of
from benchmarks.networks import zoo

TRAINED = "resnet50"
KEPT = ("convolution", "conversion", "pool", "linear", "optimizer", "other")  # groups of a step that no design touches
FILTERS, EXPONENTIALS = (
    128,
    16 * 132 * 1.98e9,
)  # of a block's tile; a second's on an H100 (16 a clock and multiprocessor)
SIZES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "amp_fp16": 2, "amp_bf16": 2}  # bytes of an activation


@dataclass(frozen=True)
class Passes:
    """Passes of memory over the outputs of batch norms and of joins (the sums that blocks of a residual network end
    with), of a step, that are no convolution's own reading or writing."""

    norm: int
    join: int

    def bytes(self, norms: int, joins: int, size: int) -> float:
        return (self.norm * norms + self.join * joins) * size


# Forward + backward, reads and writes, of a norm with its ReLU, and of a join.
DESIGNS = {
    # Norm: statistics 1, normalise 2, ReLU in place 2; backward ReLU 3, sums 2, gradient 3. Join: 3 and 3.
    "PyTorch, eager": Passes(13, 6),
    # Norm and ReLU (and sum) in one kernel: 1 + 2; sums 2, gradient 3. Join: one read more; one, one and a write more.
    "PyTorch, compiled": Passes(8, 4),
    # Statistics in the epilogue, norm + ReLU in the loader; backward as compiled. Join: read and written once more.
    "forward in convolutions": Passes(5, 5),
    # And the sums of backward in the epilogue of the input gradient, which reads the norm's input for it; the gradient
    # of the norm in the loaders of both gradients, which read that input beside it. Join: 2 and 2.
    "all in convolutions": Passes(3, 4),
}


def _outputs(model: nn.Module, shape: Sequence[int], *kinds: type[nn.Module]) -> list[tuple[nn.Module, int]]:
    """The modules of these kinds that a forward pass calls, each with its output's elements."""
    found: list[tuple[nn.Module, int]] = []
    meta = copy.deepcopy(model).to("meta")

    def note(module: nn.Module, inputs: Any, output: Tensor) -> None:
        found.append((module, output.numel()))

    for module in meta.modules():
        if isinstance(module, kinds):
            module.register_forward_hook(note)
    with torch.no_grad():
        meta(torch.empty(tuple(shape), device="meta"))
    return found


def _model(name: str) -> nn.Module:
    with torch.device("meta"):
        return zoo.network(name).make()


def _ms(moved: float, gpu: str) -> float:
    return moved / bandwidth_of(gpu) * 1e3


def _rows(folder: Path, suite: str, **wanted: Any) -> list[results.Row]:
    """Of a committed file; [] if there is none."""
    path = folder / f"{suite}.json"
    rows = results.read(path)["rows"] if path.is_file() else []
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def training(folder: Path, say: Callable[[str], None]) -> None:
    """A step's norms and elementwise kernels by bytes, in each design, and what the step's kernels would then take."""
    gpu, model = folder.name, _model(TRAINED)
    ends = ("Bottleneck", "BasicBlock")
    for row in _rows(folder, "training", network=TRAINED, mode="eager"):
        shape = row["batch"], 3, row["image"], row["image"]
        norms = sum(elements for _, elements in _outputs(model, shape, nn.BatchNorm2d))
        joins = sum(n for module, n in _outputs(model, shape, nn.Module) if type(module).__name__ in ends)
        theirs = row["peer_groups"]["tf32_torch_eager" if row["class"] == "fp32" else row["best_peer"]]
        kept = {ours: sum(groups[name] for name in KEPT) / 1e3
                for ours, groups in ((True, row["groups"]), (False, theirs))}  # fmt: skip
        measured = (row["groups"]["norm"] + row["groups"]["elementwise"]) / 1e3
        say(
            f"{TRAINED} {row['class']}, batch {row['batch']}: {norms / 1e6:.0f} million values of norms, "
            f"{joins / 1e6:.0f} of joins; norms and elementwise measured {measured:.1f} ms; all else ours "
            f"{kept[True]:.1f}, PyTorch's {kept[False]:.1f} (for fp32 in TF32)"
        )
        rival = None
        for name, passes in DESIGNS.items():
            around = _ms(passes.bytes(norms, joins, SIZES[row["class"]]), gpu)
            step = kept["PyTorch" not in name] + around
            if name == "PyTorch, compiled":
                rival = step
            ratio = f", {rival / step:.2f} times compiled PyTorch" if rival and "PyTorch" not in name else ""
            say(f"  {name}: {around:.2f} ms by bytes, kernels of a step {step:.1f}{ratio}")


def around(folder: Path, say: Callable[[str], None]) -> None:
    """Inference: stems with their pool, chains of bottlenecks, group norms, each in bytes that stay on chip."""
    gpu, resnet, decoder = folder.name, _model("resnet50"), _model("sd_vae_decoder")
    for cls in ("fp32", "fp16"):
        size = SIZES[cls]
        (row,) = _rows(folder, "networks", network="resnet50", mode="fused_graph", **{"class": cls})
        shape, now = (row["batch"], 3, 224, 224), row["us"] / 1e3
        convolutions = _outputs(resnet, shape, nn.Conv2d)
        stem = _ms(2 * convolutions[0][1] * size, gpu)
        narrow = sum(n for module, n in convolutions[1:] if _is_narrow(module))
        chains = _ms(2 * narrow * size, gpu)
        say(
            f"resnet50 {cls}: {now:.2f} ms; stem's output written and read {stem:.3f}, "
            f"narrow tensors of bottlenecks {chains:.2f}"
        )
        (row,) = _rows(folder, "networks", network="sd_vae_decoder", mode="compile", **{"class": cls})
        norms = _outputs(decoder, (row["batch"], 4, 64, 64), nn.GroupNorm)
        moved = sum(n for _, n in norms) * size
        again = sum(
            n * max(1, module.num_channels // FILTERS) for module, n in norms if isinstance(module, nn.GroupNorm)
        )
        say(
            f"sd_vae_decoder {cls}: {row['us'] / 1e3:.2f} ms; {len(norms)} group norms read twice and write once "
            f"{_ms(3 * moved, gpu):.2f}, the moments' read alone {_ms(moved, gpu):.2f}; SiLU in loaders of blocks of "
            f"{FILTERS} filters: {again / 1e6:.0f} million, {again / EXPONENTIALS * 1e3:.2f} for an exponential of each"
        )


def _is_narrow(module: nn.Module) -> bool:
    """Whether it is one of the first two convolutions of a bottleneck: its output is read by the next one alone."""
    return isinstance(module, nn.Conv2d) and (module.kernel_size != (1, 1) or module.in_channels > module.out_channels)


def launches(folder: Path, say: Callable[[str], None]) -> None:
    """Networks in a graph over the sum of their kernels: what lies between launches."""
    for suite in ("networks", "papers/single_image/networks"):
        for row in _rows(folder, suite, mode="fused_graph"):
            its = {name: row[name] for name in ("network", "batch", "class")}
            for fused in _rows(folder, suite, mode="fused", **its):
                if row["us"] and fused["groups"]:
                    kernels = sum(fused["groups"].values())
                    between = row["us"] - kernels
                    say(
                        f"{row['network']} {row['class']}, batch {row['batch']}: graph {row['us']:.0f} us, kernels "
                        f"{kernels:.0f}, between {between:.0f} ({between / kernels:.1%}), "
                        f"{between / row['total']:.2f} for each of {row['total']} convolutions"
                    )


def run(folder: Path, say: Callable[[str], None] = print) -> None:
    """All of it, of a folder of results of one GPU. Raises ValueError where it has none of training."""
    if not _rows(folder, "training"):
        raise ValueError(f"folder is {folder}; expected one of benchmarks/results with training.json")
    for part in (training, around, launches):
        part(folder, say)
