"""fuse: a copy of a model, for inference, in which what follows a convolution is computed inside it.

    convolution -> [batch norm] -> [+ residual] -> [activation]     or     ... -> activation -> + residual
                                                                    or     ... -> [activation] -> max-pool

becomes one `fastconv.FusedConv2d`, wherever each value between them has no other reader: the norm is folded into the
filters, the sum and the activation are the kernels' epilogue, which costs no pass over memory of its own. Constant
factors and summands of channels, as of a FrozenBatchNorm2d, are folded as a norm is, also before a convolution. What
goes into a convolution, `fastconv.rewrites` says; here is the way in and out, from modules to modules. What takes the
sizes of a call to decide, concatenations without a copy and norms before convolutions, is in `lowering`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from fastconv import ops, rewrites, settings, swap
from fastconv.fuse import graph as graphs
from fastconv.fuse.lowering import Lowerings, is_candidate
from fastconv.layer import Layer
from fastconv.nn import Conv2d, FusedConv2d, MaxPool2d, Upsample, check_settings
from fastconv.norm import InputNorm, Operand
from fastconv.reports import by
from fastconv.rewrites import constants
from fastconv.rewrites.branches import BRANCHES
from fastconv.rewrites.choosing import norm_before
from fastconv.rewrites.convolution import Call, Left, Pool, Record, Taken, Upsampling, call_of, layer_call
from fastconv.rewrites.editor import Editor, Spelled, spelled
from fastconv.rewrites.patterns import EPILOGUE, NOTHING, POOL, UPSAMPLING
from fastconv.rewrites.preceding import PRECEDING
from fastconv.rewrites.report import RewriteReport
from fastconv.rewrites.scaling import SCALING
from fastconv.serving import layout_advice

__all__ = ["FusedModule", "fuse"]


class FusedModule(fx.GraphModule):
    """What `fuse` returns: a torch.fx.GraphModule for inference. Its `report` tells what was fused, and why not."""

    _found: tuple[Record, ...] = ()
    _lowerings: Lowerings | None = None  # None: there is nothing to lower
    _without_autocast: tuple[str, ...] = ()  # devices for which the model switches it off somewhere

    @property
    def report(self) -> RewriteReport:
        """What became of the convolutions, with what ran so far: print it, or write it with `to_json`."""
        modules = dict(self.named_modules(remove_duplicate=False))
        lowered = self._lowerings and self._lowerings.latest
        around, concatenations = (lowered.layers, lowered.concatenations) if lowered else ({}, [])
        if lowered:
            modules |= {name: getattr(modules[name], "_wide", None) or modules[name] for name in lowered.wide}
        found = [_as_it_ran(record, modules.get(record.name), around.get(record.name)) for record in self._found]
        norms = {record.name for record in found if isinstance(record, Left)} & (lowered.norms if lowered else set())
        report = RewriteReport([[*(r for r in found if r.name not in norms), *concatenations]])
        layers = (modules.get(record.name) for record in found if isinstance(record, Taken))
        report.advice = layout_advice((layer, layer._fastconv) for layer in layers if isinstance(layer, Layer))
        return report

    def recompile(self) -> Any:
        """Of torch.fx: makes forward of the graph. Calls that `Lowerings` serves have code of their own."""
        before, code = self.__dict__.get("_code"), super().recompile()
        if self._lowerings is not None and code.src != before:  # of the graph as it was
            self._lowerings = Lowerings()
        generated = type(self).forward
        signature = inspect.signature(generated)

        @functools.wraps(generated)
        def forward(self: FusedModule, *args: Any, **kwargs: Any) -> Any:
            if any(map(torch.is_autocast_enabled, self._without_autocast)):
                raise ops.UnsupportedError(
                    "the model switches autocast off for a part of its forward, which a trace does not record: call "
                    "what was fused without autocast, or use fastconv.compile"
                )
            if self._lowerings is None or torch.compiler.is_compiling():
                return generated(self, *args, **kwargs)
            if kwargs:
                bound = signature.bind(self, *args, **kwargs)
                bound.apply_defaults()
                args = bound.args[1:]
            lowered = self._lowerings.find(self, args, self._found)
            return (generated if lowered is None or lowered.forward is None else lowered.forward)(self, *args)

        type(self).forward = forward  # type: ignore[method-assign]
        return code

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        if self._lowerings is not None:
            self._lowerings = Lowerings()
        return super()._apply(fn, recurse)

    def train(self, mode: bool = True) -> FusedModule:
        """Raises RuntimeError unless `mode` is False."""
        if mode:
            raise RuntimeError(
                "a fused model serves inference alone: its batch norms are folded into the weights; train the model "
                "that it was made from, and fuse that again"
            )
        super().train(False)
        return self

    def __prepare_scriptable__(self) -> None:
        """What torch.jit.script asks every module first: it would compile the report."""
        raise ops.UnsupportedError(
            "torch.jit.script cannot compile a fused model: script the model that it was made from, or use "
            "torch.compile or torch.export"
        )

    def __deepcopy__(self, memo: Any) -> FusedModule:
        result = super().__deepcopy__(memo)
        assert isinstance(result, FusedModule)
        result._found, result._without_autocast = self._found, self._without_autocast
        result._lowerings = copy.deepcopy(self._lowerings)
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        restore, arguments = super().__reduce__()
        return _restored, (restore, arguments, self._found, self._without_autocast)


def _restored(restore: Callable[..., fx.GraphModule], arguments: tuple[Any, ...], *rest: Any) -> Any:
    plain = restore(*arguments)
    return _fused_module(plain, plain.graph, *rest)


def _fused_module(
    root: nn.Module, graph: fx.Graph, found: tuple[Record, ...], without_autocast: tuple[str, ...] = ()
) -> FusedModule:
    modes = {name: inner.training for name, inner in root.named_modules(remove_duplicate=False)}
    module = FusedModule(root, graph, "FusedModule")
    module._found, module._without_autocast = found, without_autocast
    if is_candidate(graph, module):
        module._lowerings = Lowerings()
    # Not eval(): a norm or a dropout that was left in training mode computes what it did in the model.
    for name, inner in module.named_modules(remove_duplicate=False):
        inner.training = bool(name) and modes.get(name, False)
    return module


def fuse(
    model: nn.Module,
    precision: str | None = None,
    *,
    algorithm: str = "auto",
    max_error: float | None = None,
    max_workspace: int | None = None,
    filter_fn: Callable[[str, nn.Module], bool] | None = None,
    strict: bool = False,
) -> FusedModule:
    """A copy of `model` for inference, its convolutions fastconv's, with batch norms, residuals and activations inside.

    Each convolution that `swap_` would take is taken; a torch.nn.Conv2d together with those of the following that come
    after it, in this order, and whose input nobody else reads: a torch.nn.BatchNorm2d, SyncBatchNorm or batch_norm with
    running statistics, and factors, divisors and summands that are numbers or tensors of the model with one number, or
    one for each channel (FrozenBatchNorm2d), folded into the filters in float64, as are factors, and without padding
    norms and summands, before it; a sum with another value; ReLU, ReLU6, SiLU, LeakyReLU, GELU, Hardswish or Sigmoid,
    as module or function. A sum may also come last, behind the activation, and a 2x2 max-pool of stride 2 in the place
    of a sum. Max-pools that stay apart become fastconv's (`fastconv.nn.MaxPool2d`), and so do nearest-neighbour
    upsamplings by integers (`fastconv.nn.Upsample`). In calls without gradients convolutions also write, and read,
    ranges of concatenations along channels, and compute a norm with ReLU, ReLU6 or SiLU that stands before them, where
    the planner expects that to pay for the inputs of the call.

    Args:
        model: in evaluation mode, and such that torch.fx can trace its forward: no control flow that depends on values
            of tensors, and no buffer or parameter that it writes over. Arguments with a default (None, a number, a
            string) keep it for good. What forward computes from no argument (a random number, a constant) is computed
            once, here.
        precision, algorithm, max_error, max_workspace: as for `fastconv.swap_`. Layers that were swapped before keep
            their own.
        filter_fn: `filter_fn(name, module) -> bool`; False leaves a convolution as it is.
        strict: raise if a convolution that the filter admits is not fastconv's, or if a norm, factor, sum or
            activation directly behind it has to stay apart.

    Returns:
        A torch.fx.GraphModule with the parameters and buffers of `model` **as they are now**; a later change of `model`
        does not reach it. They require no gradient; state_dict has the convolutions' names, without the norms'. Its
        `report` tells what was fused into each convolution, or the reason why not. It cannot be trained.

    Raises:
        TypeError, ValueError: an argument that is not one of these.
        RuntimeError: the model is in training mode.
        fastconv.UnsupportedError: the model cannot be copied or traced; or `strict`.

    Warns:
        UserWarning: if no convolution of the model runs on fastconv.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    settings.check_flag("strict", strict)
    check_settings(algorithm, precision, max_error, max_workspace)
    if model.training:
        raise RuntimeError("model is in training mode; expected model.eval(): batch norms are folded as they are there")
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    if lazy := [name for name, tensor in tensors if is_lazy(tensor)]:
        raise ops.UnsupportedError(
            f"model has values that are not there yet, {lazy[0]}; call it once before it is fused"
        )
    root = _copied(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        swapped = swap.swap_(
            root, filter_fn, algorithm, precision, max_error=max_error, frozen=True, max_workspace=max_workspace
        )
    graph, without_autocast = graphs.traced(root)
    fused = _Model(root, graph)
    found = fused.put_layers(swapped)
    refused = [taken for taken in found if taken.obstacle[0] not in ("", "filtered", "already_fused")]
    if strict and refused:
        lines = [f"  {t.name or '(model)'}: {'+'.join(t.parts)}: {t.obstacle[1]} [{t.obstacle[0]}]" for t in refused]
        raise ops.UnsupportedError(
            "\n".join([f"{len(refused)} of {len(found)} convolutions cannot be fused with what follows:", *lines])
        )
    if not any(taken.parts for taken in found):
        warnings.warn("fastconv.fuse found no convolution that fastconv serves", stacklevel=2)
    records = (*found, *fused.left, *fused.apart)
    return _fused_module(root, graph, records, without_autocast).requires_grad_(False)


def _copied(model: nn.Module) -> nn.Module:
    if isinstance(model, torch.jit.ScriptModule):
        raise ops.UnsupportedError(
            "model is a TorchScript module; fuse what it was scripted from, and torch.jit.trace or torch.export that"
        )
    if graphs.is_altered(model):
        raise ops.UnsupportedError(
            "model has hooks or a forward of its own, which a traced copy would lose; fuse the modules inside it"
        )
    try:
        with torch.inference_mode(False):  # whose tensors would not count what is written over them
            return copy.deepcopy(model)
    except Exception as error:
        raise ops.UnsupportedError(f"model cannot be copied: {type(error).__name__}: {error}") from error


class _Layers(Editor):
    """Of a graph of modules: what depends on weights is computed at once, and convolutions, max-pools and
    upsamplings are calls of their layers."""

    def __init__(self, graph: fx.Graph, root: nn.Module) -> None:
        super().__init__(graph)
        self.root = root
        self.apart: list[Pool | Upsampling] = []

    @torch.no_grad()
    def emit(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    def convolution(self, conv: fx.Node, by: fx.Node, call: Sequence[Any]) -> fx.Node:
        call = Call(*call)
        new = self.graph.call_module(str(conv.target), (call.input,))
        if call.residual is not None:
            new.args = (call.input, call.residual)
            is_sum = conv.args == (call.input,)
            new.meta["sums_in_place"] = spelled(by).writes if is_sum else conv.meta["sums_in_place"]
        new.meta["constant_dims"] = _constant_dims(conv, by, call)
        new.meta["adds_input"] = conv.meta.get("adds_input", False)
        new.meta["spelled"] = Spelled(
            ops.conv2d_op, lambda x, residual=None: call._replace(input=x, residual=residual), pads=spelled(conv).pads
        )
        return new

    def max_pool(self, node: fx.Node, *arguments: Any) -> fx.Node:
        kernel, stride, padding, dilation, ceil_mode = arguments
        pool = MaxPool2d(kernel, stride, padding, dilation, ceil_mode=ceil_mode)
        return self._put(node, "max_pool", pool, Pool)

    def upsampling(self, node: fx.Node, scales: Sequence[float]) -> fx.Node:
        same = len(set(scales)) == 1  # one number may be meant for an input of other dimensions
        layer = Upsample(scale_factor=scales[0] if same else tuple(scales))
        return self._put(node, "upsample", layer, Upsampling)

    def operand(self, x: fx.Node, constants: Sequence[Any], weight: Tensor) -> fx.Node:
        if not constants:
            return x
        name = self._free("operand")
        self.root.set_submodule(name, Operand(constants, weight).eval())
        return self.graph.call_module(name, (x,))

    def _free(self, kind: str) -> str:
        return next(f"{kind}_{i}" for i in itertools.count(1) if not hasattr(self.root, f"{kind}_{i}"))

    def _put(self, node: fx.Node, kind: str, layer: nn.Module, record: Callable[[str], Pool | Upsampling]) -> fx.Node:
        """The layer's call, under the name of the module that the node calls, or a new one."""
        name = str(node.target) if node.op == "call_module" else self._free(kind)
        self.root.set_submodule(name, layer.eval())
        self.apart.append(record(name))
        return self.graph.call_module(name, (node.all_input_nodes[0],))


def _constant_dims(conv: fx.Node, by: fx.Node, call: Call) -> int:
    """The most dimensions of the constants that are in a convolution once it has taken `by` in: what that writes over
    keeps its own, and a residual stays one."""
    is_constants = by.target in graphs.ARITHMETIC and call.residual is None and not spelled(by).writes
    others = by.all_input_nodes if is_constants else []
    values = (constants.known([each]) for each in others if each.meta.get("constant"))
    found = (value.dim() for each in values for value in each or () if isinstance(value, Tensor))
    return max(*(each.meta.get("constant_dims", 0) for each in (conv, *others)), *found, 0)


class _Model:
    """A copy of a model with the graph of its forward, whose convolutions have taken in what follows them."""

    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        self.root, self.graph = root, graph
        self.modules = dict(root.named_modules(remove_duplicate=False))
        graphs.split_norms(graph, self.modules)
        graphs.drop_identities(graph, self.modules)
        decided = graphs.mark_constants(graph, root, self.modules)
        graphs.spell(graph, self.modules)
        layers = _Layers(graph, root)
        called = self._convolutions()
        rewriting = (PRECEDING, BRANCHES, *SCALING, *EPILOGUE, NOTHING, POOL, UPSAMPLING)
        self.left = rewrites.apply(graph, rewriting, rewrites.Asked(packed=True), layers)
        layers.erase(*reversed(decided))  # what is in weights now
        self.merged = called - self._convolutions()  # into others, which the report tells of
        self.apart = layers.apart
        for node in graph.find_nodes(op="call_module"):
            call = call_of(node) if "fastconv" in node.meta else None
            norm = norm_before(call.input) if call is not None else None
            if norm is not None and spelled(node).obstacle is None and norm.nodes[0].op == "call_module":
                self.modules[str(norm.nodes[0].target)].__class__ = InputNorm

    def _convolutions(self) -> set[int]:
        """The identities of those that the graph calls."""
        calls = (node for node in self.graph.find_nodes(op="call_module") if "fastconv" in node.meta)
        return {id(self.modules[str(node.target)]) for node in calls}

    def put_layers(self, swapped: swap.SwapReport) -> list[Taken]:
        """Makes layers of what the convolutions compute now. Returns a record per convolution and way it is used."""
        calls: dict[int, list[fx.Node]] = defaultdict(list)  # by the convolution's identity
        for node in self.graph.find_nodes(op="call_module"):
            if "fastconv" in node.meta:
                calls[id(self.modules[str(node.target)])].append(node)
        found = [taken for entry in swapped.rows for taken in self._outcome(entry, calls)]
        for node in self.graph.nodes:
            for key in ("kind", "spelled", "fastconv", "sums_in_place", "constant_dims"):
                node.meta.pop(key, None)
        return found

    def _outcome(self, entry: swap.SwapRow, calls: dict[int, list[fx.Node]]) -> Iterator[Taken]:
        module, name = entry._module(), entry.names[0]
        nodes = calls[id(module)]
        apart = Taken(name, entry.shape, by(entry.stride), entry.groups, entry.dtype, entry.device, [])
        if entry.reason_code not in ("", "already_swapped"):
            apart.obstacle = entry.reason_code, entry.reason
        elif isinstance(module, Conv2d) and type(module) is not Conv2d:
            apart.parts = ["conv"]
            code = "already_fused" if isinstance(module, FusedConv2d) else "subclass"
            apart.obstacle = code, f"it is a {type(module).__name__}"
        elif id(module) in self.merged:
            return
        elif not nodes:
            apart.parts = ["conv"] * bool(self._called_around(name))
            apart.obstacle = "not_called", "no call of it is in the traced forward"
        else:
            assert isinstance(module, Layer)
            yield from self._ways(name, module, nodes)
            return
        yield apart

    def _ways(self, name: str, layer: Layer, nodes: list[fx.Node]) -> Iterator[Taken]:
        """Puts a fused layer in the place of a convolution for each way in which it is used."""
        ways: dict[tuple[Any, ...], list[fx.Node]] = defaultdict(list)
        for node in nodes:
            call = call_of(node)
            assert call is not None
            others = node.meta.get("sums_in_place"), call.residual_after, call.max_pool
            ways[id(call.weight), call.activation, call.negative_slope, others].append(node)
        for way in ways.values():
            taken = next((n.meta["fastconv"] for n in way if n.meta["fastconv"].obstacle[0]), way[0].meta["fastconv"])
            taken.name = name
            if len(taken.parts) > 1:
                kept = len(ways) > 1 or self._is_read(name) or self._called_around(name)
                taken.name = self._free_name(name) if kept else name
                self.root.set_submodule(taken.name, _fused_layer(layer, way[0]))
                for node in way:
                    node.target = taken.name
            yield taken

    def _is_read(self, name: str) -> bool:
        """Whether the forward takes a parameter of the convolution by itself: it expects one without a norm in it."""
        return any(str(node.target).startswith(f"{name}.") for node in self.graph.find_nodes(op="get_attr"))

    def _called_around(self, name: str) -> list[str]:
        """The modules that are called as a whole and contain the convolution."""
        targets = {str(node.target) for node in self.graph.find_nodes(op="call_module")}
        return sorted((target for target in targets if name.startswith(f"{target}.")), key=len)

    def _free_name(self, name: str) -> str:
        """A name beside the convolution; outside of what is called as a whole, which may run all that it contains."""
        outermost = next(iter(self._called_around(name)), name)
        parent = outermost.rpartition(".")[0]
        prefix = f"{parent}." if parent else ""
        base = name.removeprefix(prefix).replace(".", "_")
        taken = self.root.get_submodule(parent)
        return next(f"{prefix}{base}_{i}" for i in itertools.count(1) if not hasattr(taken, f"{base}_{i}"))


def _fused_layer(conv: Any, node: fx.Node) -> FusedConv2d:
    call = call_of(node)
    assert call is not None
    layer = FusedConv2d(
        conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups,
        call.bias is not None, conv.padding_mode, "meta", conv.weight.dtype, algorithm=conv.algorithm,
        precision=conv.precision, max_error=conv.max_error, max_workspace=conv.max_workspace,
        activation=None if call.activation == "none" else call.activation, negative_slope=call.negative_slope,
        residual_after=call.residual_after, max_pool=call.max_pool,
    )  # fmt: skip
    layer._sums_in_place = node.meta.get("sums_in_place", False)
    layer._constant_dims = node.meta.get("constant_dims", 0)
    layer._adds_input = node.meta.get("adds_input", False)
    layer._needs_batch = node.meta.get("needs_batch", False)
    layer._fastconv.frozen = True
    weight, bias = cast(tuple[Tensor, Tensor | None], (call.weight, call.bias))
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return layer.eval()


def _as_it_ran(record: Record, layer: nn.Module | None, around: tuple[Taken, dict[str, Any]] | None) -> Record:
    """The record of a layer with its most recent call in it. `around`: what that had around it."""
    if not isinstance(record, Taken) or not isinstance(layer, Layer):
        return record
    record, arguments = around or (record, {})
    ran = replace(record, algorithm=layer.last_algorithm or layer.algorithm, input_shape=layer.last_input_shape)
    if ran.input_shape is not None and len(ran.input_shape) == 4 and isinstance(layer, Conv2d):
        # A range is one of channels_last, whatever the format of the model's input and weights.
        format = torch.channels_last if arguments.get("y_channels") else torch.contiguous_format
        x = torch.empty(ran.input_shape, dtype=layer.weight.dtype, device="meta", memory_format=format)
        ran.expect(layer_call(layer, x, x if "residual" in ran.parts else None), **arguments)
    return ran
