"""The convolutions whose choice is judged: those of networks, traced, or of a file."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import corpus
from benchmarks.layers.sets import GRADIENTS
from fastconv import _C, ops
from fastconv.models import network

PASSES = ("forward", *GRADIENTS)
SPLITS = ("fit", "judge")
Pair = tuple[int, int]


@dataclass(frozen=True)
class Problem:
    """A convolution [n, c, h, w] x [k, c/groups, r, s] in one pass. Pairs are of height and width.

    split: whether models were fitted to it or are judged by it. networks: whose it is.
    """

    n: int
    c: int
    h: int
    w: int
    k: int
    r: int
    s: int
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1
    direction: str = "forward"
    split: str = field(default="fit", compare=False)
    networks: tuple[str, ...] = field(default=(), compare=False)
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.direction not in PASSES:
            raise ValueError(f"pass is {self.direction!r}; expected one of {', '.join(PASSES)}")
        if self.split not in SPLITS:
            raise ValueError(f"split is {self.split!r}; expected one of {', '.join(SPLITS)}")

    @property
    def p(self) -> int:
        return self._outputs(0, self.h, self.r)

    @property
    def q(self) -> int:
        return self._outputs(1, self.w, self.s)

    def _outputs(self, axis: int, size: int, kernel: int) -> int:
        span = size + 2 * self.padding[axis] - self.dilation[axis] * (kernel - 1) - 1
        return span // self.stride[axis] + 1

    def direct_flops(self, n: int) -> float:
        """Twice the multiply-adds of the direct algorithm, the same in every pass."""
        return 2.0 * n * self.k * self.p * self.q * (self.c // self.groups) * self.r * self.s

    @property
    def layer(self) -> str:
        """Its name, or one that says all of it but the batch and the pass."""
        if self.name:
            return self.name
        text = f"c{self.c}_k{self.k}_{self.h}x{self.w}_{self.r}x{self.s}"
        for letter, pair in (("s", self.stride), ("p", self.padding), ("d", self.dilation)):
            if pair != ((0, 0) if letter == "p" else (1, 1)):
                text += f"_{letter}{pair[0]}" + ("" if pair[0] == pair[1] else f"x{pair[1]}")
        return text + (f"_g{self.groups}" if self.groups > 1 else "")

    def fields(self) -> dict[str, Any]:
        """Its part of a result row, as in the layer suites; a number where both of a pair are the same."""
        row: dict[str, Any] = {"layer": self.layer} | {name: getattr(self, name) for name in "nchwkrs"}
        for name in ("stride", "padding", "dilation"):
            height, width = getattr(self, name)
            row[name] = height if height == width else [height, width]
        row |= {"groups": self.groups, "pass": self.direction, "split": self.split}
        return row | ({"networks": list(self.networks)} if self.networks else {})

    def planned(self, dtype: torch.dtype, precision: str, layout: str) -> _C.ConvProblem:
        """As the planner sees it."""
        return _C.ConvProblem(
            self.n, self.c, self.h, self.w, self.k, self.r, self.s, self.stride, self.padding, self.dilation,
            self.groups, ops.dtype_name(dtype), precision, layout,
        )  # fmt: skip


def from_row(row: Mapping[str, Any]) -> Problem:
    """A problem of a file's row: the names of `Problem.fields`, or stride_h and stride_w, pad_h or padding_h, and so
    on. What is missing is as usual. Raises ValueError for what is no problem."""
    missing = [name for name in "nchwkrs" if name not in row]
    if missing:
        raise ValueError(f"a problem has no {', '.join(missing)}: {dict(row)}")
    n, c, h, w, k, r, s = (int(row[name]) for name in "nchwkrs")
    return Problem(
        n, c, h, w, k, r, s,
        stride=_pair(row, ("stride",), 1),
        padding=_pair(row, ("padding", "pad"), 0),
        dilation=_pair(row, ("dilation",), 1),
        groups=int(row.get("groups", 1)),
        direction=row.get("pass", "forward"),
        split=row.get("split", "fit"),
        networks=tuple(row.get("networks", ())),
        name=str(row.get("layer", row.get("name", ""))),
    )  # fmt: skip


def _pair(row: Mapping[str, Any], names: Sequence[str], default: int) -> Pair:
    for name in names:
        if f"{name}_h" in row:
            return int(row[f"{name}_h"]), int(row[f"{name}_w"])
        if name in row:
            value = row[name]
            return (int(value), int(value)) if isinstance(value, int) else (int(value[0]), int(value[1]))
    return default, default


def read(path: Path | str) -> list[Problem]:
    """The problems of a JSON file: a list of rows, or an object with `rows` or `problems`."""
    content = json.loads(Path(path).read_text())
    if isinstance(content, dict):
        content = content.get("problems", content.get("rows"))
    if not isinstance(content, list):
        raise ValueError(f"{path}: expected a list of problems, or an object with `problems` or `rows`")
    return unique(from_row(row) for row in content)


def of_corpus(count: int, seed: int, passes: Sequence[str], splits: Sequence[str]) -> list[Problem]:
    """`count` convolutions of the corpus, drawn at random, in each of the passes: the same for the same arguments."""
    rows = [row for row in corpus.read() if row["split"] in splits]
    drawn = random.Random(seed).sample(rows, min(count, len(rows)))
    return unique(from_row({**row, "pass": direction}) for row in drawn for direction in passes)


def unique(problems: Iterable[Problem]) -> list[Problem]:
    """Each problem once, with all networks that have it, in the order of the first of each."""
    found: dict[Problem, list[Problem]] = {}
    for problem in problems:
        found.setdefault(problem, []).append(problem)
    merged = []
    for first, *others in found.values():
        networks = dict.fromkeys(name for each in (first, *others) for name in each.networks)
        merged.append(Problem(**{**vars(first), "networks": tuple(networks)}))
    return merged


def of_networks(
    names: Sequence[str], batch: int | None = None, image: int | None = None, passes: Sequence[str] = ("forward",)
) -> list[Problem]:
    """The convolutions of networks (fastconv.models), each shape once, in turns: what ends early has some of all.

    batch: default the paper's; image: default the network's own. Nothing is computed: shapes travel through PyTorch's
    meta device. Raises ValueError for an unknown network.
    """
    queues = []
    for name in names:
        entry = network(name)
        x = torch.empty((batch or entry.batch, 3, image or entry.image, image or entry.image), device="meta")
        with torch.device("meta"):
            model = entry.make().eval()
        queues.append([(problem, name) for problem in _record(model, x)])
    turns = [queue[i] for i in range(max(map(len, queues), default=0)) for queue in queues if i < len(queue)]
    return unique(
        Problem(**{**vars(problem), "direction": direction, "networks": (name,)})
        for direction in passes
        for problem, name in turns
    )


def _record(model: nn.Module, x: torch.Tensor) -> Counter[Problem]:
    found: Counter[Problem] = Counter()

    def note(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        assert isinstance(module, nn.Conv2d)
        assert not isinstance(module.padding, str)
        n, c, h, w = args[0].shape
        k, _, r, s = module.weight.shape
        stride, padding, dilation = (
            (int(pair[0]), int(pair[1])) for pair in (module.stride, module.padding, module.dilation)
        )
        found[Problem(n, c, h, w, k, r, s, stride, padding, dilation, module.groups)] += 1

    hooks = [module.register_forward_hook(note) for module in model.modules() if isinstance(module, nn.Conv2d)]
    with torch.inference_mode():
        model(x)
    for hook in hooks:
        hook.remove()
    return found
