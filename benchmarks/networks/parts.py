"""What a network's time is made of: kernels by group, and its convolutions one by one at their fastest in cuDNN.

`cudnn_best_layers`, PyTorch with the best cuDNN algorithm of each layer, is no form that anybody can run; it is what
cuDNN could do: the sum over the network's convolutions of cuDNN's fastest time of that layer, as `bench layers` has it
(alone, from a cold L2), plus the time of all other kernels in that form of PyTorch's network where it is the least.
Launch gaps are left out, so it is a bound from below for everything that chooses among these algorithms.
"""

from __future__ import annotations

import collections
import copy
import gc
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import peers
from benchmarks.harness import profile, results
from benchmarks.harness.runs import SPENT
from benchmarks.layers import group as layer_group
from benchmarks.layers import sets
from benchmarks.layers.suite import ROW_KEY, groups_of
from fastconv import timing
from fastconv.models.layers import Layer

NAME = "cudnn_best_layers"
CONVOLUTIONS = dict.fromkeys(
    ("aten::convolution", "aten::_convolution", "aten::cudnn_convolution", "fastconv::", "mkldnn::_convolution"),
    "convolution",
)
LINEAR = dict.fromkeys(("aten::linear", "aten::addmm", "aten::mm", "mkldnn::_linear"), "linear")
OWN = "fastconv"  # the group of the convolutions that are fastconv's operators
GROUPS = profile.Groups(CONVOLUTIONS | LINEAR | {"fastconv::": OWN})


def kernel_groups(call: Callable[[], object], device: torch.device, passes: int = 3) -> dict[str, float]:
    """Microseconds of kernels by group (convolution, OWN, linear, other) in one pass of `call`: see `profile`."""
    return profile.kernel_groups(call, device, GROUPS, passes)


def convolutions(model: nn.Module, shape: Sequence[int]) -> collections.Counter[Layer]:
    """The convolutions that one forward pass of `model` (on an input of `shape`, N first) calls, and how often each.

    Raises ValueError for one whose stride, padding or dilation differs by axis: no layer of the suites is like it.
    """
    meta = copy.deepcopy(model).to("meta")
    found: collections.Counter[Layer] = collections.Counter()

    def note(module: nn.Conv2d, inputs: Any, output: Any) -> None:
        geometry = []
        for name in ("stride", "padding", "dilation"):
            first, second = getattr(module, name)
            if first != second:
                raise ValueError(f"{name} is ({first}, {second}); expected the same for both axes")
            geometry.append(first)
        c, h, w = inputs[0].shape[1:]
        r, s = module.kernel_size
        sizes = c, h, w, module.out_channels, r, s, *geometry, module.groups
        name = f"{c}->{sizes[3]} @{h}x{w} {r}x{s}"
        for letter, value, usual in (
            ("s", sizes[6], 1),
            ("p", sizes[7], r // 2),
            ("d", sizes[8], 1),
            ("g", sizes[9], 1),
        ):
            name += "" if value == usual else f" {letter}{value}"
        found[Layer(name, *sizes)] += 1

    for module in meta.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(note)
    with torch.no_grad():
        meta(torch.empty(tuple(shape), device="meta"))
    return found


def floor_us(model: nn.Module, shape: Sequence[int], cls: str, gpu: str) -> float:
    """The least time of the convolutions of a forward pass, one after the other, each at its own (layers/sets.py). gpu:
    the folder of its results. Raises ValueError as `convolutions`."""
    return sum(n * sets.floor_us(layer, shape[0], cls, gpu) for layer, n in convolutions(model, shape).items())


class BestLayers:
    """cuDNN's fastest times of single layers: from the files of `bench layers` of this machine that lie beside `path`,
    of whatever commit of ours, else measured, and kept in the file at `path`."""

    def __init__(self, path: Path | None, head: results.Document, device: torch.device, rounds: int = 20) -> None:
        self.path, self.device, self.rounds = path, device, rounds
        head = {**head, "suite": "network_layers"}
        self.document = results.merge(path, head, ROW_KEY) if path else {**head, "rows": []}
        self._known: dict[tuple[Any, ...], float] = {}
        for file in sorted(path.parent.glob("layers*.json")) if path else []:
            its = json.loads(file.read_text())
            if all(its.get(name) == head[name] for name in results.MACHINE):
                for row in its["rows"]:
                    if row["pass"] == "forward":
                        self._note(row)
        for row in self.document["rows"]:
            self._note(row)

    def _note(self, row: results.Row) -> None:
        if us := peers.best_of_cudnn(row):
            key = row["n"], row["class"], *(row[name] for name in results.GEOMETRY)
            self._known[key] = us

    def us(self, layer: Layer, n: int, cls: str) -> float | None:
        """None where no peer could run."""
        key = n, cls, *(getattr(layer, name) for name in results.GEOMETRY)
        if key not in self._known:
            ((dtype, tf32, members),) = groups_of([cls])
            group = layer_group.Group(layer, n, dtype, tf32, members, ("nhwc",), self.device)
            group.admits = peers.is_of_cudnn  # type: ignore[method-assign]
            try:
                rows = layer_group.measure(group, [], self.rounds, seed=0)
            except timing.DeviceLost:
                raise
            except Exception:
                timing.recover()
                return None
            finally:
                del group
                gc.collect()
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()
            for row in rows:
                results.put(self.document, row, ROW_KEY)
                self._note(row)
            if self.path:
                results.write(self.path, self.document)
        return self._known.get(key)

    def sum_us(
        self, layers: collections.Counter[Layer], n: int, cls: str, is_over: Callable[[], bool]
    ) -> tuple[float | None, str]:
        """(microseconds of all convolutions of a pass, each at its fastest; why there is none)."""
        total, done = 0.0, 0
        for layer, count in layers.items():
            if is_over():
                return None, f"{done} of {len(layers)} layers measured: {SPENT}"
            us = self.us(layer, n, cls)
            if us is None:
                return None, f"no peer ran {layer.layer}"
            total, done = total + count * us, done + 1
        return total, ""
