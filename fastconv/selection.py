"""What the planner says of each pass of a convolution: for `explain`, `tune` and the reports. The operators ask it
themselves (csrc/plan)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from fastconv import _C, ops, settings

PASSES = ("forward", "backward_input", "backward_weight")

_LIBRARY = {row["name"] for row in _C.algorithms() if row["family"] == "library"}


def is_librarys(algorithm: str) -> bool:
    """Whether it is PyTorch's, and none of fastconv's own."""
    return algorithm in _LIBRARY


class Chosen(NamedTuple):
    """What `auto` takes for a pass."""

    name: str  # a name of `candidates`
    measured: bool  # `fastconv.tune` measured it to be the fastest
    row: dict[str, Any]  # the planner's


def check_passes(passes: Any) -> tuple[str, ...]:
    """The passes, each once. TypeError or ValueError if they are none."""
    if isinstance(passes, str) or not isinstance(passes, Iterable):
        raise TypeError(f"passes is {passes!r}; expected some of {', '.join(PASSES)}")
    found = tuple(dict.fromkeys(passes))
    for name in found:
        if name not in PASSES:
            raise ValueError(f"passes has {name!r}; expected some of {', '.join(PASSES)}")
    if not found:
        raise ValueError(f"passes is empty; expected some of {', '.join(PASSES)}")
    return found


def candidates(pass_: str, problem: _C.ConvProblem, device: _C.DeviceInfo) -> list[dict[str, Any]]:
    """A row per way to compute a pass; `algorithm` is its name.

    Of the forward pass and of weight gradients that is an algorithm of the registry. An input gradient is "torch",
    PyTorch's, or made of forward convolutions of stride 1: a method and an algorithm, "phases winograd_fused" (one for
    each phase of the stride) or "together implicit_gemm" (one for all).
    """
    ask = {"forward": _C.candidates, "backward_input": _C.input_gradients, "backward_weight": _C.weight_gradients}
    return ask[pass_](problem, device)


def is_name(pass_: str, name: str) -> bool:
    """Whether a candidate of the pass may be called so."""
    algorithms = {row["name"] for row in _C.algorithms()}
    method, space, algorithm = name.partition(" ")
    if pass_ == "backward_input" and space:
        return method in ("phases", "together") and (algorithm == "auto" or algorithm in algorithms)
    return name == "torch" or (name in algorithms and pass_ != "backward_input")


def choose(pass_: str, problem: _C.ConvProblem, device: _C.DeviceInfo, asked: str | None = None) -> Chosen:
    """What runs where `asked` is asked for, by default `auto`. Raises UnsupportedError if that does not fit."""
    name = settings.auto_algorithm if asked is None else asked
    if pass_ == "backward_weight":
        row = _C.choose_weight_gradient(name, problem, device)
        return Chosen(row["algorithm"], row["measured"], row)
    if pass_ == "backward_input":
        row = _C.choose_input_gradient(name, problem, device)
        found = row["name"]
        if row["method"] != "torch" and row["algorithm"] == "auto":
            each = {ops.choose("auto", one, device)["algorithm"] for one in row["different"]}
            found = f"{row['method']} {each.pop() if len(each) == 1 else 'auto'}"
        return Chosen(found, row["measured"], row)
    row = ops.choose(name, problem, device)
    return Chosen(row["algorithm"], row["measured"], row)
