"""One problem, one class: all that could compute it, in every layout, timed in turns; and what `auto` takes."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from benchmarks import peers
from benchmarks.harness import ours, results, turns
from benchmarks.layers.sets import floor_here
from benchmarks.regret.problems import Problem
from fastconv import _C, ops, timing, tuning
from fastconv.timing import drop_hopeless
from fastconv.tuning import Convolution

ORDERS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
_FLAGS = 1 | 4  # the operators' backend_flags: cuDNN, with a search
_PEER = "peer"  # PyTorch's own call, beside `torch`, which is the same through our operator
Call = Callable[[], torch.Tensor]


def measure(
    problem: Problem,
    accuracy: str,
    layouts: Sequence[str],
    device: torch.device,
    rounds: int,
    seed: int = 0,
    announce: Callable[[str], None] = lambda name: None,
    banned: Sequence[str] = (),
    beat: Callable[[], None] = lambda: None,
) -> list[results.Row]:
    """A row per layout. Weights are packed before in the forward pass, in gradients within what is timed.

    banned: contenders ("nhwc/winograd_f4") that are not run. beat: called while others have the GPU (harness/turns.py).
    Raises timing.DeviceLost if the GPU fails.
    """
    info, precision = ops.device_info(device), ours.precision_of(accuracy)
    failures: dict[str, str] = dict.fromkeys(banned, "ended an earlier process")
    choices: dict[str, str] = {}
    expected: dict[str, dict[str, float]] = {}  # layout -> contender -> us, as the cost models have it
    calls: dict[str, dict[str, Call]] = {}
    found_once: dict[str, tuple[str, float]] = {}
    with turns.preparing(beat, patient=True):
        for layout in layouts:
            planned = problem.planned(ours.dtype_of(accuracy), precision, layout)
            choices[layout], costs = _candidates(problem, planned, info)
            convolution = _convolution(problem, accuracy, layout, device)
            names = [name for name in costs if f"{layout}/{name}" not in banned]
            calls[layout] = _contenders(problem, convolution, names, accuracy, failures)
            expected[layout] = {_PEER: 0.0} | {
                name: costs[name] for name in sorted(costs, key=lambda name: costs[name])
            }
            if turns.are_shared():
                _warm_up(calls[layout], expected[layout], functools.partial(_announce, announce, layout))
    with turns.timing(beat):
        slow: list[str] = []
        for layout in layouts:
            rows = [{"algorithm": name, "cost_us": us} for name, us in expected[layout].items()]
            refused: dict[str, str] = {}
            kept = {choices[layout], _PEER}
            say = functools.partial(_announce, announce, layout)
            few = drop_hopeless(rows, calls[layout], device, refused, kept, say)
            slow += [f"{layout}/{name}" for name in few if name not in kept]
            failures |= {f"{layout}/{name}": why for name, why in refused.items()}
            announce("")
            found_once[layout] = measured_once(problem, accuracy, layout, device, choices[layout])
        all_calls = {f"{layout}/{name}": call for layout, its in calls.items() for name, call in its.items()}
        found = timing.measure(all_calls, device=device, rounds=rounds, few_rounds=slow, seed=seed)
    failures |= found.failures
    return [
        _row(problem, accuracy, layout, choices[layout], found.timings, failures, device)
        | _as_measured(layout, found.timings, *found_once[layout])
        for layout in layouts
    ]


def measured_once(problem: Problem, accuracy: str, layout: str, device: torch.device, choice: str) -> tuple[str, float]:
    """What `auto`, of which `choice` is that by cost, takes where PyTorch searches, too: a layer then measures at its
    first call (`fastconv.once`). By a contender's name; and how many milliseconds that took."""
    convolution = _convolution(problem, accuracy, layout, device).in_pass(problem.direction)
    info, planned = ops.device_info(device), convolution.problem()
    if problem.direction == "forward" and not _C.choose("auto", planned, info)["unsure"]:
        return choice, 0.0
    began = time.perf_counter()
    quick = tuning.quick_choice(convolution)
    ms = 1e3 * (time.perf_counter() - began)
    if quick is None:
        return choice, ms
    if problem.direction != "backward_input" or quick.algorithm == "torch":
        return quick.algorithm, ms
    method, algorithm = quick.algorithm.split()  # each contender is of the method that is planned
    named = _C.choose_input_gradient("implicit_gemm", planned, info)["method"]  # any name of ours
    return (algorithm if method == named else "", ms)


def _as_measured(layout: str, times: Mapping[str, timing.Timing], name: str, ms: float) -> results.Row:
    timed = times.get(f"{layout}/{name}")
    return {"measured": name, "measured_us": timed.us if timed else None, "measuring_ms": ms}


@functools.cache
def _other_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="rehearsal")


def _warm_up(calls: Mapping[str, Call], expected: Mapping[str, float], announce: Callable[[str], None]) -> None:
    """Calls each contender once, so that its kernels are loaded and compiled before the GPU is this process's alone.

    In a thread of its own: PyTorch keeps for each thread what its search has found, and this one's times are disturbed.
    """

    def run() -> None:
        with torch.no_grad():
            for name, call in calls.items():
                if expected[name] > timing.SLOW_US:
                    continue
                announce(name)
                try:
                    call()
                except Exception:  # its message comes when it runs in its turn
                    timing.recover()

    _other_thread().submit(run).result()


def _announce(announce: Callable[[str], None], layout: str, name: str) -> None:
    announce(f"{layout}/{name}")


