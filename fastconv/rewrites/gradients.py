"""aten.convolution_backward -> the gradients of ours, in the joint graph of a model that trains."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fastconv import ops, selection
from fastconv.rewrites.convolution import Asked, Call, Obstacle, describe, is_in_class, measure, obstacle_of, problem_of
from fastconv.rewrites.editor import Editor, value_of
from fastconv.rewrites.patterns import Match, Rewrite, new_call

aten = torch.ops.aten


def _find_gradient(node: fx.Node, asked: Asked) -> Match | None:
    _, _, weight, _, stride, _, _, _, _, groups, _ = node.args
    if not node.users or any(user.target is not operator.getitem for user in node.users):
        return None
    return Match(node, taken=describe(node, weight, stride, groups, "gradients"))  # type: ignore[arg-type]


def _gradient_call(node: fx.Node, asked: Asked) -> Call:
    _, x, weight, _, stride, padding, dilation, _, _, groups, _ = node.args
    return new_call(asked, x, weight, None, stride, padding, dilation, groups)


def _gradient_obstacle(match: Match, asked: Asked) -> Obstacle | None:
    _, x, weight, _, *geometry, mask = match.node.args
    obstacle = obstacle_of(value_of(x), value_of(weight), *geometry)
    if obstacle is not None:
        return obstacle
    call = _gradient_call(match.node, asked)
    if not is_in_class(call):
        return None  # in this class PyTorch's would be another function
    problem = problem_of(call)
    if problem is None:
        return None
    wanted = [pass_ for pass_, is_wanted in zip(selection.PASSES[1:], mask, strict=False) if is_wanted]  # type: ignore[arg-type]
    measure(call, wanted, packs=True)
    device = ops.device_info(value_of(x).device)
    chosen = {
        pass_.removeprefix("backward_"): selection.choose(pass_, problem, device, call.algorithm) for pass_ in wanted
    }
    assert match.taken is not None
    match.taken.algorithm = ", ".join(f"{what}: {choice.name}" for what, choice in chosen.items())
    if any(choice.name != "torch" for choice in chosen.values()):
        return None
    how = "was measured" if all(choice.measured for choice in chosen.values()) else "is estimated"
    return "cost", f"PyTorch's gradient {how} to be the fastest"


def _as_gradients(match: Match, asked: Asked, edit: Editor) -> fx.Node:
    node, call = match.node, _gradient_call(match.node, asked)
    grad = node.args[0]
    rest = (*call.geometry, call.algorithm, call.precision, call.backend_flags, call.max_error, call.max_workspace)

    def sizes(of: fx.Node) -> list[Any]:
        shape = value_of(of).shape
        return [size if isinstance(size, int) else edit.emit(aten.sym_size.int, of, i) for i, size in enumerate(shape)]

    made: dict[int, fx.Node] = {}
    users = {user.args[1] for user in node.users}
    if {0, 1} <= users and all(type(size) is int for size in call.geometry.sizes):
        text = ops.compiled_settings(call.geometry.sizes, call.options)
        both = edit.emit(ops.conv2d_gradients_op, grad, call.input, call.weight, text)
        made = {i: edit.emit(operator.getitem, both, i) for i in (0, 1)}
    for user in list(node.users):
        index = user.args[1]
        assert isinstance(index, int)
        if index not in made:
            if index == 0:
                made[0] = edit.emit(ops.input_gradient_op, grad, call.weight, sizes(call.input), *rest)
            elif index == 1:
                made[1] = edit.emit(ops.weight_gradient_op, call.input, grad, sizes(call.weight), *rest)
            else:
                made[2] = edit.emit(aten.sum.dim_IntList, grad, [0, 2, 3])
        edit.replace(user, made[index])
        edit.erase(user)
    last = next(reversed(made.values()))
    last.meta["fastconv"] = match.taken
    return last


GRADIENTS = Rewrite(
    "gradients", (aten.convolution_backward.default,), _find_gradient, _gradient_obstacle, _as_gradients
)
