"""fuse: a copy of a model, for inference, in which what follows a convolution is computed inside it.

    convolution -> [batch norm] -> [+ residual] -> [activation]     or     ... -> activation -> + residual
                                                                    or     ... -> [activation] -> max-pool

becomes one `fastconv.FusedConv2d`, wherever each value between them has no other reader: the norm is folded into the
filters, the sum and the activation are the kernels' epilogue, which costs no pass over memory of its own.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from fastconv import ops, swap
from fastconv.fuse.graph import (
    IDENTITIES,
    IN_PLACE_SUMS,
    activation_of,
    is_altered,
    is_max_pool,
    is_sum,
    may_write,
    traced,
)
from fastconv.fuse.report import FuseReport, FuseRow
from fastconv.layer import Layer
from fastconv.nn import Conv2d, FusedConv2d, check_settings

__all__ = ["FusedModule", "fuse"]

# The relative L2 error of the filters that rounding them to their dtype makes is at most half a spacing, unless the
# norm's factors push them out of the dtype's range.
_ROUNDING_LIMIT = 1.0


class FusedModule(fx.GraphModule):
    """What `fuse` returns: a torch.fx.GraphModule for inference. Its `report` tells what was fused, and why not."""

    _rows: tuple[FuseRow, ...] = ()

    @property
    def report(self) -> FuseReport:
        """A row per convolution, with what ran so far: print it, or write it with `to_json`."""
        modules = dict(self.named_modules(remove_duplicate=False))
        rows = []
        for row in self._rows:
            layer = modules.get(row.name)
            if isinstance(layer, Layer):
                ran = layer.last_algorithm or layer.algorithm
                row = replace(row, algorithm=ran, last_input_shape=layer.last_input_shape)
            rows.append(row)
        return FuseReport(rows)

    def train(self, mode: bool = True) -> FusedModule:
        """Raises RuntimeError unless `mode` is False."""
        if mode:
            raise RuntimeError(
                "a fused model serves inference alone: its batch norms are folded into the weights; train the model "
                "that it was made from, and fuse that again"
            )
        super().train(False)
        return self

    def __deepcopy__(self, memo: Any) -> FusedModule:
        result = super().__deepcopy__(memo)
        assert isinstance(result, FusedModule)
        result._rows = self._rows
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        restore, arguments = super().__reduce__()
        return _restored, (restore, arguments, self._rows)


def _restored(restore: Callable[..., fx.GraphModule], arguments: tuple[Any, ...], rows: tuple[FuseRow, ...]) -> Any:
    plain = restore(*arguments)
    return _fused_module(plain, plain.graph, rows)


def _fused_module(root: nn.Module, graph: fx.Graph, rows: tuple[FuseRow, ...]) -> FusedModule:
    modes = {name: inner.training for name, inner in root.named_modules(remove_duplicate=False)}
    module = FusedModule(root, graph, "FusedModule")
    module._rows = rows
    # Not eval(): a norm or a dropout that was left in training mode computes what it did in the model.
    for name, inner in module.named_modules(remove_duplicate=False):
        inner.training = bool(name) and modes.get(name, False)
    return module


def fuse(
    model: nn.Module,
    *,
    algorithm: str = "auto",
    precision: str | None = None,
    max_error: float | None = None,
    max_workspace: int | None = None,
    filter_fn: Callable[[str, nn.Module], bool] | None = None,
    strict: bool = False,
) -> FusedModule:
    """A copy of `model` for inference, its convolutions fastconv's, with batch norms, residuals and activations inside.

    Each convolution that `swap_` would take is taken; a torch.nn.Conv2d together with those of the following that come
    after it, in this order, and whose input nobody else reads: a torch.nn.BatchNorm2d with running statistics, folded
    into the filters in float64; a sum with another value; ReLU, ReLU6, SiLU or LeakyReLU, as module or function. A sum
    may also come last, behind the activation, and a 2x2 max-pool of stride 2 in the place of a sum.

    Args:
        model: in evaluation mode, and such that torch.fx can trace its forward: no control flow that depends on values
            of tensors. Arguments with a default (None, a number, a string) keep it for good. What forward computes
            from no argument (a random number, a constant) is computed once, here.
        algorithm, precision, max_error, max_workspace: as for `fastconv.swap_`. Layers that were swapped before keep
            their own.
        filter_fn: `filter_fn(name, module) -> bool`; False leaves a convolution as it is.
        strict: raise if a convolution that the filter admits is not fastconv's, or if a norm, sum or activation
            directly behind it has to stay apart.

    Returns:
        A torch.fx.GraphModule with the parameters and buffers of `model` **as they are now**; a later change of `model`
        does not reach it. They require no gradient; state_dict has the convolutions' names, without the norms'. Its
        `report` has a row per convolution: what was fused, or the reason why not. It cannot be trained.

    Raises:
        TypeError, ValueError: an argument that is not one of these.
        RuntimeError: the model is in training mode.
        fastconv.UnsupportedError: the model cannot be copied or traced; or `strict`.

    Warns:
        UserWarning: if no convolution of the model runs on fastconv.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    if not isinstance(strict, bool):
        raise TypeError(f"strict is {strict!r}; expected a bool")
    check_settings(algorithm, precision, max_error, max_workspace)
    if model.training:
        raise RuntimeError("model is in training mode; expected model.eval(): batch norms are folded as they are there")
    root = _copied(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        swapped = swap.swap_(
            root, filter_fn, algorithm, precision, max_error=max_error, frozen=True, max_workspace=max_workspace
        )
    graph = traced(root)
    fusion = _Fusion(root, graph)
    rows = fusion.run(swapped)
    refused = [row for row in rows if row.reason_code not in ("", "filtered", "already_fused")]
    if strict and refused:
        lines = [f"  {row.name or '(model)'}: {row.fused}: {row.reason} [{row.reason_code}]" for row in refused]
        raise ops.UnsupportedError(
            "\n".join([f"{len(refused)} of {len(rows)} convolutions cannot be fused with what follows:", *lines])
        )
    if not any(row.fused for row in rows):
        warnings.warn("fastconv.fuse found no convolution that fastconv serves", stacklevel=2)
    module = _fused_module(root, graph, tuple(rows))
    return module.requires_grad_(False)


def _copied(model: nn.Module) -> nn.Module:
    if isinstance(model, torch.jit.ScriptModule):
        raise ops.UnsupportedError(
            "model is a TorchScript module; fuse what it was scripted from, and torch.jit.trace or torch.export that"
        )
    if is_altered(model):
        raise ops.UnsupportedError(
            "model has hooks or a forward of its own, which a traced copy would lose; fuse the modules inside it"
        )
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise ops.UnsupportedError(f"model cannot be copied: {type(error).__name__}: {error}") from error


# --- Patterns


@dataclass
class _Chain:
    """A call of a convolution and what can be computed with it."""

    nodes: list[fx.Node]  # the convolution's first; the last one's value is the fused layer's
    norm: str | None = None
    sum: fx.Node | None = None
    activation: str | None = None
    slope: float = 0.01
    residual_after: bool = False  # the sum is behind the activation
    max_pool: bool = False
    parts: list[str] = field(default_factory=lambda: ["conv"])
    next: fx.Node | None = None  # the operation behind it, if it is of a kind that could be fused and is not
    obstacle: tuple[str, str] = ("", "")  # why not

    @property
    def layer(self) -> tuple[Any, ...]:
        """What tells one fused layer of a convolution from another."""
        return self.norm, self.sums_in_place, self.activation, self.slope, self.residual_after, self.max_pool

    @property
    def sums_in_place(self) -> bool:
        return self.sum is not None and self.sum.target in IN_PLACE_SUMS

    @property
    def residual(self) -> fx.Node | None:
        """What is added, as the graph has it now."""
        if self.sum is None:
            return None
        return next(arg for arg in self.sum.args if isinstance(arg, fx.Node) and arg not in self.nodes)


class _Fusion:
    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        self.root = root
        self.graph = graph
        self.modules = dict(root.named_modules(remove_duplicate=False))
        self.claimed: set[fx.Node] = set()

    def run(self, swapped: swap.SwapReport) -> list[FuseRow]:
        """Rewrites the graph, puts the layers into the root and returns a row per convolution and way it is used."""
        self._drop_identities()
        chains: dict[int, list[_Chain]] = defaultdict(list)  # by the convolution's identity
        followed: list[_Chain] = []
        # From the last one: of two convolutions whose outputs are added, the later one finds the other's there.
        calls = [node for node in self.graph.nodes if isinstance(self._module(node), nn.Conv2d)]
        for node in reversed(calls):
            if type(self._module(node)) is Conv2d:
                followed.append(self._follow(node))
                chains[id(self._module(node))].append(followed[-1])
        # Only then sums and pools behind an activation: what another has as a sum before its activation stays that.
        for chain in followed:
            conv = self._module(chain.nodes[0])
            if isinstance(conv, Conv2d) and chain.activation is not None and chain.sum is None:
                self._extend(chain, conv)
        for chain in followed:
            if chain.next in self.claimed:  # by the other convolution of a sum
                chain.obstacle = "", ""
        rows: list[FuseRow] = []
        for entry in swapped.rows:
            module = entry._module()
            assert module is not None
            common = (entry.shape, entry.dtype, entry.device)
            name, found = entry.names[0], chains.get(id(module), [])
            if entry.reason_code not in ("", "already_swapped"):
                rows.append(FuseRow(name, *common, "", entry.reason_code, entry.reason))
            elif isinstance(module, Layer) and not isinstance(module, Conv2d):
                rows.append(FuseRow(name, *common, "conv", *self._left_apart(module)))
            elif type(module) is not Conv2d:
                code = "already_fused" if isinstance(module, FusedConv2d) else "subclass"
                rows.append(FuseRow(name, *common, "conv", code, f"it is a {type(module).__name__}"))
            elif not found:
                fused = "conv" if any(self._module(node) is module for node in calls) else ""
                rows.append(FuseRow(name, *common, fused, "not_called", "no call of it is in the traced forward"))
            else:
                for layer_name, chain in self._rewrite(name, module, found):
                    rows.append(FuseRow(layer_name, *common, "+".join(chain.parts), *chain.obstacle))
        return rows

    def _module(self, node: fx.Node) -> nn.Module | None:
        return self.modules[str(node.target)] if node.op == "call_module" else None

    def _left_apart(self, module: Layer) -> tuple[str, str]:
        """The code and text of what follows a layer that computes nothing but itself."""
        for node in [node for node in self.graph.nodes if self._module(node) is module]:
            if any(self._recognise(user, _Chain([node])) for user in node.users):
                return "kind", f"what follows a {type(module).__name__} stays apart"
        return "", ""

    def _drop_identities(self) -> None:
        for node in list(self.graph.nodes):
            module = self._module(node)
            if module is None or type(module) not in IDENTITIES or module.training or is_altered(module):
                continue
            if len(node.args) == 1 and isinstance(node.args[0], fx.Node):
                node.replace_all_uses_with(node.args[0])
                self.graph.erase_node(node)

    def _follow(self, node: fx.Node) -> _Chain:
        """The longest chain that begins with this call of a convolution."""
        chain = _Chain([node])
        conv = self._module(node)
        assert isinstance(conv, Conv2d)
        if is_altered(conv):
            chain.obstacle = "hooks", "it has hooks, which see the convolution's own output"
            return chain
        while chain.activation is None and self._extend(chain, conv):
            pass
        return chain

    def _extend(self, chain: _Chain, conv: Conv2d) -> bool:
        """Whether the operation behind the chain could be taken into it; if not, the chain says why."""
        users = list(chain.nodes[-1].users)
        kinds = [self._recognise(user, chain) for user in users]
        if not any(kinds):
            return False
        if len(users) > 1:
            chain.obstacle = "users", f"{len(users)} operations read what it would be fused with"
            return False
        user, take = users[0], kinds[0]
        assert take is not None
        chain.obstacle = self._written_between(chain.nodes[-1], user) or take(user, chain, conv)
        if chain.obstacle != ("", ""):
            chain.next = user
            return False
        chain.nodes.append(user)
        self.claimed.add(user)
        return True

    def _recognise(self, user: fx.Node, chain: _Chain) -> Callable[..., tuple[str, str]] | None:
        """How to take the operation into the chain; None if it is none that could follow."""
        if user in self.claimed:
            return None
        last, module = chain.nodes[-1], self._module(user)
        if chain.max_pool:
            return None
        if chain.activation is None and user.args[:1] == (last,) and activation_of(user, module) is not None:
            return self._take_activation
        if chain.sum is not None:
            return None
        if len(last.users) == 1 and is_max_pool(user, module):  # else it is read again, as in a U-Net: no obstacle
            return self._take_max_pool
        if is_sum(user) and last in user.args and len(set(user.args)) == 2:
            return self._take_sum
        if chain.activation is not None:
            return None
        if chain.norm is None and isinstance(module, nn.modules.batchnorm._BatchNorm) and user.args == (last,):
            return self._take_norm
        return None

    def _take_activation(self, user: fx.Node, chain: _Chain, conv: Conv2d) -> tuple[str, str]:
        module = self._module(user)
        if module is not None and is_altered(module):
            return "hooks", f"{user.target} has hooks or a forward of its own"
        found = activation_of(user, module)
        assert found is not None
        chain.activation, chain.slope = found
        chain.parts.append(chain.activation)
        return "", ""

    def _take_sum(self, user: fx.Node, chain: _Chain, conv: Conv2d) -> tuple[str, str]:
        if user.target in IN_PLACE_SUMS and user.args[0] is not chain.nodes[-1]:
            return "in_place", "the sum is written over another value"
        chain.sum = user
        chain.residual_after = chain.activation is not None
        chain.parts.append("residual")
        return "", ""

    def _take_max_pool(self, user: fx.Node, chain: _Chain, conv: Conv2d) -> tuple[str, str]:
        chain.max_pool = True
        chain.parts.append("max_pool")
        return "", ""

    def _take_norm(self, user: fx.Node, chain: _Chain, conv: Conv2d) -> tuple[str, str]:
        norm = self._module(user)
        assert isinstance(norm, nn.Module)
        obstacle = _norm_obstacle(conv, norm)
        if obstacle == ("", ""):
            chain.norm = str(user.target)
            chain.parts.append("bn")
        return obstacle

    def _written_between(self, first: fx.Node, last: fx.Node) -> tuple[str, str] | None:
        """The fused layer runs where the last operation was. What it reads must not be written over before that."""
        node = first.next
        while node is not last:
            if may_write(node, self._module(node)):
                return "in_place", f"{node.name}, which works in place, stands between them"
            node = node.next
        return None

    def _rewrite(self, name: str, conv: Conv2d, chains: list[_Chain]) -> Iterator[tuple[str, _Chain]]:
        """Puts fused layers in the place of a convolution's calls: one for each way that it is used."""
        ways: dict[tuple[Any, ...], list[_Chain]] = defaultdict(list)
        for chain in chains:
            ways[chain.layer].append(chain)
        for way in reversed(ways.values()):
            chain = way[0]
            if len(chain.nodes) == 1:
                yield name, chain
                continue
            kept = len(ways) > 1 or self._is_read(name) or self._called_around(name)
            layer_name = self._free_name(name) if kept else name
            norm = self.modules[chain.norm] if chain.norm is not None else None
            layer = _fused_layer(conv, norm, chain)
            self.root.set_submodule(layer_name, layer)
            self.modules[layer_name] = layer
            for member in way:
                self._replace(member, layer_name)
            yield layer_name, chain

    def _is_read(self, name: str) -> bool:
        """Whether the forward takes a parameter of the convolution by itself: it expects one without a norm in it."""
        return any(str(node.target).startswith(f"{name}.") for node in self.graph.find_nodes(op="get_attr"))

    def _called_around(self, name: str) -> list[str]:
        """The modules that are called as a whole and contain the convolution."""
        targets = {str(node.target) for node in self.graph.nodes if node.op == "call_module"}
        return sorted((target for target in targets if name.startswith(f"{target}.")), key=len)

    def _free_name(self, name: str) -> str:
        """A name beside the convolution; outside of what is called as a whole, which may run all that it contains."""
        outermost = next(iter(self._called_around(name)), name)
        parent = outermost.rpartition(".")[0]
        prefix = f"{parent}." if parent else ""
        base = name.removeprefix(prefix).replace(".", "_")
        taken = self.root.get_submodule(parent)
        return next(f"{prefix}{base}_{i}" for i in itertools.count(1) if not hasattr(taken, f"{base}_{i}"))

    def _replace(self, chain: _Chain, layer_name: str) -> None:
        first, last = chain.nodes[0], chain.nodes[-1]
        x = first.args[0] if first.args else first.kwargs["input"]
        residual = chain.residual
        with self.graph.inserting_after(last):
            fused = self.graph.call_module(layer_name, (x,) if residual is None else (x, residual))
        last.replace_all_uses_with(fused)
        for node in reversed(chain.nodes):
            self.graph.erase_node(node)


# --- Folding


def _norm_obstacle(conv: Conv2d, norm: nn.Module) -> tuple[str, str]:
    """The code and text of what keeps a batch norm from being folded into the convolution before it."""
    if type(norm) is not nn.BatchNorm2d:
        return "norm_class", f"the norm is a {type(norm).__module__}.{type(norm).__qualname__}"
    if is_altered(norm):
        return "hooks", "the norm has hooks or a forward of its own"
    if norm.training:
        return "norm_training", "the norm is in training mode"
    if norm.running_mean is None or norm.running_var is None:
        return "norm_statistics", "the norm has no running statistics; it takes those of each batch"
    if norm.num_features != conv.out_channels:
        return "norm_features", f"the norm has {norm.num_features} features; the convolution {conv.out_channels}"
    tensors = [t for t in (norm.running_mean, norm.running_var, norm.weight, norm.bias) if t is not None]
    if any(t.device != conv.weight.device for t in tensors):
        return "norm_device", f"the norm is on {tensors[0].device}; the convolution on {conv.weight.device}"
    if any(t.dtype not in (conv.weight.dtype, torch.float32) for t in tensors):
        return "norm_dtype", f"the norm is {tensors[0].dtype}; the convolution {conv.weight.dtype}"
    exact = _folded(conv, norm)
    rounded = [t.to(conv.weight.dtype).double() for t in exact]
    error = (rounded[0] - exact[0]).norm() / exact[0].norm().clamp_min(torch.finfo(torch.float64).tiny)
    if not (error <= _ROUNDING_LIMIT * torch.finfo(conv.weight.dtype).eps and bool(rounded[1].isfinite().all())):
        return "norm_range", f"the folded filters leave the range of {conv.weight.dtype}"
    return "", ""


@torch.no_grad()
def _folded(conv: Conv2d, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Filters and biases of norm(conv(x)) in float64: w * s and (b - mean) * s + shift, s = scale / sqrt(var + eps)."""
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    s = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        s = s * norm.weight.double()
    bias = -norm.running_mean.double() if conv.bias is None else conv.bias.double() - norm.running_mean.double()
    bias = bias * s if norm.bias is None else bias * s + norm.bias.double()
    return conv.weight.double() * s.view(-1, 1, 1, 1), bias


@torch.no_grad()
def _fused_layer(conv: Conv2d, norm: nn.Module | None, chain: _Chain) -> FusedConv2d:
    weight, bias = conv.weight, conv.bias
    if norm is not None:
        weight, bias = (t.to(conv.weight.dtype) for t in _folded(conv, norm))  # type: ignore[assignment]
    layer = FusedConv2d(
        conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups,
        bias is not None, conv.padding_mode, "meta", conv.weight.dtype, algorithm=conv.algorithm,
        precision=conv.precision, max_error=conv.max_error, max_workspace=conv.max_workspace,
        activation=chain.activation, negative_slope=chain.slope, residual_after=chain.residual_after,
        max_pool=chain.max_pool,
    )  # fmt: skip
    layer._sums_in_place = chain.sums_in_place
    layer._fastconv.frozen = True
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return layer.eval()
