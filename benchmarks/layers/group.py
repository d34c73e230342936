"""One layer, one element type: ours per algorithm and all peers, checked against float64, then timed together."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks import peers
from benchmarks.harness import ours, results
from benchmarks.harness.clocks import ClockMonitor
from benchmarks.layers.reference import Reference
from benchmarks.layers.sets import FUSED, GRADIENTS, floor_here
from benchmarks.peers import cudnn
from benchmarks.studies import ladder
from fastconv import timing
from fastconv.models.layers import Layer

# A relative L2 error beyond this is not that class: a peer above it is refused, with a note, rather than timed.
CLASS_ERROR = {"ieee": 5e-5, "fp32": 5e-5, "tf32": 1e-2, "fp16": 2e-2, "bf16": 1e-1}
# So many times the best peer, by estimates: 3 rounds only, but for the first few.
HOPELESS_PEER, CLOSE_PEERS = 1.3, 5

# PyTorch's search runs every plan it is offered, however slow (weight gradients in FP32, NHWC: 27 s). One that took so
# many seconds is not asked for again in later layers of its pass and type: cudnn_graph has all of its plans.
LONG_SEARCH_S = 5.0
_long_searches: dict[tuple[Any, str], float] = {}  # of this process: (pass and type, rival) -> what it took

# A survey has very many layers and little time: who is estimated to be this many times slower than the best of its side
# and class is not timed, or for 3 rounds only; all rounds of a layer together last about as long as this.
SURVEY_HOPELESS, SURVEY_SLOW = 3.0, 1.5
SURVEY_S, SAMPLE_US = 0.06, 130.0  # a sample costs its flush and launches beside its own time
SURVEY_ROUNDS = 3  # at least
BESIDE_OTHERS = 10  # times longer a call may take while other processes use the GPU
SHARED_WORKSPACE = 2 << 30  # bytes that a rival may take there
_SURVEY_LEAVES_OUT = (
    "within", "errors", "peer_errors", "peer_plans", "seconds", "few_rounds", "eager", "bias", "timer_us",
)  # fmt: skip

_TIMER = "timer"  # a graph without a kernel: what any contender pays for being timed
_PACKING = "+packing"  # behind the name of ours: its filter is packed in every call

Call = Callable[[], torch.Tensor]


@dataclass
class _Entrant:
    """A contender that has run: its estimate and its error."""

    call: Call
    estimate_us: float
    error: dict[str, float]
    is_rival: bool = True  # False for a peer whose error is beyond the class


@dataclass
class Group:
    """What is timed together: one layer, one element type, TF32 allowed or not; the classes in it share the peers."""

    layer: Layer
    n: int
    dtype: torch.dtype
    tf32: bool
    classes: list[str]
    layouts: Sequence[str]
    device: torch.device
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    direction: str = "forward"  # of layers.PASSES
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    addends: dict[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)  # bias, residual; of a fused pass
    entrants: dict[str, _Entrant] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)  # contender -> why it has no time, or is no rival
    banned: Mapping[str, str] = field(default_factory=dict)  # contender -> what it did to an earlier process
    admits: Callable[[str], bool] = lambda name: True  # which rivals are asked at all
    max_error: float = 1.5  # of the stricter of the two choices of `auto` that a forward row shows
    strict: dict[tuple[str, str], str] = field(default_factory=dict)  # (class, layout) -> that choice
    announce: Callable[[str], None] = lambda name: None  # called with a contender's name before it first runs
    plans: dict[str, str] = field(default_factory=dict)  # rival -> which of its forms, and of how many
    known_plans: Mapping[str, Sequence[str]] = field(default_factory=dict)  # the same of earlier runs
    seconds: dict[str, float] = field(default_factory=dict)  # part of the measurement -> what it took
    survey: bool = False  # one of very many layers: rivals without a search, few rounds, a short row
    once_us: dict[str, float] = field(default_factory=dict)  # of a survey: contender that is not timed -> a single call
    triton: bool = False  # is among the rivals
    keeps_named: bool = False  # algorithms that are asked for by name are timed, however slow, and the choice of `auto`
    packs: bool = False  # the choice is timed with the filter packed in every call, too; at batch 1 it always is
    alone: bool = True  # nobody else uses the GPU while contenders enter
    bytes: dict[str, tuple[int, int]] = field(default_factory=dict)  # ours -> workspace, packed weight

    def best_us(self, among: Callable[[str], bool] = lambda name: True) -> float:
        estimates = [each.estimate_us for name, each in self.entrants.items() if each.is_rival and among(name)]
        return max(min(estimates, default=math.inf), timing.SHORT_US)

    def refusal(self, error: float) -> str:
        """Why a rival with that relative L2 error is none; "" if it is one."""
        limit = CLASS_ERROR[self.classes[0]]
        return f"error {error:.1e} is beyond the class ({limit:.0e})" if error > limit else ""

    def spent(self, part: str, begin: float) -> float:
        """Books the time since `begin`; returns now."""
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - begin
        return now


def _enter(group: Group, name: str, call: Call, reference: Reference, limit: float) -> None:
    """Runs a contender; keeps it unless it raises or takes more than `limit` times the best so far."""
    limit *= 1 if group.alone else BESIDE_OTHERS
    group.announce(name)
    try:
        y, first_us = timing.once(call, group.device)
        error = reference.error(y)
        del y
        # The first call may load code or search; it decides only where no start-up could explain it.
        us = first_us
        if first_us <= max(timing.SLOW_US, limit * group.best_us()):
            us = min(first_us, timing.once(call, group.device)[1])
    except Exception as failure:
        group.notes[name] = timing.message_of(failure)
        timing.recover()
        return
    if us > limit * group.best_us():
        group.once_us[name] = us
        group.notes[name] = f"not timed: one call took {us:.0f} us, over {limit:.0f} times the best"
        return
    group.entrants[name] = _Entrant(call, us, error)


def prepare_data(group: Group, seed: int) -> Reference:
    """ReLU'd normal input, He weights, in both layouts."""
    layer = group.layer
    generator = torch.Generator(group.device).manual_seed(seed)
    options: dict[str, Any] = {"device": group.device, "generator": generator}
    x = torch.randn((group.n, layer.c, layer.h, layer.w), **options).relu_().to(group.dtype)
    fan_in = layer.c // layer.groups * layer.r * layer.s
    weight = torch.randn((layer.k, layer.c // layer.groups, layer.r, layer.s), **options)
    weight = (weight * math.sqrt(2.0 / fan_in)).to(group.dtype)
    orders = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
    group.inputs = {layout: x.contiguous(memory_format=order) for layout, order in orders.items()}
    group.weights = {layout: weight.contiguous(memory_format=order) for layout, order in orders.items()}
    if group.direction in FUSED:
        addends = [torch.randn(layer.k, **options).to(group.dtype)]
        if group.direction == "bias_residual_relu":
            addends.append(torch.randn((group.n, layer.k, layer.p, layer.q), **options).to(group.dtype))
        for layout, order in orders.items():
            its = (each.contiguous(memory_format=order) if each.dim() == 4 else each for each in addends)
            group.addends[layout] = tuple(its)
        return Reference(x, weight, layer, *addends)
    if group.direction == "forward":
        return Reference(x, weight, layer)
    grad = torch.randn((group.n, layer.k, layer.p, layer.q), **options).to(group.dtype)
    group.grads = {layout: grad.contiguous(memory_format=order) for layout, order in orders.items()}
    return Reference.of_gradient(x, weight, grad, layer, group.direction)


def _enter_all(group: Group, reference: Reference, algorithms: Sequence[str] | None) -> dict[tuple[str, str], str]:
    """Peers first, then ours; returns (class, layout) -> auto's choice."""
    data = group.inputs, group.weights, group.layer, group.tf32, group.direction, group.grads, group.addends
    limit = cudnn.WORKSPACE_LIMIT if group.alone else SHARED_WORKSPACE
    operands = peers.Operands(*data, not group.survey, group.triton, limit, group.known_plans)
    calls, refused = peers.peers(
        operands, lambda y: group.refusal(reference.error(y)["l2"]), group.announce, group.banned
    )
    group.notes |= {} if group.survey else refused
    for name, call in calls.items():
        if not group.admits(name):
            continue
        if (seconds := group.seconds.get(name.removesuffix("_all"), 0.0)) > peers.SEARCH_S:
            group.notes[name] = f"not run: the search of 10 plans took {seconds:.0f} s; cudnn_graph has all"
            continue
        kind = group.direction, group.dtype, group.tf32
        long = [_long_searches.get((kind, search), 0.0) for search in (name, name.removesuffix("_all"))]
        if not group.survey and any(long):
            group.notes[name] = f"not run: its search took {max(long):.0f} s in an earlier layer; cudnn_graph has all"
            continue
        if name in group.banned:
            group.notes[name] = group.banned[name]
            continue
        begin = time.perf_counter()
        _enter(group, name, call, reference, timing.HOPELESS if group.survey else math.inf)
        group.spent(name, begin)
        if name.startswith("torch_") and group.seconds[name] > LONG_SEARCH_S:
            _long_searches[kind, name] = group.seconds[name]
        if isinstance(call, peers.Searched):
            group.plans |= {name: call.description} if call.description else {}
            for why in call.failures:
                if "beyond the class" in why:  # one of its forms, not the rival
                    form, _, reason = why.partition(": ")
                    group.notes[f"{name}: {form}"] = reason
        if name in group.entrants and (why := group.refusal(group.entrants[name].error["l2"])):
            group.entrants[name].is_rival = False  # timed, for whoever wants to know, but no best peer
            group.notes[name] = f"{peers.REFUSED}: {why}"
    choices = {}
    for accuracy in group.classes:
        for layout in group.layouts:
            if group.direction in GRADIENTS:
                choices[accuracy, layout] = _enter_gradient(group, accuracy, layout, reference)
                continue
            asked = group.layer, group.n, accuracy, layout, group.device
            choice, strict = (ours.auto_choice(*asked, each, group.direction) for each in (None, group.max_error))
            choices[accuracy, layout], group.strict[accuracy, layout] = choice, strict
            rows = ours.candidates(*asked, group.direction)
            for row in sorted(rows, key=lambda row: (row["algorithm"] != choice, row["cost_us"])):
                chosen = row["algorithm"] == choice or row["algorithm"] == strict != "torch"
                _enter_ours(group, row, chosen, accuracy, layout, reference, algorithms)
            for rung in ladder.serving(algorithms or (), group.layer, accuracy, layout, group.device):
                if (name := f"{accuracy}/{layout}/{rung}") in group.banned:
                    group.notes[name] = group.banned[name]
                    continue
                its = group.inputs[layout], group.weights["nchw"], group.layer
                call, group.bytes[name] = ladder.contender(rung, *its), (ladder.workspace_bytes(rung, *its), 0)
                _enter(group, name, call, reference, math.inf)
    return choices


def _enter_gradient(group: Group, accuracy: str, layout: str, reference: Reference) -> str:
    """Ours, and auto's choice if that is PyTorch's; returns the choice."""
    tensors = group.inputs[layout], group.weights[layout], group.grads[layout]
    choice, reason = ours.gradient_choice(tensors[0], group.layer, accuracy, group.direction)
    prefix = f"{accuracy}/{layout}/"
    if reason:
        group.notes[prefix + "auto"] = reason
    own = ours.gradient_algorithms(tensors[0], group.layer, accuracy, group.direction)
    for algorithm in dict.fromkeys((choice, *own)):
        call = ours.gradient_contender(algorithm, *tensors, group.layer, accuracy, group.direction)
        _enter(group, prefix + algorithm, call, reference, math.inf if algorithm == choice else timing.HOPELESS)
    return choice


def _enter_ours(
    group: Group,
    row: dict[str, Any],
    chosen: bool,
    accuracy: str,
    layout: str,
    reference: Reference,
    algorithms: Sequence[str] | None,
) -> None:
    algorithm, prefix = row["algorithm"], f"{accuracy}/{layout}/"
    name = prefix + algorithm
    if algorithms is not None and algorithm not in algorithms and not (chosen and group.keeps_named):
        return
    is_choice, chosen = chosen, chosen or group.keeps_named
    if algorithm == "torch" and not chosen and group.direction not in FUSED:
        return  # the same call as the peer of this layout
    if group.survey and not row["ok"]:
        return  # `explain` says why
    if name in group.banned or not row["ok"]:
        group.notes[name] = group.banned.get(name) or row["reason"]
        return
    best = group.best_us()
    if not chosen and row["cost_us"] > max(timing.SLOW_US, timing.HOPELESS * best):
        group.notes[name] = (
            f"not run: the planner expects {row['cost_us']:.0f} us, over {timing.HOPELESS:.0f} times the best"
        )
        return
    group.announce(name)
    try:
        data = group.inputs[layout], group.weights["nchw"], group.layer, accuracy
        addends = group.addends.get(layout, ())
        call = ours.contender(algorithm, *data, *addends, search=not group.survey)
        packed = ours.packed_bytes(algorithm, group.weights["nchw"], group.layer, accuracy)
        group.bytes[name] = row["workspace_bytes"], packed
    except Exception as failure:
        group.notes[name] = timing.message_of(failure)
        timing.recover()
        return
    _enter(group, name, call, reference, math.inf if chosen else timing.HOPELESS)
    if algorithm == "torch" or name not in group.entrants:
        return
    # Of algorithms that are asked for by name, those that may be the fastest.
    near = group.entrants[name].estimate_us <= SURVEY_HOPELESS * group.best_us(lambda its: its.startswith(prefix))
    if (is_choice and (group.n == 1 or group.survey or group.packs)) or (group.keeps_named and near):
        packing = ours.packing_contender(algorithm, *data, *addends)
        _enter(group, name + _PACKING, packing, reference, math.inf)


def _peer_names(group: Group) -> list[str]:
    return [name for name in dict.fromkeys((*group.entrants, *group.notes)) if peers.is_peer(name)]  # or its form


def _rows(group: Group, choices: dict[tuple[str, str], str], measured: timing.Measurement) -> list[results.Row]:
    times = measured.timings
    notes = group.notes | {name: f"failed in the timed run: {text}" for name, text in measured.failures.items()}
    names = _peer_names(group)
    peer_us = {name: times[name].us if name in times else None for name in names}
    running = [name for name in names if name in times]
    rows = []
    for (accuracy, layout), choice in choices.items():
        barred = peers.NOT_IEEE if accuracy == "ieee" else ()
        rivals = [name for name in running if group.entrants[name].is_rival and name not in barred]
        best_peer = min(rivals, key=lambda name: times[name].us, default=None)
        prefix = f"{accuracy}/{layout}/"
        mine = {name.removeprefix(prefix) for name in (*group.entrants, *notes) if name.startswith(prefix)}
        mine = {name for name in mine if not name.endswith(_PACKING)}
        mine_us = {name: times[prefix + name].us if prefix + name in times else None for name in sorted(mine)}
        timed = {name: us for name, us in mine_us.items() if us is not None and not ladder.is_rung(name)}
        shown = choice if choice in mine or not timed else min(timed, key=lambda name: timed[name])
        time_of, packed_in = times.get(prefix + shown), times.get(prefix + shown + _PACKING)
        workspace, packed = group.bytes.get(prefix + shown, (None, None))
        errors = {name: group.entrants[prefix + name].error for name in mine if prefix + name in group.entrants}
        relevant = {name.removeprefix(prefix): text for name, text in notes.items() if name.startswith(prefix)}
        relevant |= {name: notes[name] for name in names if name in notes}
        if not group.survey:
            why = f"no rival of class {accuracy}: FP32-accurate on tensor cores"
            relevant |= {name: why for name in barred if name in names}
        row = {
            **group.layer.fields(),
            "n": group.n,
            "class": accuracy,
            "layout": layout,
            "pass": group.direction,
            "algorithm": shown,
            "auto": choice,
            "us": time_of.us if time_of else None,
            "us_with_packing": packed_in.us if packed_in else None,
            "us_q25": time_of.q25 if time_of else None,
            "us_q75": time_of.q75 if time_of else None,
            "rounds": time_of.rounds if time_of else None,
            "workspace_bytes": workspace,
            "packed_bytes": packed,
            "error": errors[shown]["l2"] if shown in errors else None,
            "max_error": errors[shown]["max"] if shown in errors else None,
            "bias": errors[shown]["bias"] if shown in errors else None,
            "within": _within(group, accuracy, layout, times),
            "algorithms": mine_us,
            "errors": {name: errors[name] for name in sorted(errors)},
            "peers": peer_us,
            "best_peer": best_peer,
            "best_peer_us": times[best_peer].us if best_peer else None,
            "peer_error": group.entrants[best_peer].error["l2"] if best_peer else None,
            "peer_errors": {name: group.entrants[name].error["l2"] for name in running},
            "floor_us": floor_here(group.layer, group.n, accuracy, group.device),
            "timer_us": times[_TIMER].us,
            "notes": relevant,
            "peer_plans": dict(group.plans),
            "seconds": {part: round(seconds, 2) for part, seconds in group.seconds.items()},
            "few_rounds": sorted(
                name.removeprefix(prefix)
                for name in times
                if times[name].rounds < 20 and (name in names or name.startswith(prefix))
            ),
            "eager": {
                name.removeprefix(prefix): text
                for name, text in sorted(measured.eager.items())
                if name in names or name.startswith(prefix)
            },
        }
        if group.survey:
            kept = ("errors",) if group.keeps_named else ()
            row = {name: value for name, value in row.items() if name in kept or name not in _SURVEY_LEAVES_OUT}
            if group.keeps_named:
                packing = {name: times.get(prefix + name + _PACKING) for name in timed}
                row["with_packing"] = {name: its.us for name, its in packing.items() if its}
                row["bytes"] = {name: group.bytes[prefix + name] for name in mine if prefix + name in group.bytes}
            row["once_us"] = {
                name.removeprefix(prefix): us
                for name, us in group.once_us.items()
                if peers.is_peer(name) or name.startswith(prefix)
            }
        rows.append(row)
    return rows


def _within(group: Group, accuracy: str, layout: str, times: Mapping[str, timing.Timing]) -> dict[str, Any] | None:
    """What `auto` takes within `group.max_error`: the limit, the choice, its time and relative L2 error."""
    strict = group.strict.get((accuracy, layout))
    if strict is None:
        return None
    names = (f"{accuracy}/{layout}/{strict}", f"torch_{layout}" if strict == "torch" else "")
    name = next((name for name in names if name in times), "")
    us, error = (times[name].us, group.entrants[name].error["l2"]) if name else (None, None)
    return {"max_error": group.max_error, "auto": strict, "us": us, "error": error}


def measure(group: Group, algorithms: Sequence[str] | None, rounds: int, seed: int) -> list[results.Row]:
    """The rows of a group, one per class and layout of ours. Raises timing.DeviceLost if the GPU fails."""
    return finish(group, enter(group, algorithms, seed), rounds, seed)


Choices = dict[tuple[str, str], str]  # (class, layout) -> what `auto` takes


def enter(group: Group, algorithms: Sequence[str] | None, seed: int) -> Choices:
    """Makes the data, and runs every contender against the reference: what comes before anything is timed."""
    begin = time.perf_counter()
    reference = prepare_data(group, seed)
    begin = group.spent("data", begin)
    choices = _enter_all(group, reference, algorithms)
    group.spent("first runs", begin)
    return choices


def finish(group: Group, choices: Choices, rounds: int, seed: int) -> list[results.Row]:
    """Times what has entered, alone on the GPU."""
    begin = time.perf_counter()
    chosen = {f"{'/'.join(key)}/{choice}" for key, choice in choices.items()}
    chosen |= {f"{'/'.join(key)}/{choice}" for key, choice in group.strict.items()}
    chosen |= {name + _PACKING for name in chosen}
    group.announce("")  # each has run alone: from here on nobody in particular is to blame
    _estimate(group)
    if group.survey:
        slow, rounds = _drop_hopeless(group, chosen, rounds)
    else:
        slow = _slow(group, chosen)
    clocks = ClockMonitor(group.device)
    measured = timing.measure(
        {name: entrant.call for name, entrant in group.entrants.items()} | {_TIMER: lambda: None},
        device=group.device,
        rounds=rounds,
        few_rounds=slow,
        seed=seed,
        monitor=clocks,
    )
    group.spent("rounds", begin)
    return [row | clocks.found for row in _rows(group, choices, measured)]


def _estimate(group: Group) -> None:
    """How long those take who have entered: a first call has start-up in it, and maybe others' use of the GPU."""
    found = timing.estimate({name: entrant.call for name, entrant in group.entrants.items()}, group.device)
    for name, its in found.timings.items():
        group.entrants[name].estimate_us = its.us
    for name, why in found.failures.items():
        del group.entrants[name]
        group.notes[name] = why


def _slow(group: Group, chosen: set[str]) -> list[str]:
    """Those far behind, for whom 3 rounds are enough."""
    peer_names, peers_best = _peer_names(group), group.best_us(peers.is_peer)
    limits = {True: HOPELESS_PEER * peers_best, False: timing.SLOW * group.best_us()}
    entrants = sorted(group.entrants.items(), key=lambda item: item[1].estimate_us)
    close = [name for name, its in entrants if name in peer_names and its.is_rival][:CLOSE_PEERS]
    kept = {*chosen, *close}
    return [name for name, its in entrants if its.estimate_us > limits[name in peer_names] and name not in kept]


def _drop_hopeless(group: Group, chosen: set[str], rounds: int) -> tuple[list[str], int]:
    """Of a survey: keeps who is near the best of its side, class and layout; returns who runs 3 rounds only, and how
    many rounds the others run."""
    sides: dict[str, list[str]] = {}
    for name in group.entrants:
        sides.setdefault("" if peers.is_peer(name) else name.rpartition("/")[0], []).append(name)
    slow: list[str] = []
    peers_best = group.best_us(peers.is_peer)
    for names in sides.values():
        best = max(peers_best, group.best_us(names.__contains__))  # behind others of ours, it may still beat the rivals
        for name in names:
            us = group.entrants[name].estimate_us
            kept = name in chosen or (group.keeps_named and not peers.is_peer(name))
            if not kept and us > SURVEY_HOPELESS * best:
                del group.entrants[name]
                group.once_us[name] = us
            elif not kept and us > SURVEY_SLOW * best:
                slow.append(name)
    total_us = sum(its.estimate_us + SAMPLE_US for name, its in group.entrants.items() if name not in slow)
    return slow, max(SURVEY_ROUNDS, min(rounds, int(SURVEY_S * 1e6 / max(total_us, 1.0))))
