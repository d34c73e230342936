"""What Inductor's freezing would do wrongly to the convolutions that stay PyTorch's, and what keeps it from that."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

aten, prims = torch.ops.aten, torch.ops.prims

_PASS = "joint_custom_post_pass"  # Inductor's option: the last pass before it freezes
_ARITHMETIC = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)
# What may vanish between a convolution and an activation: folded into the one, or a sum that goes in with the other.
_STEPS = (*_ARITHMETIC, prims.convert_element_type.default, aten.alias.default, aten.clone.default, aten.view.default)
_CLAMPS = (
    aten.relu.default, aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default, aten.hardtanh.default,
)  # fmt: skip


class Apart(CustomGraphPass):
    """Hides from Inductor's freezing

    - transposed convolutions, on any device: it folds norms, factors and summands behind them into the weight's first
      dimension, as if that were the output's channels. They stand behind `aten.alias`, which Inductor drops after it
      has folded and before it fuses and lowers;
    - on a CPU, ReLU and what else clamps, behind any convolution: where oneDNN ends its convolution with that, it makes
      a number of NaN. They read through a view that costs nothing, and are a pass of their own.
    """

    def __call__(self, graph: fx.Graph) -> None:
        convolved: set[fx.Node] = set()
        for node in list(graph.nodes):
            is_step = node.target in _STEPS and any(arg in convolved for arg in node.all_input_nodes)
            if is_step or node.target is aten.convolution.default:
                convolved.add(node)
            elif _loses_nan(node) and node.args[0] in convolved:
                _insert(graph, aten.permute.default, list(range(node.meta["val"].dim())), before=node)
        for node in graph.find_nodes(op="call_function", target=aten.convolution.default):
            if len(node.args) > 6 and node.args[6]:  # is transposed
                _insert(graph, aten.alias.default, behind=node)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def _insert(
    graph: fx.Graph, target: Any, *arguments: Any, before: fx.Node | None = None, behind: fx.Node | None = None
) -> None:
    """A view between a node and what it reads first, or between a node and all who read it."""
    value: Any = behind if before is None else before.args[0]
    with graph.inserting_after(value):
        view = graph.call_function(target, (value, *arguments))
    view.meta = dict(value.meta)
    value.replace_all_uses_with(view, lambda user: user is not view and before in (None, user))


def _loses_nan(node: fx.Node) -> bool:
    """Whether it is an activation, or begins one, that oneDNN computes by comparisons."""
    if node.op != "call_function" or not node.args or not isinstance(x := node.args[0], fx.Node):
        return False
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        return False
    if node.target is aten.gt.Scalar:  # leaky ReLU of slope zero
        return any(user.target is aten.mul.Tensor and user.args == (x, 0) for user in x.users)
    # x * clamp(x + 3) is hardswish, which keeps NaN.
    is_hardswish = x.target is aten.add.Tensor and x.args[1] == 3 and len(x.args[0].users) > 1  # type: ignore[union-attr]
    return node.target in _CLAMPS and not is_hardswish


class _Both(CustomGraphPass):
    """One pass after another: some releases take no list of them."""

    def __init__(self, first: Any, second: CustomGraphPass) -> None:
        self.first, self.second = first, second

    def __call__(self, graph: fx.Graph) -> None:
        self.first(graph)
        self.second(graph)

    def uuid(self) -> Any:
        first = self.first.uuid() if isinstance(self.first, CustomGraphPass) else None
        return None if first is None else (first, self.second.uuid())  # none: nothing is cached


def with_pass(patches: dict[str, Any], name: str, mine: CustomGraphPass) -> dict[str, Any]:
    """Inductor's options, with a pass behind those that stand there."""
    others = patches.get(name, getattr(config, name))
    if others is None:
        return patches | {name: mine}
    return patches | {name: [*others, mine] if isinstance(others, (list, tuple)) else _Both(others, mine)}


def kept_right(patches: dict[str, Any]) -> dict[str, Any]:
    """Inductor's options for what may be frozen."""
    return with_pass(patches, _PASS, Apart())
