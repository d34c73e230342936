"""The graph of a model as `fuse` reads it: how it is traced, and what its nodes are."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from fastconv import ops
from fastconv.layer import Layer

SUMS = ("add", "add_", operator.add, operator.iadd, torch.add)
IN_PLACE_SUMS = ("add_", operator.iadd)
_IN_PLACE_OPERATORS = [
    getattr(operator, name)
    for name in (
        "iadd", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "ilshift",
        "irshift", "setitem",
    )
]  # fmt: skip
_ACTIVATION_MODULES = {nn.ReLU: "relu", nn.ReLU6: "relu6", nn.SiLU: "silu", nn.LeakyReLU: "leaky_relu"}
_ACTIVATION_FUNCTIONS: dict[Any, str] = {
    torch.relu: "relu", torch.relu_: "relu", F.relu: "relu", F.relu_: "relu", "relu": "relu", "relu_": "relu",
    F.relu6: "relu6", F.silu: "silu", F.leaky_relu: "leaky_relu", F.leaky_relu_: "leaky_relu",
}  # fmt: skip
IDENTITIES = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_altered(module: nn.Module) -> bool:
    """Whether it does more than its class says: by hooks, or a forward of the instance's own."""
    return "forward" in module.__dict__ or any(getattr(module, name, None) for name in _HOOKS)


class _Proxy(fx.Proxy):
    """torch.fx takes `x += y` for `x = x + y`, which is another thing for whoever else holds x."""


def _in_place(operation: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: self.tracer.create_proxy("call_function", operation, (self, other), {})


for _operation in _IN_PLACE_OPERATORS:
    if _operation is not operator.setitem:
        setattr(_Proxy, f"__{_operation.__name__}__", _in_place(_operation))


class _InPlaceTracer(fx.Tracer):
    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)


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


def traced(root: nn.Module) -> fx.Graph:
    tracer = _Tracer()
    tracer.autocast = _autocast_state()
    parameters = inspect.signature(type(root).forward).parameters
    fixed = {
        name: parameter.default
        for name, parameter in parameters.items()
        if parameter.default is None or isinstance(parameter.default, (bool, int, float, str))
    }
    try:
        graph = tracer.trace(root, concrete_args=fixed or None)
    except Exception as error:
        raise ops.UnsupportedError(
            f"model cannot be traced by torch.fx: {type(error).__name__}: {error}. fastconv.swap_ takes any model, "
            "without fusing; or fuse the parts of it that can be traced"
        ) from error
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
    return graph


def is_sum(node: fx.Node) -> bool:
    """Of two values of the graph, with nothing else to it."""
    if len(node.args) != 2 or not all(isinstance(arg, fx.Node) for arg in node.args):
        return False
    if node.kwargs not in ({}, {"alpha": 1}):
        return False
    return node.op in ("call_method", "call_function") and node.target in SUMS


def activation_of(node: fx.Node, module: nn.Module | None) -> tuple[str, float] | None:
    """Name and slope, of those that the kernels' epilogue has."""
    if module is not None:
        name = _ACTIVATION_MODULES.get(type(module))
        if name is None or len(node.args) != 1 or node.kwargs:
            return None
        return name, float(getattr(module, "negative_slope", 0.01))
    if node.op not in ("call_function", "call_method") or node.target not in _ACTIVATION_FUNCTIONS:
        return None
    name, slope = _ACTIVATION_FUNCTIONS[node.target], 0.01
    if name == "leaky_relu":
        slope = node.args[1] if len(node.args) > 1 else node.kwargs.get("negative_slope", 0.01)  # type: ignore[assignment]
    return (name, float(slope)) if isinstance(slope, (int, float)) else None


_MAX_POOLS = (F.max_pool2d, torch.max_pool2d)
_POOL_ARGUMENTS = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")


def is_max_pool(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether it is the max-pool that the kernels' epilogue has: 2x2, stride 2, nothing else."""
    asked: dict[str, Any] = {"stride": None, "padding": 0, "dilation": 1, "ceil_mode": False, "return_indices": False}
    if type(module) is nn.MaxPool2d and not is_altered(module) and len(node.args) == 1:
        asked |= {name: getattr(module, name) for name in _POOL_ARGUMENTS}
    elif module is None and node.op == "call_function" and node.target in _MAX_POOLS and node.args:
        asked |= dict(zip(_POOL_ARGUMENTS, node.args[1:], strict=False)) | node.kwargs
    else:
        return False
    kernel, stride, *others = (asked.get(name) for name in _POOL_ARGUMENTS)
    sizes = (kernel, stride or kernel, *others)
    return all(size in (n, (n, n), [n, n]) for size, n in zip(sizes, (2, 2, 0, 1, False, False), strict=True))


def may_write(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether the operation may write over a value that it did not make."""
    if module is not None:
        # What is made of several modules is looked into; torch.nn's own say so by an attribute.
        return any(bool(getattr(inner, "inplace", False)) or is_altered(inner) for inner in module.modules())
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.endswith("__")
    if node.op != "call_function":
        return False
    if node.target in _IN_PLACE_OPERATORS or str(getattr(node.target, "__name__", "")).endswith("_"):
        return True
    # Of PyTorch's functions a flag given by position may be `inplace`.
    flagged = any(arg is True for arg in node.args) or node.kwargs.get("inplace", False) is not False
    return flagged or node.kwargs.get("out") is not None
