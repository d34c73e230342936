"""Writes problems.json: `python -m benchmarks.corpus.trace`, with torchvision, timm, diffusers and
segmentation-models-pytorch installed. Shapes travel through PyTorch's meta device."""

from __future__ import annotations

import contextlib
import json
import random
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.corpus import DEFAULTS, PATH
from benchmarks.corpus.networks import TABLE, Entry, Run

BATCHES = (1, 8, 32)
SEED = 25
MAX_BYTES = 4 << 30  # of input and output in float32: beyond it no GPU of ours would train the network
FIELDS = ("n", "c", "h", "w", "k", "r", "s", *list(DEFAULTS)[:-1])
Problem = tuple[int, ...]  # in the order of FIELDS


class _Recorder(TorchDispatchMode):
    """Counts two-dimensional convolutions, modules or not; transposed and other ones are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Problem] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution.default:
            x, weight, _, stride, padding, dilation, transposed, _, groups = args
            if x.dim() == 4 and not transposed:
                problem = (*x.shape, weight.shape[0], *weight.shape[2:], *stride, *padding, *dilation, groups)
                self.found[problem] += 1
        return func(*args, **(kwargs or {}))


def convolutions(model: nn.Module, size: Iterable[int], run: Run = lambda model, x: model(x)) -> Counter[Problem]:
    """The convolutions of model(x [N, C, H, W]), a model on the meta device, with how many layers each is of."""
    recorder = _Recorder()
    with torch.no_grad(), recorder:
        run(model, torch.empty(tuple(size), device="meta"))
    return recorder.found


def build(entry: Entry) -> nn.Module:
    """On the meta device; by way of the CPU where the network cannot be made there."""
    try:
        with torch.device("meta"):
            return entry.make().eval()
    except (RuntimeError, NotImplementedError):
        return entry.make().eval().to("meta")


def split(entries: Iterable[Entry]) -> dict[str, str]:
    """The side of each network. Families go as a whole. A family belongs to the kind that most of its networks are of;
    of each kind the families, in an order shuffled by SEED, judge until they have a third of its networks."""
    members: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        members[entry.family].append(entry)
    kinds: dict[str, list[str]] = defaultdict(list)
    for family in sorted(members):
        kinds[Counter(entry.kind for entry in members[family]).most_common(1)[0][0]].append(family)
    sides: dict[str, str] = {}
    shuffle = random.Random(SEED).shuffle
    for kind in sorted(kinds):
        families = kinds[kind]
        shuffle(families)
        total = sum(len(members[family]) for family in families)
        judging = 0
        for family in families:
            # A family that would overshoot the third by more than it lacks fits.
            judges = 2 * judging + len(members[family]) <= 2 * total / 3 + 1e-9
            judging += len(members[family]) * judges
            sides |= {entry.name: "judge" if judges else "fit" for entry in members[family]}
    return sides


def rows(found: dict[str, Counter[Problem]], sides: dict[str, str]) -> Iterator[dict[str, Any]]:
    """A row per problem. One that networks of both sides have is fitted on: what judges is new to the models."""
    networks: dict[Problem, list[str]] = defaultdict(list)
    layers: Counter[Problem] = Counter()
    for name, counts in found.items():
        for problem, count in counts.items():
            networks[problem].append(name)
            layers[problem] += count
    for problem in sorted(networks):
        row = {name: int(value) for name, value in zip(FIELDS, problem, strict=True)} | {"layers": layers[problem]}
        names = networks[problem]
        side = "judge" if all(sides[name] == "judge" for name in names) else "fit"
        yield _compact(row) | {"networks": names, "split": side}


def _compact(row: dict[str, int]) -> dict[str, int]:
    """Without what is as usual; of height and width both or neither."""
    usual = {name for name, value in row.items() if DEFAULTS.get(name) == value}
    pairs = [{f"{name}_h", f"{name}_w"} for name in ("stride", "pad", "dilation")]
    usual -= {name for pair in pairs if not pair <= usual for name in pair}
    return {name: value for name, value in row.items() if name not in usual}


def is_small(problem: Problem) -> bool:
    n, c, h, w, k, r, s, step_h, step_w, pad_h, pad_w, far_h, far_w, _ = problem
    p, q = (h + 2 * pad_h - far_h * (r - 1) - 1) // step_h + 1, (w + 2 * pad_w - far_w * (s - 1) - 1) // step_w + 1
    return 4 * n * (c * h * w + k * p * q) <= MAX_BYTES


def main() -> None:
    found: dict[str, Counter[Problem]] = {}
    for entry in TABLE:
        model = build(entry)
        counts: Counter[Problem] = Counter()
        for n in BATCHES:
            counts += convolutions(model, (n, *entry.size), entry.run)
        found[entry.name] = Counter({problem: count for problem, count in counts.items() if is_small(problem)})
        print(f"{entry.name}: {len(found[entry.name])} problems", file=sys.stderr)
    sides = split(TABLE)
    head = {
        "schema": 1, "batches": BATCHES, "passes": ["forward", "backward_input", "backward_weight"], "seed": SEED,
        "networks": {entry.name: {"family": entry.family, "kind": entry.kind, "split": sides[entry.name],
                                  "input": entry.size} for entry in TABLE},
    }  # fmt: skip
    lines = [json.dumps(row, separators=(",", ":")) for row in rows(found, sides)]
    text = json.dumps(head)[:-1] + ',\n"problems": [\n' + ",\n".join(lines) + "\n]}\n"
    PATH.write_text(text, encoding="utf-8")
    print(f"{len(lines)} problems of {len(found)} networks, {len(text)} bytes: {PATH}")


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main()
