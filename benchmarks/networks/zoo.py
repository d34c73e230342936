"""The networks that the suite can run: those of the demo, all of the corpus with square inputs, relatives of these, and
decoders of larger pictures."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.corpus.networks import DECODERS, RELATIVES, TABLE, Entry, Run
from fastconv import models
from fastconv.models import NETWORKS, Network

BATCHES = {"classify": 64, "detect": 8, "dense": 4, "generate": 1}  # of the corpus, by kind


class Called(nn.Module):
    """A model of the corpus that is called as its entry says."""

    def __init__(self, model: nn.Module, run: Run) -> None:
        super().__init__()
        self.model, self._run = model, run

    def forward(self, x: Tensor) -> Any:
        return self._run(self.model, x)


def comparable(name: str, output: Any) -> Tensor | tuple[Tensor, ...]:
    """What a network returned, as fastconv.models.compare takes it: of the corpus one row per picture, [N, values]."""
    return output if name in NETWORKS else torch.cat([tensor.flatten(1) for tensor in _tensors(output)], dim=1)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, Sequence) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


@functools.cache
def _corpus() -> dict[str, Entry]:
    square = (each for each in TABLE if each.name not in NETWORKS and each.size[1] == each.size[2])
    return {each.name: each for each in square} | DECODERS | RELATIVES


def names() -> list[str]:
    """Of all networks."""
    return [*NETWORKS, *_corpus()]


def network(name: str) -> Network:
    """Its batch, the side of its input, and how it is made. Raises ValueError for an unknown name."""
    if name in NETWORKS:
        return NETWORKS[name]
    if name not in _corpus():
        raise ValueError(f"network is {name!r}; expected one of {', '.join(names())}")
    entry = _corpus()[name]
    make = entry.make if entry.run is Entry.run else lambda: Called(entry.make(), entry.run)
    return Network(name, entry.size[1], BATCHES[entry.kind], make)


def channels(name: str) -> int:
    """Of its input."""
    return 3 if name in NETWORKS else _corpus()[name].size[0]


def build(name: str, *, image: int | None = None) -> nn.Module:
    """In eval mode, float32, on the CPU, the same weights every time; with 3 channels, batch norms have the statistics
    of photographs, as fastconv.models.build gives them."""
    if name in NETWORKS:
        return models.build(name, image=image)
    entry = network(name)
    model = models.seeded(entry)
    models.calibrate_(model, inputs(name, models.CALIBRATION_PICTURES, image or entry.image, seed=1))
    return model.eval()


def inputs(name: str, batch: int, image: int, *, seed: int = 0) -> Tensor:
    """[batch, C, image, image], float32, on the CPU: photographs, or, of other than 3 channels, normal noise."""
    if (c := channels(name)) == 3:
        return models.photographs(batch, image, seed=seed)
    return torch.randn(batch, c, image, image, generator=torch.Generator().manual_seed(seed))