def _candidates(problem: Problem, planned: _C.ConvProblem, info: _C.DeviceInfo) -> tuple[str, dict[str, float]]:
    """What `auto` takes, and what may be taken within the limit of its error, with its cost (0 where nobody says)."""
    if problem.direction == "forward":
        rows = [row for row in _C.candidates(planned, info) if row["auto_eligible"]]
        return _C.choose("auto", planned, info)["algorithm"], {row["algorithm"]: row["cost_us"] for row in rows}
    if problem.direction == "backward_weight":
        choice = _C.choose_weight_gradient("auto", planned, info)["algorithm"]
        rows = [row for row in _C.weight_gradients(planned, info) if row["ok"] and row["auto_eligible"]]
        return choice, {choice: 0.0} | {row["algorithm"]: row["cost_us"] for row in rows}
    # Made of forward convolutions, each of which chooses for itself; or all by one algorithm.
    choice = _C.choose_input_gradient("auto", planned, info)
    made = [row["algorithm"] for row in _C.candidates(choice["convolution"], info) if row["auto_eligible"]]
    return "torch" if choice["method"] == "torch" else "auto", dict.fromkeys(["auto", *made, "torch"], 0.0)


def _convolution(problem: Problem, accuracy: str, layout: str, device: torch.device) -> Convolution:
    order = ORDERS[layout]
    return Convolution(
        device, ours.dtype_of(accuracy), (problem.n, problem.c, problem.h, problem.w),
        (problem.k, problem.c // problem.groups, problem.r, problem.s), problem.stride, problem.padding,
        problem.dilation, problem.groups, ours.precision_of(accuracy), order, order, backend_flags=_FLAGS,
    )  # fmt: skip


def _contenders(
    problem: Problem, convolution: Convolution, names: Sequence[str], accuracy: str, failures: dict[str, str]
) -> dict[str, Call]:
    x, weight, grad = (
        torch.randn(shape, dtype=convolution.dtype, device=convolution.device).contiguous(
            memory_format=convolution.input_format
        )
        for shape in (
            convolution.input_shape,
            convolution.weight_shape,
            (problem.n, problem.k, problem.p, problem.q),
        )
    )
    tf32 = accuracy == "tf32"
    backward = None if problem.direction == "forward" else grad
    peer: Call = functools.partial(peers.torch_convolution, x, weight, problem, tf32, problem.direction, backward)
    if problem.direction == "forward":
        return {_PEER: peer, **convolution.contenders(names, failures)}
    geometry = problem.stride, problem.padding, problem.dilation, problem.groups
    operator, operands = ops.input_gradient_op, (grad, weight, list(x.shape))
    if problem.direction == "backward_weight":
        operator, operands = ops.weight_gradient_op, (x, grad, list(weight.shape))

    def call(name: str) -> torch.Tensor:
        # Where PyTorch computes it, it follows the global switches: those that the peer has.
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=tf32):
            return operator(*operands, *geometry, name, ours.precision_of(accuracy), _FLAGS)

    return {_PEER: peer} | {name: functools.partial(call, name) for name in names}


def _row(
    problem: Problem, accuracy: str, layout: str, choice: str, times: dict[str, timing.Timing],
    failures: dict[str, str], device: torch.device,
) -> results.Row:  # fmt: skip
    prefix = f"{layout}/"
    mine = {name.removeprefix(prefix): time.us for name, time in times.items() if name.startswith(prefix)}
    torch_us = mine.pop(_PEER, None)
    best = min(mine, key=lambda name: mine[name], default=None)
    rivals = [mine[best]] if best is not None else []
    if torch_us is not None and "torch" in mine:  # else its error is beyond the class
        rivals.append(torch_us)
        best = "torch" if torch_us <= min(rivals) else best
    chosen = times.get(prefix + choice)
    return {
        **problem.fields(),
        "class": accuracy,
        "layout": layout,
        "algorithm": choice,
        "us": chosen.us if chosen else None,
        "us_q25": chosen.q25 if chosen else None,
        "us_q75": chosen.q75 if chosen else None,
        "rounds": chosen.rounds if chosen else None,
        "best": best,
        "best_us": min(rivals, default=None),
        "torch_us": torch_us,
        "algorithms": mine,
        "torch_layouts": {
            name: times[f"{name}/{_PEER}"].us for name in ORDERS if f"{name}/{_PEER}" in times
        },
        "floor_us": floor_here(problem, problem.n, accuracy, device),
        "notes": {name.removeprefix(prefix): why for name, why in failures.items() if name.startswith(prefix)},
    }  # fmt: skip


def regret(row: results.Row) -> float | None:
    """Time of what `auto` takes over that of the best; None where it has no time."""
    return row["us"] / row["best_us"] if row["us"] and row["best_us"] else None


def as_measured(row: results.Row) -> results.Row:
    """The row as it is where `auto` measures at a first call, as PyTorch does."""
    return {**row, "us": row.get("measured_us"), "algorithm": row.get("measured")}


def against_torch(row: results.Row) -> float | None:
    """Time of what `auto` takes over PyTorch's in the same layout; None where either has no time."""
    return row["us"] / row["torch_us"] if row["us"] and row["torch_us"] else None


def is_slower(row: results.Row) -> bool:
    """Whether `auto` is slower than PyTorch by more than 3 %."""
    return (against_torch(row) or math.inf) > 1.03
