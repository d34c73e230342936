"""The graph of a model for `fuse`: how it is traced, and what its modules, functions and methods mean to rewrites."""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.utils import _pair

from fastconv import ops
from fastconv.layer import Layer
from fastconv.nn import Conv2d, MaxPool2d, Upsample
from fastconv.norm import InputNorm
from fastconv.ops.autocast import noting_off
from fastconv.ops.geometry import pair
from fastconv.ops.upsampling import scales_of
from fastconv.rewrites import constants
from fastconv.rewrites.convolution import describe, layer_call
from fastconv.rewrites.editor import Obstacle, Spelled
from fastconv.rewrites.patterns import ACTIVATIONS

aten = torch.ops.aten

# Operators of two values by the methods and functions that call them.
ARITHMETIC: dict[Any, Any] = {
    target: operation
    for operation, names in {
        aten.add.Tensor: ("add",), aten.sub.Tensor: ("sub", "subtract"), aten.mul.Tensor: ("mul", "multiply"),
        aten.div.Tensor: ("div", "divide", "truediv", "true_divide"),
    }.items()
    for name in names
    for target in (name, f"{name}_", *(getattr(m, n, None) for m in (operator, torch) for n in (name, f"i{name}")))
    if target is not None
}  # fmt: skip
_IN_PLACE = (
    "iadd", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "ilshift",
    "irshift", "setitem",
)  # fmt: skip
_IN_PLACE_OPERATORS = [getattr(operator, name) for name in _IN_PLACE]
# Functions and methods whose value may be a range of their first argument.
_VIEWS = (
    "getitem", "getattr", "view", "view_as", "reshape", "flatten", "unflatten", "ravel", "permute", "movedim",
    "transpose", "swapaxes", "t", "squeeze", "unsqueeze", "expand", "expand_as", "narrow", "select", "diagonal",
    "unfold", "chunk", "split", "tensor_split", "unbind", "detach", "contiguous",
)  # fmt: skip
# Methods and functions that compute the same of the same values in every call.
_PURE = (
    *_VIEWS, "add", "sub", "subtract", "mul", "multiply", "div", "divide", "truediv", "true_divide", "neg",
    "reciprocal", "pow", "square", "sqrt", "rsqrt", "exp", "abs", "sigmoid", "tanh", "size", "dim", "to", "float",
    "double", "half", "bfloat16",
)  # fmt: skip
_PURE_TARGETS = {getattr, *_PURE, *(getattr(m, name, None) for m in (operator, torch) for name in _PURE)} - {None}
_NORMS = (nn.BatchNorm2d, nn.SyncBatchNorm, InputNorm)  # that compute the same in evaluation mode
_ACTIVATION_MODULES = {
    nn.ReLU: "relu", nn.ReLU6: "relu6", nn.SiLU: "silu", nn.LeakyReLU: "leaky_relu", nn.GELU: "gelu",
    nn.Hardswish: "hardswish", nn.Sigmoid: "sigmoid",
}  # fmt: skip
_ACTIVATION_FUNCTIONS: dict[Any, str] = {
    torch.relu: "relu", torch.relu_: "relu", F.relu: "relu", F.relu_: "relu", "relu": "relu", "relu_": "relu",
    F.relu6: "relu6", F.silu: "silu", F.leaky_relu: "leaky_relu", F.leaky_relu_: "leaky_relu", F.gelu: "gelu",
    F.hardswish: "hardswish", F.sigmoid: "sigmoid", torch.sigmoid: "sigmoid", torch.sigmoid_: "sigmoid",
    "sigmoid": "sigmoid", "sigmoid_": "sigmoid",
}  # fmt: skip
CONCATENATIONS = (torch.cat, torch.concat, torch.concatenate)
_BATCH_NORM_ARGUMENTS = (
    "input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps",
)  # fmt: skip
_MAX_POOLS = (F.max_pool2d, torch.max_pool2d)
_POOL_ARGUMENTS = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
_UPSAMPLINGS = (nn.Upsample, nn.UpsamplingNearest2d, Upsample)
_UPSAMPLING_ARGUMENTS = {
    "size": None, "scale_factor": None, "mode": "nearest", "align_corners": None, "recompute_scale_factor": None,
    "antialias": False,
}  # fmt: skip
_IDENTITIES = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
# Functions that do nothing in evaluation mode, with the place of the argument that says so.
_DROPOUTS = {("torch.nn.functional", f"dropout{dims}"): 2 for dims in ("", "1d", "2d", "3d")}
_DROPOUTS |= {("torchvision.ops.stochastic_depth", "stochastic_depth"): 3}


