"""What parts of PyTorch that `import torch` does not load must know of the operators: how many operations they are
(torch.utils.flop_counter), how they work on parts of tensors (torch.distributed.tensor), and what they are in ONNX.

Each is told when it is imported, which may be never: importing them here would take longer than fastconv itself.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.abc
import importlib.util
import math
import sys
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

import torch

from fastconv import ops
from fastconv.ops.geometry import Options
from fastconv.ops.scatter import written_channels

aten = torch.ops.aten


def _register_flop_formulas() -> None:
    """PyTorch's own formulas: a swapped model has the number that it had. Here tensors are their shapes."""
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    forward, backward = flop_registry[aten.convolution], flop_registry[aten.convolution_backward]
    geometry = (None, None, None, None, False)  # bias, stride, padding, dilation, transposed
    transposed = (None, None, None, None, True)

    def register(*operators: Any) -> Callable[..., Any]:
        return register_flop_formula([operator.overloadpacket for operator in operators])

    def convolution(input: Any, weight: Any, where: tuple[Any, ...], out_shape: Any) -> int:
        unpooled = [*out_shape[:2], *ops.output_size(input, weight, *where[:3])]
        return forward(input, weight, *geometry, out_val=unpooled)

    @register(ops.conv2d_op)
    def _(input: Any, weight: Any, bias: Any, residual: Any, *where: Any, out_shape: Any, **_: Any) -> int:
        return convolution(input, weight, where, out_shape)

    @register(ops.conv2d_packed_op)
    def _(input: Any, packed: Any, weight: Any, bias: Any, residual: Any, *where: Any, out_shape: Any, **_: Any) -> int:
        return convolution(input, weight, where, out_shape)

    @register(ops.conv2d_packed_into_op)
    def _(out: Any, input: Any, *rest: Any, out_shape: Any, **_: Any) -> int:
        geometry, shuffle = rest[5], (*rest, "none")[13]
        size = 1 if shuffle == "none" else 2  # of whose outputs a filter computes one
        outputs = [*out[:2], out[2] // size, out[3] // size]
        return forward(input, geometry[:4], None, None, None, None, False, out_val=outputs)

    @register(ops.conv_transpose2d_op)
    def _(input: Any, weight: Any, *_: Any, out_shape: Any, **__: Any) -> int:
        return forward(input, weight, *transposed, out_val=out_shape)

    @register(ops.input_gradient_op)
    def _(grad: Any, weight: Any, *_: Any, out_shape: Any, **__: Any) -> int:
        return backward(grad, None, weight, *geometry, None, None, [True, False, False], out_val=[out_shape])

    @register(ops.conv2d_gradients_op)
    def _(grad: Any, input: Any, weight: Any, *_: Any, out_shape: Any, **__: Any) -> int:
        return backward(grad, input, weight, *geometry, None, None, [True, True, False], out_val=out_shape)

    @register(ops.weight_gradient_op, ops.weight_gradient_kernel_op)
    def _(input: Any, grad: Any, *_: Any, out_shape: Any, **__: Any) -> int:
        return backward(grad, input, None, *geometry, None, None, [False, True, False], out_val=[None, out_shape])


def _register_sharding() -> None:
    """Along each dimension of a device mesh each operator, a sum of products over one index, is whole everywhere, or
    split along one of its two other indices, or a sum of parts. Filters and channels are split where there are no
    groups, and in equal parts alone: an empty part would be no convolution."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    whole, first, second, part = Replicate(), Shard(0), Shard(1), Partial()
    known = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info

    def register(operator: Any, rules: Callable[..., list[Any]]) -> None:
        tensors = sum("Tensor" in str(argument.type) for argument in operator._schema.arguments)

        def sharding(*args: Any) -> list[Any]:
            """Rules are (output, inputs...) without what is no tensor."""
            rest = [None] * (len(args) - tensors)
            missing = [arg is None for arg in args[:tensors]]
            return [
                ([output], [None if absent else p for p, absent in zip(inputs, missing, strict=True)] + rest)
                for output, *inputs in rules(*args)
            ]

        register_sharding(operator)(sharding)
        # The key under which DTensor remembers what it found: PyTorch takes arguments from the first integer on into
        # it, and would take two convolutions that differ in their stride for one.
        known[operator] = dataclasses.replace(known[operator], static_argnum=tensors)

    def forward(x: Any, w: Any, bias: Any, residual: Any, *arguments: Any) -> list[Any]:
        groups, activation = arguments[3], arguments[6]
        is_sum = bias is None and residual is None and activation == "none" and not any(arguments[12:])
        rules: list[Any] = [(whole, whole, whole, whole, whole), (first, first, whole, whole, first)]
        if groups == 1 and _is_divisible(w, 0):
            rules.append((second, whole, first, first, second))
        if groups == 1 and _is_divisible(w, 1) and is_sum:
            rules.append((part, second, second, whole, whole))
        return rules

    def input_gradient(grad: Any, w: Any, *arguments: Any) -> list[Any]:
        rules: list[Any] = [(whole, whole, whole), (first, first, whole)]
        if arguments[4] == 1 and _is_divisible(w, 0):
            rules.append((part, second, first))
        if arguments[4] == 1 and _is_divisible(w, 1):
            rules.append((second, whole, second))
        return rules

    def transposed(x: Any, w: Any, bias: Any, *arguments: Any) -> list[Any]:
        rules: list[Any] = [(whole, whole, whole, whole), (first, first, whole, whole)]
        if arguments[4] == 1 and _is_divisible(w, 0) and bias is None:
            rules.append((part, second, first, whole))
        if arguments[4] == 1 and _is_divisible(w, 1):
            rules.append((second, whole, second, first))
        return rules

    def weight_gradient(x: Any, grad: Any, *arguments: Any) -> list[Any]:
        rules: list[Any] = [(whole, whole, whole), (part, first, first)]
        if arguments[4] == 1 and _is_divisible(grad, 1):
            rules.append((first, whole, second))
        if arguments[4] == 1 and _is_divisible(x, 1):
            rules.append((second, second, whole))
        return rules

    register(ops.conv2d_op, forward)
    register(ops.conv_transpose2d_op, transposed)
    register(ops.input_gradient_op, input_gradient)
    register(ops.weight_gradient_op, weight_gradient)


def _is_divisible(spec: Any, dim: int) -> bool:
    """Whether any dimensions of the mesh can share the dimension of the tensor in equal parts."""
    return spec.shape[dim] > 0 and spec.shape[dim] % spec.mesh.size() == 0


def _register_onnx_translation() -> None:
    """With torch.onnx.export(dynamo=True) a convolution is a Conv, and what its epilogue does follows it."""
    from onnxscript import opset18 as op
    from torch.onnx._internal.exporter._torchlib._torchlib_registry import onnx_impl

    def number(value: float, like: Any) -> Any:
        constant: Any = op.Constant(value_float=value)
        return op.CastLike(constant, like)

    @onnx_impl(ops.conv2d_op, no_compile=True)
    def _(
        input: Any, weight: Any, bias: Any, residual: Any, stride: Any, padding: Any, dilation: Any, groups: int,
        algorithm: str, precision: str, activation: str, negative_slope: float, backend_flags: int,
        max_error: float | None = None,
        max_workspace: int | None = None,
        residual_after: bool = False,
        max_pool: bool = False,
    ) -> Any:  # fmt: skip
        tensors = [input, weight] if bias is None else [input, weight, bias]
        y = op.Conv(*tensors, strides=stride, pads=[*padding, *padding], dilations=dilation, group=groups)
        if residual is not None and not residual_after:
            y = op.Add(y, residual)
        if activation == "relu":
            y = op.Relu(y)
        if activation == "relu6":
            y = op.Clip(y, number(0, y), number(6, y))
        if activation == "silu":
            y = op.Mul(y, op.Sigmoid(y))
        if activation == "leaky_relu":
            y = op.LeakyRelu(y, alpha=negative_slope)
        if activation == "gelu":
            y = op.Mul(op.Mul(y, number(0.5, y)), op.Add(op.Erf(op.Mul(y, number(0.5**0.5, y))), number(1, y)))
        if activation == "gelu_tanh":
            cubic = op.Add(op.Mul(op.Mul(y, y), number(0.044715, y)), number(1, y))
            y = op.Mul(y, op.Sigmoid(op.Mul(op.Mul(y, cubic), number((8 / math.pi) ** 0.5, y))))
        if activation == "hardswish":
            y = op.HardSwish(y)
        if activation == "sigmoid":
            y = op.Sigmoid(y)
        if residual is not None and residual_after:
            y = op.Add(y, residual)
        if max_pool:
            y, _ = op.MaxPool(y, kernel_shape=[2, 2], strides=[2, 2])
        return y

    @onnx_impl(ops.conv_transpose2d_op, no_compile=True)
    def _(
        input: Any, weight: Any, bias: Any, stride: Any, padding: Any, output_padding: Any, dilation: Any, groups: int,
        algorithm: str, precision: str, backend_flags: int, max_error: float | None = None,
        max_workspace: int | None = None,
    ) -> Any:  # fmt: skip
        tensors = [input, weight] if bias is None else [input, weight, bias]
        return op.ConvTranspose(
            *tensors, strides=stride, pads=[*padding, *padding], output_padding=output_padding, dilations=dilation,
            group=groups,
        )  # fmt: skip


def _register_backend() -> None:
    """``torch.compile(model, backend="fastconv")``. An installed package has it as an entry point; importing it is
    enough."""
    from torch._dynamo.backends import registry

    from fastconv.compiler import backend

    if "fastconv" not in registry._BACKENDS:
        registry.register_backend(backend, name="fastconv")


def _register_lowerings() -> None:
    """Inductor's code runs below autograd: in place of the operators, whose gradients are Python's and cost every call
    that way, it calls the ones without."""
    import sympy
    from torch._inductor import ir, lowering
    from torch._library.utils import get_layout_constraint_tag
    from torch.utils._pytree import tree_leaves

    def register(operator: Any, lowered: Callable[..., Any]) -> None:
        lowering.add_needs_realized_inputs(operator)
        constraint = lowering.tag_to_layout_constraint(get_layout_constraint_tag(operator, with_default=True))
        if constraint is not None:
            lowering.add_layout_constraint(operator, constraint)
        lowering.register_lowering(operator, type_promotion_kind=None)(lowered)

    plain = lowering.fallback_handler(ops.conv2d_compiled_op)
    packing = lowering.fallback_handler(ops.conv2d_packed_compiled_op)

    def without_symbols(operator: Any, lowered: Callable[..., Any]) -> Callable[..., Any]:
        """`lowered`, which makes a text of sizes; the operator itself where a size is not known yet."""
        general = lowering.fallback_handler(operator, add_to_fallback_set=False)

        def choose(*args: Any, **kwargs: Any) -> Any:
            is_open = any(isinstance(arg, sympy.Expr) and arg.free_symbols for arg in tree_leaves(args))
            return (general if is_open else lowered)(*args, **kwargs)

        return choose

    def conv2d(
        input: Any, weight: Any, bias: Any, residual: Any, stride: Any, padding: Any, dilation: Any, groups: Any,
        *options: Any, **last: Any,
    ) -> Any:  # fmt: skip
        sizes = [*stride, *padding, *dilation, groups]
        return plain(input, weight, bias, residual, ops.compiled_settings(sizes, Options(*options, **last)))

    def conv2d_packed(
        input: Any, packed: Any, shape: Any, bias: Any, residual: Any, stride: Any, padding: Any, dilation: Any,
        groups: Any, channels_last: bool, *options: Any, **last: Any,
    ) -> Any:  # fmt: skip
        sizes = [*shape, *stride, *padding, *dilation, groups]
        settings = ops.compiled_settings(sizes, Options.of_packed(*options, **last))
        return packing(input, packed, bias, residual, channels_last, settings)

    by_one_call = lowering.fallback_handler(ops.weight_gradient_compiled_op)

    def weight_gradient(
        input: Any, grad: Any, shape: Any, stride: Any, padding: Any, dilation: Any, groups: Any, algorithm: str,
        precision: str, *rest: Any, **last: Any,
    ) -> Any:  # fmt: skip
        sizes = [*shape, *stride, *padding, *dilation, groups]
        asked = Options(algorithm, precision, "none", 0.0, *rest, **last)
        return by_one_call(input, grad, ops.compiled_settings(sizes, asked))

    # Code that another version of these operators was lowered to must not come out of a cache on disk, whose keys know
    # the graph alone.
    schemas = [str(operator._schema) for operator in ops.compiled_operators]
    torch.compiler.config.cache_key_tag += f" fastconv {hashlib.sha256(repr(schemas).encode()).hexdigest()[:16]}"

    register(ops.conv2d_op, without_symbols(ops.conv2d_op, conv2d))
    register(ops.conv2d_packed_op, without_symbols(ops.conv2d_packed_op, conv2d_packed))
    register(ops.weight_gradient_op, without_symbols(ops.weight_gradient_op, weight_gradient))
    register(ops.conv_transpose2d_op, lowering.fallback_handler(ops.conv_transpose2d_compiled_op))

    # In place: of what `fastconv.rewrites` makes, every later value of a tensor holds all earlier ones.

    def channels(buffer: Any, begin: int, count: int) -> Any:
        whole = begin == 0 and count == buffer.get_size()[1]
        return buffer if whole else lowering.lowerings[aten.slice.Tensor](buffer, 1, begin, begin + count)

    def channel_scatter(x: Any, buffer: Any, begin: int) -> Any:
        # Computed in the order in which it is copied: Inductor makes one kernel of both.
        x = ir.ExternKernel.require_channels_last(x)
        lowering.lowerings[aten.copy_.default](channels(buffer, begin, x.get_size()[1]), x)
        return buffer

    into = lowering.fallback_handler(ops.conv2d_packed_into_op)

    def conv2d_scatter(
        input: Any, packed: Any, bias: Any, residual: Any, scale: Any, shift: Any, buffer: Any, begin: int,
        geometry: Any, *rest: Any,
    ) -> Any:  # fmt: skip
        written = channels(buffer, begin, written_channels(geometry, *rest[7:]))
        into(written, input, packed, bias, residual, scale, shift, geometry, *rest)
        return buffer

    def strides(node: Any, *args: Any) -> Any:
        """Those that the graph expects of input and residual (`Editor.expect_channels_last`); the tensor that is
        written must be itself, not a copy."""
        kept = node.meta.get("eager_input_vals")
        result = list(args)
        for place in (0, 3):
            if args[place] is not None:
                wanted = kept[0][place] if kept else node.args[place].meta["val"]
                result[place] = ir.ExternKernel.require_exact_strides(args[place], wanted.stride())
        return tuple(result), {}

    lowering.register_lowering(ops.channel_scatter_op, type_promotion_kind=None)(channel_scatter)
    lowering.register_lowering(ops.conv2d_packed_scatter_op, type_promotion_kind=None)(conv2d_scatter)
    lowering.add_layout_constraint(ops.conv2d_packed_scatter_op, strides)
    lowering.add_needs_realized_inputs(ops.conv2d_packed_scatter_op)


_WAITING = {
    "torch._inductor.lowering": _register_lowerings,
    "torch._dynamo.backends.registry": _register_backend,
    "torch.distributed.tensor": _register_sharding,
    "torch.onnx._internal.exporter._torchlib.ops": _register_onnx_translation,
    "torch.utils.flop_counter": _register_flop_formulas,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what is waited for as it would be found without it, and adds the registration to its import."""

    def __init__(self) -> None:
        self.finding: set[str] = set()

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name not in _WAITING or name in self.finding:
            return None
        self.finding.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.finding.discard(name)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(_execute, spec.loader.exec_module, name)  # type: ignore[method-assign]
        return spec


def _execute(execute: Callable[[Any], None], name: str, module: Any) -> None:
    execute(module)
    _register(name)


def _register(name: str) -> None:
    try:
        _WAITING[name]()
    except Exception as error:  # of a torch that this code does not know: a part of PyTorch must still be imported
        text = f"fastconv's operators are not known to {name} of torch {torch.__version__}"
        warnings.warn(f"{text}: {type(error).__name__}: {error}", stacklevel=2)


for _name in _WAITING:
    if _name in sys.modules:
        _register(_name)
sys.meta_path.insert(0, _Finder())
