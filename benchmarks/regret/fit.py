"""`python -m benchmarks fit`: moves the constants of the cost models (csrc/core/fitted.def) until `auto` takes what was
measured to be the fastest.

What is minimised is the regret itself, as if `auto` drew lots among algorithms whose costs are about equal, with the
part of it beyond 1.1 counted three times; and, much less, how far the costs are from the times. It is a search by steps
of one constant, or all of an algorithm, with a fixed seed, and it begins in the middle of what each constant may be:
the same rows give the same constants, and what is held out was never seen.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import numpy.typing as npt

from benchmarks.harness import ours, results
from benchmarks.regret.problems import from_row
from fastconv import _C, timing

DEFINITION = Path("csrc/core/fitted.def")
BAR = 1.1
LIKE = 0.05  # logarithm of the ratio of two costs that are about equal: times differ by as much from run to run
CLOSENESS = 0.05  # what the distance of costs from times counts, beside the regret
STEPS = (0.6, 0.25, 0.1, 0.04, 0.015)  # of a constant's logarithm
SWEEPS = 4  # with each, at most
PASSES = ("forward", "backward_weight")  # an input gradient is made of forward convolutions, by rules

Array = npt.NDArray[numpy.float64]
Index = npt.NDArray[numpy.int_]
Mask = npt.NDArray[numpy.bool_]
Moved = dict[str, Index]  # algorithm -> rows
Name = tuple[str, str]  # algorithm, constant
Report = Callable[[str], None]


def kind_of(document: results.Document) -> str:
    """The kind of device of a result file, as constants have a value for each: avx2, avx512, cuda. Raises ValueError if
    the file does not say its instruction set."""
    if document["cuda"]:
        return "cuda"
    kind = document.get("instruction_set")
    if kind not in ("avx2", "avx512"):
        raise ValueError(f"instruction_set of the file is {kind!r}; expected avx2 or avx512")
    return str(kind)


def device_of(document: results.Document) -> _C.DeviceInfo:
    """Raises ValueError for a GPU whose rates the planner does not know."""
    if not document["cuda"]:
        return _C.cpu_device(document["threads"], getattr(_C.InstructionSet, kind_of(document)))
    device = _C.h200_device()
    device.name = document["gpu"]
    _C.set_rates(device, 0.0, 0.0)
    if device.bandwidth_bytes_per_s == 0.0:
        raise ValueError(f"gpu is {document['gpu']!r}; expected one whose rates csrc/core/device_info.cpp has")
    return device


def times_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Microseconds of what `auto` may take; PyTorch's by its own call."""
    took = {name: us for name, us in row["algorithms"].items() if us}
    return took | ({"torch": row["torch_us"]} if row["torch_us"] else {})


@dataclass
class Constant:
    name: Name
    kind: str
    lower: float
    upper: float
    value: float

    def set(self, value: float) -> None:
        self.value = min(max(value, self.lower), self.upper)
        _C.set_fitted(*self.name, self.kind, self.value)


@dataclass
class Undo:
    """What Rows.update changed."""

    columns: list[tuple[int, Index, Array]]
    rows: Index
    losses: Array