def is_altered(module: nn.Module) -> bool:
    """Whether it does more than its class says: by hooks, or a forward of the instance's own."""
    own = module.__dict__  # not getattr, nor a loop: fused models ask at every call
    return bool(
        "forward" in own or own.get("_forward_hooks") or own.get("_forward_pre_hooks")
        or own.get("_backward_hooks") or own.get("_backward_pre_hooks")
    )  # fmt: skip


class _Proxy(fx.Proxy):
    """torch.fx takes `x += y` for `x = x + y`, which is another thing for whoever else holds x; and what stands for a
    tensor for none: a model that asks `isinstance(x, Tensor)` would be traced as if it were called with something
    else."""

    _is_param = False  # what torch.nn.Parameter asks tensors

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return Tensor if _kind(self.node) == "tensor" else _Proxy


# Methods and functions of a tensor whose value is none.
_NUMBERS = ("size", "dim", "ndimension", "numel", "nelement", "stride", "item", "tolist", "get_device", "element_size")
_SEQUENCES = ("chunk", "split", "split_with_sizes", "tensor_split", "unbind", "hsplit", "vsplit")


def _kind(node: fx.Node) -> str:
    """Whether the value is a "tensor", a "sequence" of tensors or something "else", as far as a trace can tell."""
    if "kind" not in node.meta:
        node.meta["kind"] = _kind_of(node)
    return str(node.meta["kind"])


def _kind_of(node: fx.Node) -> str:
    if node.op not in ("call_function", "call_method"):
        return "tensor"
    kinds = {"tensor" if _kind(each) == "sequence" else _kind(each) for each in node.all_input_nodes}
    name = getattr(node.target, "__name__", str(node.target))
    if "tensor" not in kinds or name in _NUMBERS or node.target is getattr:
        return "else"
    return "sequence" if name in _SEQUENCES else "tensor"


def _in_place(operation: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: self.tracer.create_proxy("call_function", operation, (self, other), {})


for _operation in _IN_PLACE_OPERATORS:
    if _operation is not operator.setitem:
        setattr(_Proxy, f"__{_operation.__name__}__", _in_place(_operation))


class _InPlaceTracer(fx.Tracer):
    def proxy(self, node: fx.Node) -> fx.Proxy:
        _kind(node)  # of its inputs it is known
        return _Proxy(node, self)

    def create_arg(self, a: Any) -> Any:
        return a.node if type(a) is _Proxy else super().create_arg(a)


class _Tracer(_InPlaceTracer):
    """Convolutions, norms and torch.nn's modules stay calls, and so does what is_altered."""

    autocast: tuple[bool, ...] = ()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        own = isinstance(m, (Layer, nn.Conv2d, nn.modules.batchnorm._BatchNorm)) or is_altered(m)
        return own or super().is_leaf_module(m, module_qualified_name)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _autocast_state() != self.autocast:
            raise ops.UnsupportedError("its forward switches autocast, which a trace does not record")
        return super().create_node(*args, **kwargs)


def _autocast_state() -> tuple[bool, ...]:
    return tuple(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))