class Rows:
    """Rows of one device and pass: the times, and the costs with the constants as they are."""

    def __init__(self, rows: Sequence[results.Row], device: _C.DeviceInfo, direction: str) -> None:
        self.rows, self._device, self._direction = rows, device, direction
        self.names = [row["name"] for row in _C.algorithms()]
        self._problems = [
            from_row(row).planned(ours.dtype_of(row["class"]), ours.precision_of(row["class"]), row["layout"])
            for row in rows
        ]
        took = [times_of(row) for row in rows]
        self._took = took
        best = numpy.array([min(its.values()) for its in took])[:, None]
        us = numpy.array([[its.get(name, math.nan) for name in self.names] for its in took])
        # One without a time was given up: it took so many times the best, or was expected to.
        self._regret: Array = numpy.nan_to_num(numpy.log(us / best), nan=math.log(timing.HOPELESS))
        self._penalty = self._regret + 2.0 * numpy.maximum(0.0, self._regret - math.log(BAR))
        self._log_us = numpy.log(us)
        self._timed = numpy.isfinite(us)
        self._log_cost: Array = numpy.full(us.shape, math.inf)
        self._log_preference: Array = numpy.log([_C.preference(name, device) for name in self.names])
        self.losses: Array = numpy.zeros(len(rows))
        self.update(self.everything())

    def __len__(self) -> int:
        return len(self.rows)

    def update(self, moved: Moved) -> Undo:
        """Asks the planner again for the costs of these algorithms in these rows; returns how to undo that."""
        columns = []
        for name, its in moved.items():
            column = self.names.index(name)
            columns.append((column, its, self._log_cost[its, column]))
            problems = [self._problems[row] for row in its]
            costs = _C.costs_us(name, problems, self._device, self._direction)
            self._log_cost[its, column] = numpy.log(costs)
        rows = numpy.unique(numpy.concatenate([numpy.empty(0, int), *moved.values()]))
        losses = self.losses[rows]
        self.losses[rows] = self._loss(rows)
        return Undo(columns, rows, losses)

    def everything(self) -> Moved:
        return {name: numpy.arange(len(self.rows)) for name in self.names}

    def put_back(self, undo: Undo) -> None:
        for column, rows, costs in undo.columns:
            self._log_cost[rows, column] = costs
        self.losses[undo.rows] = undo.losses

    def moved_by(self, constant: Constant) -> Moved:
        """The algorithms whose costs a constant changes, each with the rows where it does."""
        own = constant.name[0]
        asked = {name: its for name, its in self.everything().items() if own == name or own not in self.names}
        value, changed = constant.value, dict.fromkeys(asked, numpy.zeros(len(self.rows), bool))
        for extreme in (constant.lower, constant.upper):
            constant.set(extreme)
            undo = self.update(asked)
            for column, _, costs in undo.columns:
                changed[self.names[column]] = changed[self.names[column]] | (self._log_cost[:, column] != costs)
            self.put_back(undo)
        constant.set(value)
        return {name: numpy.flatnonzero(its) for name, its in changed.items() if its.any()}

    def _loss(self, rows: Index) -> Array:
        cost = self._log_cost[rows]
        compared = cost + self._log_preference
        lots = numpy.exp((compared.min(axis=1, keepdims=True) - compared) / LIKE)
        regret = (lots * self._penalty[rows]).sum(axis=1) / lots.sum(axis=1)
        timed = self._timed[rows] & numpy.isfinite(cost)
        distance = numpy.abs(numpy.where(timed, cost - self._log_us[rows], 0.0)).sum(axis=1) / timed.sum(axis=1)
        return numpy.asarray(regret + CLOSENESS * distance)

    def chosen_rows(self) -> list[results.Row]:
        """The rows as if `auto` took now what costs least."""
        taken = [self.names[column] for column in (self._log_cost + self._log_preference).argmin(axis=1)]
        found = []
        for row, name, took in zip(self.rows, taken, self._took, strict=True):
            best = min(took, key=lambda each: took[each])
            us = took.get(name, timing.HOPELESS * took[best])
            found.append({**row, "algorithm": name, "us": us, "best": best, "best_us": took[best]})
        return found