def traced(root: nn.Module) -> tuple[fx.Graph, tuple[str, ...]]:
    """The graph, and the devices for which autocast was switched off in a part of it: a trace has no record of that."""
    switched_off: list[str] = []
    tracer = _Tracer()
    tracer.autocast = _autocast_state()
    parameters = inspect.signature(type(root).forward).parameters
    fixed = {
        name: parameter.default
        for name, parameter in parameters.items()
        if parameter.default is None or isinstance(parameter.default, (bool, int, float, str))
    }
    before = _versions(root)
    try:
        with noting_off(switched_off.append):
            graph = tracer.trace(root, concrete_args=fixed or None)
    except Exception as error:
        raise ops.UnsupportedError(
            f"model cannot be traced by torch.fx: {type(error).__name__}: {error}. fastconv.compile takes "
            "such models; fastconv.swap_ takes any, without fusing; or fuse the parts of it that can be traced"
        ) from error
    if written := _written(graph, root, before):
        raise ops.UnsupportedError(
            f"model's forward writes over {written}, and a trace takes the value of now for that of every call; "
            "fastconv.compile takes such models; or fuse the parts of it that write over nothing"
        )
    for node in graph.nodes:
        if getattr(node.target, "__name__", "") == "_assert_is_none":
            # torch.fx's own check of an argument that it fixes. Unpickled, it breaks every later trace of the process.
            with graph.inserting_before(node):
                node.args = graph.call_function(operator.eq, (node.args[0], None)), node.args[1]
            node.target = torch._assert
    graph._tracer_cls = _InPlaceTracer  # for unpickling, which traces the generated code
    for node in graph.find_nodes(op="placeholder"):
        name = str(node.target).rpartition("_")[0]  # torch.fx numbers the arguments that it fixes
        if node.target not in parameters and name in fixed:
            node.target = name
    return graph, tuple(switched_off)


def _versions(root: nn.Module) -> dict[str, tuple[Tensor, int]]:
    """Those of parameters and buffers, which every operation in place counts up."""
    tensors = itertools.chain(root.named_parameters(), root.named_buffers())
    return {name: (tensor, 0 if tensor.is_inference() else tensor._version) for name, tensor in tensors}


def _written(graph: fx.Graph, root: nn.Module, before: dict[str, tuple[Tensor, int]]) -> str | None:
    """What the forward writes that is there before a call: as it was traced, or in the graph."""
    for name, (tensor, version) in _versions(root).items():
        if name not in before or before[name][0] is not tensor or before[name][1] != version:
            return name
    modules = dict(root.named_modules(remove_duplicate=False))
    for over in _overwritten(graph, modules):
        if over.op == "get_attr":
            memory = constants.attribute(root, str(over.target)).untyped_storage().data_ptr()
            names = (name for name, (t, _) in before.items() if t.untyped_storage().data_ptr() == memory)
            return next(names, "a tensor that it makes from no argument")
    return None


def _overwritten(graph: fx.Graph, modules: dict[str, nn.Module]) -> Iterator[fx.Node]:
    """What operations may write over, and what that may be a range of."""
    for node in graph.nodes:
        if may_write(node, modules.get(str(node.target)) if node.op == "call_module" else None):
            for over in (*node.args[:1], node.kwargs.get("out")):
                while isinstance(over, fx.Node):
                    yield over
                    is_view = over.op != "get_attr" and getattr(over.target, "__name__", over.target) in _VIEWS
                    over = over.args[0] if is_view else None


def mark_constants(graph: fx.Graph, root: nn.Module, modules: dict[str, nn.Module]) -> list[fx.Node]:
    """Marks for `rewrites` what tensors of the model alone decide. Returns it."""
    written = set(_overwritten(graph, modules))
    constants.mark(graph, root, {}, lambda node: node.target in _PURE_TARGETS and node not in written)
    return [node for node in graph.nodes if node.meta["constant"]]