def constants_of(kind: str) -> list[Constant]:
    return [
        Constant((row["algorithm"], row["name"]), kind, row["lower"], row["upper"], row["value"])
        for row in _C.fitted()
        if row["kind"] == kind
    ]


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Constants are then what they were."""
    before = _C.fitted()
    try:
        yield
    finally:
        for row in before:
            _C.set_fitted(row["algorithm"], row["name"], row["kind"], row["value"])


def _union(moves: Sequence[Moved]) -> Moved:
    names = dict.fromkeys(name for its in moves for name in its)
    return {name: numpy.unique(numpy.concatenate([its[name] for its in moves if name in its])) for name in names}


class Fit:
    """The search, for the rows of one kind of device. wanted: the algorithms whose constants may move; default all."""

    def __init__(self, sets: Sequence[Rows], kind: str, wanted: Sequence[str] = ()) -> None:
        self.sets = sets
        found = [each for each in constants_of(kind) if not wanted or each.name[0] in wanted]
        moves = {each.name: [rows.moved_by(each) for rows in sets] for each in found}
        self.constants = [each for each in found if any(moves[each.name])]
        self._moves = [moves[each.name] for each in self.constants]
        self.idle = [each.name for each in found if not any(moves[each.name])]  # matter in none of the rows

    def _loss(self, chosen: Sequence[Mask]) -> float:
        total = sum(float(rows.losses[its].sum()) for rows, its in zip(self.sets, chosen, strict=True))
        return total / sum(int(its.sum()) for its in chosen)

    def _try(self, changes: Mapping[int, float], best: float, chosen: Sequence[Mask]) -> float:
        """The loss after these changes of logarithms (index of a constant -> difference); undone if it is no less."""
        values = {index: self.constants[index].value for index in changes}
        for index, change in changes.items():
            self.constants[index].set(values[index] * math.exp(change))
        undo = [rows.update(_union([self._moves[i][n] for i in changes])) for n, rows in enumerate(self.sets)]
        found = self._loss(chosen)
        if found < best - 1e-7:
            return found
        for index, value in values.items():
            self.constants[index].set(value)
        for rows, its in zip(self.sets, undo, strict=True):
            rows.put_back(its)
        return best

    def search(self, chosen: Sequence[Mask], report: Report = lambda text: None) -> float:
        """Fits to the chosen rows of each set; returns the loss."""
        random = numpy.random.default_rng(0)
        best = self._loss(chosen)
        for step in STEPS:
            for _ in range(SWEEPS):
                before = best
                for index in range(len(self.constants)):
                    for change in (step, -step):
                        best = self._try({index: change}, best, chosen)
                for algorithm in dict.fromkeys(constant.name[0] for constant in self.constants):
                    its = [i for i, constant in enumerate(self.constants) if constant.name[0] == algorithm]
                    for _ in range(2 * len(its)):
                        changes = dict(zip(its, random.normal(0.0, step, len(its)), strict=True))
                        best = self._try(changes, best, chosen)
                if before - best < 1e-4:
                    break
            self.refresh()
            best = self._loss(chosen)
            report(f"steps of {step:g}: loss {best:.4f}")
        return best

    def round(self) -> None:
        """Three digits, as they are written."""
        for constant in self.constants:
            constant.set(float(f"{constant.value:.3g}"))
        self.refresh()

    def values(self) -> dict[int, float]:
        return {index: constant.value for index, constant in enumerate(self.constants)}

    def reset(self, values: Mapping[int, float]) -> None:
        for index, value in values.items():
            self.constants[index].set(value)
        self.refresh()

    def refresh(self) -> None:
        """All costs anew: what a constant moves may depend on others."""
        for rows in self.sets:
            rows.update(rows.everything())


@dataclass
class Outcome:
    """Rows as `auto` would take them before and after; `held_out`: each by constants fitted without its problem."""

    before: list[results.Row]
    after: list[results.Row]
    held_out: list[results.Row]
    constants: dict[Name, tuple[float, float]]  # that were moved: before, after
    idle: list[Name]
    left_out: int  # rows of passes whose choice is no comparison of costs, or without any time


def fit(
    documents: Sequence[results.Document],
    wanted: Sequence[str] = (),
    folds: int = 5,
    report: Report = lambda text: None,
) -> Outcome:
    """Fits to the rows of one kind of device whose split is `fit`, and leaves the planner with what was found.

    wanted: algorithms. folds: parts of the fitted problems, each judged by constants fitted to the others; 0: none.
    Raises ValueError if there is nothing to fit to.
    """
    kinds = {kind_of(document) for document in documents}
    if len(kinds) != 1:
        raise ValueError(f"the files are of {', '.join(sorted(kinds)) or 'nothing'}; expected one kind of device")
    sets, total = list[Rows](), 0
    for document in documents:
        total += len(document["rows"])
        for direction in PASSES:
            its = [row for row in document["rows"] if row["pass"] == direction and times_of(row)]
            sets += [Rows(its, device_of(document), direction)] if its else []
    used = [numpy.array([row["split"] == "fit" for row in rows.rows]) for rows in sets]
    if not any(chosen.any() for chosen in used):
        raise ValueError("no row of split fit has a time; expected some of pass forward or backward_weight")
    model = Fit(sets, kinds.pop(), wanted)
    before = [row for rows in sets for row in rows.chosen_rows()]
    present, held_out = model.values(), list[results.Row]()
    start = {index: math.sqrt(each.lower * each.upper) for index, each in enumerate(model.constants)}
    parts = _parts(sets, folds)
    for part in range(folds):
        model.reset(start)
        report(f"part {part + 1} of {folds}, fitted to the others")
        model.search([chosen & (number != part) for chosen, number in zip(used, parts, strict=True)])
        model.round()
        for rows, chosen, number in zip(sets, used, parts, strict=True):
            mine = chosen & (number == part)
            held_out += [row for row, is_mine in zip(rows.chosen_rows(), mine, strict=True) if is_mine]
    model.reset(start)
    model.search(used, report)
    model.round()
    after = [row for rows in sets for row in rows.chosen_rows()]
    moved = {each.name: (present[index], each.value) for index, each in enumerate(model.constants)}
    return Outcome(before, after, held_out, moved, model.idle, total - sum(map(len, sets)))


def _parts(sets: Sequence[Rows], folds: int) -> list[Index]:
    """In which part each row is: all of one convolution, whatever its layout, class and pass, in the same."""
    numbers: dict[str, int] = {}
    found = []
    for rows in sets:
        keys = [json.dumps([row[name] for name in ("n", *results.GEOMETRY)]) for row in rows.rows]
        found.append(numpy.array([numbers.setdefault(key, len(numbers)) % max(1, folds) for key in keys]))
    return found


_LINE = re.compile(r"^FASTCONV_(CPU|CUDA|TIMES)\((\w+), (\w+), (.*)\)$")
_COLUMNS = {"avx2": 2, "avx512": 3, "cuda": 2}  # behind lower and upper
_TIMES = ("launch", "term", "products", "input", "output")  # of one line, behind where the fit begins


def write(path: Path, kind: str, constants: Mapping[Name, float]) -> None:
    """Puts the constants of one kind into csrc/core/fitted.def."""
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines):
        match = _LINE.match(line)
        if match is None or (match[1] == "CPU") == (kind == "cuda"):
            continue
        columns = {match[3]: _COLUMNS[kind]}
        if match[1] == "TIMES":
            columns = {f"{match[3]}_{name}": len(_TIMES) + i for i, name in enumerate(_TIMES)}
        values = match[4].split(", ")
        for name, column in columns.items():
            if (match[2], name) in constants:
                values[column] = f"{constants[match[2], name]:g}"
        lines[number] = f"FASTCONV_{match[1]}({match[2]}, {match[3]}, {', '.join(values)})"
    path.write_text("\n".join(lines) + "\n")