def drop_identities(graph: fx.Graph, modules: dict[str, nn.Module]) -> None:
    """Without what does nothing in evaluation mode."""
    for node in graph.find_nodes(op="call_module"):
        module = modules[str(node.target)]
        if type(module) not in _IDENTITIES or module.training or is_altered(module):
            continue
        if len(node.args) == 1 and isinstance(node.args[0], fx.Node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    for node in graph.nodes:
        if node.op == "call_function" and _drops_nothing(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    for node in graph.find_nodes(op="call_function", target=operator.iadd):
        _drop_zero(graph, node, *node.args)
    for node in graph.find_nodes(op="call_function", target=operator.add):
        value, other = node.args if isinstance(node.args[0], fx.Node) else node.args[::-1]
        if not isinstance(value, fx.Node) or value.op != "call_module" or len(value.users) > 1:
            continue  # a sum is a copy, which others may need
        # What these compute is floating-point; of other values 0 may change the dtype.
        if isinstance(modules[str(value.target)], (nn.Conv2d, Conv2d, *_NORMS)):
            _drop_zero(graph, node, value, other)


def _drops_nothing(node: fx.Node) -> bool:
    place = _DROPOUTS.get((getattr(node.target, "__module__", ""), getattr(node.target, "__name__", "")))
    if place is None or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    training = node.args[place] if len(node.args) > place else node.kwargs.get("training", True)
    return training is False


def _drop_zero(graph: fx.Graph, node: fx.Node, value: Any, other: Any) -> None:
    if isinstance(other, int) and other == 0:
        node.replace_all_uses_with(value)
        graph.erase_node(node)


def split_norms(graph: fx.Graph, modules: dict[str, nn.Module]) -> None:
    """Of timm's batch norms, which end in a module `drop` and a module `act`, those are calls of their own."""
    found: set[nn.Module] = set()
    for node in graph.find_nodes(op="call_module"):
        norm = modules[str(node.target)]
        of_timm = (type(norm).__module__, type(norm).__qualname__) == ("timm.layers.norm_act", "BatchNormAct2d")
        if not (of_timm or norm in found) or is_altered(norm) or len(node.args) != 1 or node.kwargs:
            continue
        found.add(norm)
        norm.__class__ = nn.BatchNorm2d
        after = node
        for name in ("drop", "act"):
            with graph.inserting_after(after):
                new = graph.call_module(f"{node.target}.{name}")
            after.replace_all_uses_with(new)
            new.args, after = (after,), new


def spell(graph: fx.Graph, modules: dict[str, nn.Module], fused: bool = False) -> None:
    """Leaves in each node's ``meta["spelled"]`` what it means in ATen's terms, and in those of fastconv's layers the
    record for the report. `fused`: what has been fused before is a convolution, too."""
    for node in graph.nodes:
        _kind(node)  # of its inputs it is known
        module = modules[str(node.target)] if node.op == "call_module" else None
        writes = may_write(node, module)
        if fused and isinstance(module, Conv2d):
            found = _fused_layer(node, module)
        else:
            found = _function_of(node) if module is None else _module_of(node, module)
        node.meta["spelled"] = Spelled(writes=writes) if found is None else found._replace(writes=writes)


def _module_of(node: fx.Node, module: nn.Module) -> Spelled | None:
    hooks = ("hooks", f"{node.target} has hooks or a forward of its own") if is_altered(module) else None
    if isinstance(module, Layer):
        if isinstance(module, Conv2d) and type(module) is not Conv2d:
            return None
        if list(node.kwargs) == ["input"]:
            node.args, node.kwargs = (node.kwargs["input"],), {}
        call = layer_call(module, None)  # type: ignore[arg-type]
        node.meta["fastconv"] = describe(node, call.weight, call.stride, call.groups, "conv")
        kind = None if type(module) is Conv2d else ("kind", f"what follows a {type(module).__name__} stays apart")
        pads = _padding_obstacle(module) if type(module) is Conv2d else None
        return Spelled(ops.conv2d_op, lambda x: call._replace(input=x), obstacle=kind or hooks, pads=pads)
    if len(node.args) != 1 or node.kwargs:
        return None
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        gamma, beta, mean, variance = module.weight, module.bias, module.running_mean, module.running_var
        return Spelled(
            aten._native_batch_norm_legit_no_training.default,
            lambda x: (x, gamma, beta, mean, variance, module.momentum, module.eps),
            obstacle=_class_obstacle(module) or _statistics_obstacle(module.training, mean, variance) or hooks,
        )
    if type(module) in (nn.MaxPool2d, MaxPool2d):
        return _max_pool(node, module, hooks)
    if type(module) in _UPSAMPLINGS:
        return _upsampling({name: getattr(module, name, None) for name in _UPSAMPLING_ARGUMENTS}, hooks)
    name = _ACTIVATION_MODULES.get(type(module))
    slope, how = getattr(module, "negative_slope", 0.01), getattr(module, "approximate", "none")
    return None if name is None else _activation(name, slope, how, hooks)


def _fused_layer(node: fx.Node, layer: Conv2d) -> Spelled | None:
    if node.kwargs or not all(isinstance(arg, fx.Node) for arg in node.args):
        return None
    return Spelled(ops.conv2d_op, functools.partial(layer_call, layer), obstacle=_padding_obstacle(layer))


def _padding_obstacle(layer: Conv2d) -> Obstacle | None:
    """What the operator's padding is not: a mode of its own, or more at one side than at the other."""
    if layer.padding_mode != "zeros":
        return "padding", f"its padding_mode is {layer.padding_mode}"
    extents = [d * (size - 1) for d, size in zip(pair("dilation", layer.dilation), layer.kernel_size, strict=True)]
    if layer.padding == "same" and any(extent % 2 for extent in extents):
        return "padding", "its padding is 'same', of an even kernel"
    return None


def _class_obstacle(norm: nn.modules.batchnorm._BatchNorm) -> Obstacle | None:
    if type(norm) not in _NORMS:
        return "norm_class", f"the norm is a {type(norm).__module__}.{type(norm).__qualname__}"
    return None


def _statistics_obstacle(training: Any, mean: Any, variance: Any) -> Obstacle | None:
    """What makes it another operator than a norm with running statistics."""
    if training is not False:
        return "norm_training", "the norm is in training mode"
    if mean is None or variance is None:
        return "norm_statistics", "the norm has no running statistics; it takes those of each batch"
    return None


def _batch_norm(node: fx.Node) -> Spelled:
    """A norm that is no module."""
    asked: dict[str, Any] = {"training": False, "momentum": 0.1, "eps": 1e-5}
    asked |= dict(zip(_BATCH_NORM_ARGUMENTS, node.args, strict=False)) | node.kwargs
    _, mean, variance, gamma, beta, training, momentum, epsilon = map(asked.get, _BATCH_NORM_ARGUMENTS)
    obstacle = _statistics_obstacle(training, mean, variance)
    parameters = constants.known((gamma, beta, mean, variance))
    node.meta["needs_batch"] = True  # of [C, H, W] it would norm the rows, where the module raises
    if parameters is None:
        obstacle = obstacle or ("norm_parameters", "the norm's parameters and statistics are not the model's own")
    return Spelled(
        aten._native_batch_norm_legit_no_training.default,
        lambda x, *_: (x, *(parameters or (gamma, beta, mean, variance)), momentum, epsilon),
        obstacle=obstacle,
    )


def _function_of(node: fx.Node) -> Spelled | None:
    if node.op not in ("call_function", "call_method"):
        return None
    if node.target in ARITHMETIC:
        return _arithmetic(node)
    if node.target in CONCATENATIONS:
        return _concatenation(node)
    if not isinstance(next(iter(node.args), None), fx.Node):
        return None
    if node.target is F.batch_norm:
        return _batch_norm(node)
    if node.target in _MAX_POOLS:
        return _max_pool(node, None)
    if node.target is F.interpolate:
        given = dict(zip(_UPSAMPLING_ARGUMENTS, node.args[1:], strict=False))
        return _upsampling(_UPSAMPLING_ARGUMENTS | given | node.kwargs)
    name = _ACTIVATION_FUNCTIONS.get(node.target)
    if name is None:
        return None
    slope = node.args[1] if len(node.args) > 1 else node.kwargs.get("negative_slope", 0.01)
    return _activation(name, slope, node.kwargs.get("approximate", "none"))


def _arithmetic(node: fx.Node) -> Spelled | None:
    places = node.args
    inputs = [arg for arg in places if isinstance(arg, fx.Node)]
    numbers = [arg for arg in places if isinstance(arg, (int, float))]
    if len(places) != 2 or len(inputs) + len(numbers) != 2 or node.kwargs not in ({}, {"alpha": 1}):
        return None
    if numbers and _kind(inputs[0]) != "tensor":
        return None  # of sizes, perhaps

    def arguments(*inputs: fx.Node) -> tuple[Any, ...]:
        given = iter(inputs)
        return tuple(next(given) if isinstance(arg, fx.Node) else arg for arg in places)

    return Spelled(ARITHMETIC[node.target], arguments)


def _concatenation(node: fx.Node) -> Spelled | None:
    asked: dict[str, Any] = {"dim": 0} | dict(zip(("tensors", "dim"), node.args, strict=False)) | node.kwargs
    tensors, dim = asked.pop("tensors", None), asked.pop("dim")
    if asked or not isinstance(tensors, (list, tuple)) or not all(isinstance(each, fx.Node) for each in tensors):
        return None
    node.args, node.kwargs = (tensors, dim), {}
    return Spelled(aten.cat.default, lambda *parts: (list(parts), dim)) if isinstance(dim, int) else None


def _activation(name: str, slope: Any, approximate: Any, obstacle: Obstacle | None = None) -> Spelled | None:
    target, *rest = ACTIVATIONS[name]
    if name == "gelu":
        if approximate not in ("none", "tanh"):
            return None
        rest = [approximate]
    if name == "leaky_relu":
        if not isinstance(slope, (int, float)):
            return None
        rest = [slope]
    return Spelled(target, lambda x: (x, *rest), obstacle=obstacle)


def _max_pool(node: fx.Node, module: nn.Module | None, obstacle: Obstacle | None = None) -> Spelled | None:
    asked: dict[str, Any] = {"stride": None, "padding": 0, "dilation": 1, "ceil_mode": False, "return_indices": False}
    if module is None:
        asked |= dict(zip(_POOL_ARGUMENTS, node.args[1:], strict=False)) | node.kwargs
    else:
        asked |= {name: getattr(module, name) for name in _POOL_ARGUMENTS}
    kernel, stride, padding, dilation, ceil, indices = (asked.get(name) for name in _POOL_ARGUMENTS)
    if indices is not False:
        return None
    rest = (*map(_pair, (kernel, kernel if stride is None else stride, padding, dilation)), ceil)
    return Spelled(aten.max_pool2d_with_indices.default, lambda x: (x, *rest), obstacle=obstacle)


def _upsampling(asked: dict[str, Any], obstacle: Obstacle | None = None) -> Spelled | None:
    scales = scales_of(asked["mode"], asked["size"], asked["scale_factor"], asked["recompute_scale_factor"])
    if scales is None or asked["align_corners"] is not None or asked["antialias"]:
        return None  # with the last two PyTorch raises an error
    return Spelled(aten.upsample_nearest2d.vec, lambda x: (x, None, list(map(float, scales))), obstacle=obstacle)


def may_write(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether the operation may write over a value that it did not make."""
    if module is not None:
        if type(module) in _NORMS:
            return is_altered(module)  # `split_norms` leaves modules in it that it does not call
        # What is made of several modules is looked into; torch.nn's own say so by an attribute.
        return any(bool(getattr(inner, "inplace", False)) or is_altered(inner) for inner in module.modules())
    if node.op == "call_method":
        name = str(node.target)
        return name.strip("_") in _IN_PLACE if name.endswith("__") else name.endswith("_")
    if node.op != "call_function":
        return False
    if node.target in _IN_PLACE_OPERATORS or str(getattr(node.target, "__name__", "")).endswith("_"):
        return True
    # Of PyTorch's functions a flag given by position may be `inplace`.
    flagged = any(arg is True for arg in node.args) or node.kwargs.get("inplace", False) is not False
    return flagged or node.kwargs.get("out") is not None
