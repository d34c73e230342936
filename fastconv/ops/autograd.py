"""Gradients and vmap of the operators.

A convolution is linear in the input and in the filter, so three operators make a closed system: the derivatives of
each of

    Y = conv(X, W),    X' = input_gradient(Y, W),    W' = weight_gradient(X, Y)

are the other two. Every order of differentiation therefore stays inside them, in the accuracy class of the forward.

Forward mode is PyTorch's: within a dual level (`torch.func.jvp` is one) its convolutions run, in the class asked for.
They run as well where `torch.compile` traces a transform of `torch.func`, which it cannot do with a custom operator.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastconv import failures, ops, settings
from fastconv.ops import autocast, fake, gradients, norms, plain, scatter, shuffling  # noqa: F401  (five register)
from fastconv.ops.geometry import Geometry, Options, from_operator
from fastconv.tensors import is_plain, is_without_pixels

aten = torch.ops.aten

# By names that are found at once: where `torch.compile` traces, each step to a name is a guard.
_is_compiling = torch.compiler.is_compiling
_is_transformed = torch._C._are_functorch_transforms_active


def _differentiable(
    operator: Any,
    setup: Callable[..., None],
    backward: Callable[..., tuple[Any, ...]],
    vmap: Callable[..., tuple[Tensor, int]],
    by_pytorch: Callable[..., Tensor],
) -> Callable[..., Tensor]:
    """Registers gradient and vmap of an operator, and returns the operator as code that may run inside `torch.func`'s
    transforms has to call it: there PyTorch takes an `autograd.Function`, not the registered gradient. In forward mode
    `by_pytorch` runs, the same function of PyTorch's operators: a registered operator would lose the tangents without a
    word, and so would a Function where two such modes are nested."""
    torch.library.register_autograd(operator, backward, setup_context=setup, lib=ops.library)
    torch.library.register_vmap(operator, vmap, lib=ops.library)

    class Function(torch.autograd.Function):
        forward = staticmethod(lambda *args: operator(*args))
        setup_context = staticmethod(setup)

    Function.backward = staticmethod(backward)  # type: ignore[assignment]
    Function.vmap = staticmethod(vmap)  # type: ignore[assignment]
    front = torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode

    def call(*args: Any) -> Tensor:
        if forward_ad._current_level >= 0:
            return by_pytorch(*args)
        if not _is_transformed():
            if _is_compiling():
                return operator(*args)
            if _may_need_gradient(args):
                return ops.call(operator, *args)
            with torch._C._AutoDispatchBelowAutograd():  # saves a third of a small call
                return ops.call(operator, *args)
        if torch.compiler.is_dynamo_compiling():
            # Up to torch 2.14 Dynamo traces a Function's forward and forgets its backward; that of 2.15 takes a second
            # derivative for zero, and has no vmap around the gradient.
            return by_pytorch(*args)
        # Inside the rules that the dispatcher itself calls, the transform being applied is already dealt with.
        if torch._C._dispatch_tls_is_dispatch_key_excluded(front):
            return ops.call(operator, *args)
        return Function.apply(*args)

    return call


def _may_need_gradient(args: Sequence[Any]) -> bool:
    """Whether autograd has to see the call: only of plain tensors outside of any mode can it be ruled out."""
    if torch._C._len_torch_dispatch_stack() != 0 or torch._C._get_tracing_state() is not None:
        return True
    record = torch.is_grad_enabled()
    for arg in args[:5]:  # noqa: SIM110 (half the time of any()); every operator has its tensors first
        if isinstance(arg, Tensor) and (not is_plain(arg) or (record and arg.requires_grad)):
            return True
    return False


def _activation_gradient(grad: Tensor, saved: Tensor, activation: str, slope: float, saved_is_output: bool) -> Tensor:
    """d activation(z) * grad, from the output or from z itself. Differentiable."""
    if activation == "relu":
        return aten.threshold_backward(grad, saved, 0)
    if activation == "relu6":
        return aten.hardtanh_backward(grad, saved, 0.0, 6.0)
    if activation == "leaky_relu":
        return aten.leaky_relu_backward(grad, saved, slope, saved_is_output)
    if activation == "hardswish":
        return aten.hardswish_backward(grad, saved)
    if activation == "sigmoid":
        return aten.sigmoid_backward(grad, saved if saved_is_output else torch.sigmoid(saved))
    if activation in ("gelu", "gelu_tanh"):
        return aten.gelu_backward(grad, saved, approximate="tanh" if activation == "gelu_tanh" else "none")
    assert activation == "silu"
    if not torch.is_grad_enabled():
        return aten.silu_backward(grad, saved)
    gate = torch.sigmoid(saved)
    return grad * gate * (1 + saved * (1 - gate))


def _output_tells_gradient(activation: str, slope: float) -> bool:
    """Whether what the gradient asks of the pre-activation can be read from the output, so that it need not be computed
    again."""
    return activation in ("relu", "relu6", "sigmoid") or (activation == "leaky_relu" and slope > 0)


def _epilogue_setup(ctx: Any, residual: int, has_residual: bool) -> None:
    """`residual`: its place among the inputs. after: it is behind an activation, which its gradient does not go
    through, and whose value the output does not tell. masks: a gradient goes through the activation. recompute: by the
    activation's argument, which is computed again, as it is for a max-pool."""
    asked: Options = ctx.asked
    ctx.after = has_residual and asked.residual_after and asked.activation != "none"
    through = any(needed for i, needed in enumerate(ctx.needs_input_grad) if not (ctx.after and i == residual))
    ctx.masks = asked.activation != "none" and through
    unknown = ctx.masks and (ctx.after or not _output_tells_gradient(asked.activation, asked.negative_slope))
    ctx.recompute = unknown or (asked.max_pool and through)


def _epilogue_gradient(ctx: Any, grad: Tensor, saved: Tensor) -> Tensor:
    """The gradient of the activation's argument. saved: that, if it was computed again, or the output."""
    activation, slope = ctx.asked[2:4]
    if ctx.asked.max_pool:
        y = saved if activation == "none" else plain.activate(saved, activation, slope)
        _, indices = torch.nn.functional.max_pool2d(y, 2, return_indices=True)
        grad = aten.max_pool2d_with_indices_backward(grad, y, [2, 2], [2, 2], [0, 0], [1, 1], False, indices)
    return _activation_gradient(grad, saved, activation, slope, not ctx.recompute) if ctx.masks else grad


# conv2d --------------------------------------------------------------------------------------------------------------


def _conv2d_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, weight, bias, residual, *ctx.geometry = inputs[:8]
    ctx.asked = Options(*inputs[8:])
    _epilogue_setup(ctx, 3, residual is not None)
    ctx.sizes = input.shape, weight.shape
    needs_input, needs_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(
        input if needs_weight or ctx.recompute else None,
        weight if needs_input or ctx.recompute else None,
        bias if ctx.recompute else None,
        residual if ctx.recompute and not ctx.after else None,
        output if ctx.masks and not ctx.recompute else None,
    )


def _bias_gradient(grad: Tensor, filters: int) -> Tensor:
    """[K]. PyTorch's output without input channels is one without filters, too."""
    return grad.sum((0, 2, 3)) if grad.shape[1] == filters else grad.new_zeros(filters)


def _conv2d_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    input, weight, bias, residual, output = ctx.saved_tensors
    shared = (*ctx.geometry, *ctx.asked.of_gradients)
    if ctx.recompute:
        output = conv2d(input, weight, bias, residual, *ctx.geometry, *ctx.asked.bare)
    whole, grad = grad, _epilogue_gradient(ctx, grad, output)
    needs = ctx.needs_input_grad
    both: tuple[Tensor | None, Tensor | None] | None = None
    if needs[0] and needs[1]:
        both = gradients.both(grad, input, weight, Geometry(*ctx.geometry), ctx.asked)
    if both is None:
        of_input = input_gradient(grad, weight, ctx.sizes[0], *shared) if needs[0] else None
        both = of_input, weight_gradient(input, grad, ctx.sizes[1], *shared) if needs[1] else None
    return (
        *both,
        _bias_gradient(grad, ctx.sizes[1][0]) if needs[2] else None,
        (whole if ctx.after else grad) if needs[3] else None,
        *[None] * 13,
    )


# The two gradients ---------------------------------------------------------------------------------------------------


def _gradient_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    first, second, _, *ctx.geometry = inputs[:7]
    ctx.algorithm, ctx.precision, ctx.flags, *ctx.limits = inputs[7:]
    ctx.sizes = first.shape, second.shape
    ctx.save_for_backward(first, second)


def _conv(ctx: Any, input: Tensor, weight: Tensor) -> Tensor:
    return conv2d(
        input, weight, None, None, *ctx.geometry, ctx.algorithm, ctx.precision, "none", 0.0, ctx.flags, *ctx.limits
    )


def _input_gradient_backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
    grad, weight = ctx.saved_tensors
    shared = (*ctx.geometry, ctx.algorithm, ctx.precision, ctx.flags, *ctx.limits)
    return (
        _conv(ctx, cotangent, weight) if ctx.needs_input_grad[0] else None,
        weight_gradient(cotangent, grad, ctx.sizes[1], *shared) if ctx.needs_input_grad[1] else None,
        *[None] * 10,
    )


def _weight_gradient_backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
    input, grad = ctx.saved_tensors
    shared = (*ctx.geometry, ctx.algorithm, ctx.precision, ctx.flags, *ctx.limits)
    return (
        input_gradient(grad, cotangent, ctx.sizes[0], *shared) if ctx.needs_input_grad[0] else None,
        _conv(ctx, input, cotangent) if ctx.needs_input_grad[1] else None,
        *[None] * 10,
    )


@from_operator
def _plain_input_gradient(
    grad: Tensor, weight: Tensor, input_size: Sequence[int], geometry: Geometry, algorithm: str, precision: str,
    flags: int, *limits: Any,
) -> Tensor:  # fmt: skip
    return plain.input_gradient_as_convolution(grad, weight, input_size, geometry, precision, flags)


@from_operator
def _plain_weight_gradient(
    input: Tensor, grad: Tensor, weight_size: Sequence[int], geometry: Geometry, algorithm: str, precision: str,
    flags: int, *limits: Any,
) -> Tensor:  # fmt: skip
    return plain.weight_gradient_as_convolution(input, grad, weight_size, geometry, precision, flags)


# conv2d_packed: as conv2d, without a gradient for the weight ---------------------------------------------------------


def _conv2d_packed_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, packed, ctx.weight_shape, bias, residual, *ctx.geometry = inputs[:9]
    ctx.channels_last, ctx.asked = inputs[9], Options.of_packed(*inputs[10:])
    _epilogue_setup(ctx, 4, residual is not None)
    ctx.input_size = input.shape
    ctx.save_for_backward(
        input if ctx.recompute else None,
        packed,
        bias if ctx.recompute else None,
        residual if ctx.recompute and not ctx.after else None,
        output if ctx.masks and not ctx.recompute else None,
    )


def unpack_weight(
    packed: Tensor, weight_shape: Sequence[int], groups: int, dtype: torch.dtype, channels_last: bool, algorithm: str,
    precision: str,
) -> Tensor:  # fmt: skip
    """The weight [K, C/groups, R, S] that a packing was made from, up to the algorithm's rounding: whatever the
    packing, the impulse response of a filter is the filter, flipped."""
    _, c_per_group, r, s = weight_shape
    impulses = torch.zeros(c_per_group, groups, c_per_group, 2 * r - 1, 2 * s - 1, dtype=dtype, device=packed.device)
    impulses[:, :, :, r - 1, s - 1] = torch.eye(c_per_group, dtype=dtype, device=packed.device)[:, None, :]
    response = conv2d_packed(
        impulses.flatten(1, 2), packed, weight_shape, None, None, [1, 1], [0, 0], [1, 1], groups, channels_last,
        algorithm, precision, "none", 0.0,
    )  # fmt: skip
    return response.transpose(0, 1).flip(2, 3)  # [C/groups, K, R, S] -> [K, C/groups, R, S]


def _conv2d_packed_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    input, packed, bias, residual, output = ctx.saved_tensors
    algorithm, precision = ctx.asked[:2]
    of_packing = ctx.channels_last, algorithm, precision
    if ctx.recompute:
        output = conv2d_packed(input, packed, ctx.weight_shape, bias, residual, *ctx.geometry, *of_packing, "none", 0.0)
    whole, grad = grad, _epilogue_gradient(ctx, grad, output)
    needs = ctx.needs_input_grad
    grad_input = None
    if needs[0]:
        weight = unpack_weight(packed, ctx.weight_shape, ctx.geometry[3], grad.dtype, *of_packing)
        grad_input = input_gradient(
            grad, weight, ctx.input_size, *ctx.geometry, "auto", precision, settings.switches.backend_flags,
            *settings.resolve_limits(None, None, "auto"),
        )  # fmt: skip
    return (
        grad_input,
        None,
        None,
        _bias_gradient(grad, ctx.weight_shape[0]) if needs[3] else None,
        (whole if ctx.after else grad) if needs[4] else None,
        *[None] * 11,
    )


def _plain_conv2d_packed(*args: Any) -> Tensor:
    raise NotImplementedError("conv2d_packed in forward mode; expected conv2d with the plain weight")


# vmap: a batch of inputs is a larger N, a batch of filters is more groups --------------------------------------------


def _batched(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """[B, ...]"""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _into_channels(tensor: Tensor) -> Tensor:
    """[B, N, C, ...] -> [N, B*C, ...]"""
    return tensor.movedim(0, 1).flatten(1, 2)


def _select(tensor: Any, dim: int | None, index: int) -> Any:
    return tensor if dim is None else tensor.select(dim, index)


def _loop(operator: Any, info: Any, in_dims: Sequence[Any], args: Sequence[Any]) -> tuple[Tensor, int]:
    """One call per example: the general answer."""
    calls = [
        operator(*[_select(arg, dim, i) if isinstance(arg, Tensor) else arg for arg, dim in zip(args, in_dims)])  # noqa: B905
        for i in range(info.batch_size)
    ]
    return torch.stack(calls), 0


def _fold_epilogue(
    size: int, bias: Tensor | None, bias_dim: int | None, residual: Tensor | None, residual_dim: int | None,
    output_shape: Sequence[int],
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """(bias [K], residual [B*N, K, P, Q]) for a batch folded into N: a bias per example becomes a residual."""
    if residual is not None:
        residual = _batched(residual, residual_dim, size)
    if bias is not None and bias_dim is not None:
        shift = _batched(bias, bias_dim, size)[:, None, :, None, None]
        residual = shift.expand(size, *output_shape) if residual is None else residual + shift
        bias = None
    return bias, None if residual is None else residual.flatten(0, 1)


def _vmap_pool(
    vmap: Callable[..., tuple[Tensor, int]], info: Any, in_dims: Sequence[Any], args: Any
) -> tuple[Any, int]:
    """The pool behind a call without it."""
    y, dim = vmap(info, in_dims, *args)
    y = y.movedim(dim, 0)
    return plain.pooled(y.flatten(0, 1)).unflatten(0, y.shape[:2]), 0


def _vmap_conv2d(info, in_dims, *args):  # type: ignore[no-untyped-def]
    input, weight, bias, residual, stride, padding, dilation, groups, *options = args
    x_dim, w_dim, b_dim, r_dim = in_dims[:4]
    size, asked = info.batch_size, Options(*options)
    if asked.max_pool:
        return _vmap_pool(_vmap_conv2d, info, in_dims, (*args[:8], *asked._replace(max_pool=False)))
    if b_dim is not None and residual is not None and asked.residual_after:
        summed = (input, weight, bias, None, *args[4:8], *asked._replace(residual_after=False))
        y, dim = _vmap_conv2d(info, (x_dim, w_dim, b_dim, None), *summed)
        return y.movedim(dim, 0) + _batched(residual, r_dim, size), 0
    if w_dim is None:
        x = _batched(input, x_dim, size)
        shape = [x.shape[1], weight.shape[0], *ops.output_size(x.shape, weight.shape, stride, padding, dilation)]
        bias, residual = _fold_epilogue(size, bias, b_dim, residual, r_dim, shape)
        y = conv2d(x.flatten(0, 1), weight, bias, residual, stride, padding, dilation, groups, *asked)
        return y.reshape(size, *shape), 0
    if asked.algorithm not in ("auto", "torch"):  # asked for by name: more groups may be more than it can do
        return _loop(conv2d, info, in_dims, args)
    filters = _batched(weight, w_dim, size)
    k = filters.shape[1]
    if x_dim is None and groups == 1:
        x = input  # one input, B*K filters
    else:
        x, groups = _into_channels(_batched(input, x_dim, size)), size * groups
    if bias is not None:
        bias = _batched(bias, b_dim, size).flatten()
    if residual is not None:
        residual = _into_channels(_batched(residual, r_dim, size))
    y = conv2d(x, filters.flatten(0, 1), bias, residual, stride, padding, dilation, groups, *asked)
    return y.unflatten(1, (size, k)), 1


def _vmap_input_gradient(info, in_dims, *args):  # type: ignore[no-untyped-def]
    grad, weight, (n, c, h, w), stride, padding, dilation, groups, *rest = args
    size = info.batch_size
    grad = _batched(grad, in_dims[0], size)
    if in_dims[1] is None:
        x = input_gradient(grad.flatten(0, 1), weight, [size * n, c, h, w], stride, padding, dilation, groups, *rest)
        return x.reshape(size, n, c, h, w), 0
    filters = _batched(weight, in_dims[1], size).flatten(0, 1)
    x = input_gradient(
        _into_channels(grad), filters, [n, size * c, h, w], stride, padding, dilation, size * groups, *rest
    )
    return x.unflatten(1, (size, c)), 1


def _vmap_weight_gradient(info, in_dims, *args):  # type: ignore[no-untyped-def]
    input, grad, (k, c, r, s), stride, padding, dilation, groups, *rest = args
    size = info.batch_size
    x, grad = (_into_channels(_batched(t, dim, size)) for t, dim in ((input, in_dims[0]), (grad, in_dims[1])))
    w = weight_gradient(x, grad, [size * k, c, r, s], stride, padding, dilation, size * groups, *rest)
    return w.unflatten(0, (size, k)), 0


def _vmap_conv2d_packed(info, in_dims, *args):  # type: ignore[no-untyped-def]
    input, packed, weight_shape, bias, residual, stride, padding, dilation, *rest = args
    if in_dims[1] is not None:
        return _loop(conv2d_packed, info, in_dims, args)
    size, asked = info.batch_size, Options.of_packed(*rest[2:])
    if asked.max_pool:
        return _vmap_pool(_vmap_conv2d_packed, info, in_dims, (*args[:14], asked.residual_after))
    if in_dims[3] is not None and residual is not None and asked.residual_after:
        y, _ = _vmap_conv2d_packed(info, (*in_dims[:4], None), *args[:4], None, *args[5:14])
        return y + _batched(residual, in_dims[4], size), 0
    x = _batched(input, in_dims[0], size)
    shape = [x.shape[1], weight_shape[0], *ops.output_size(x.shape, weight_shape, stride, padding, dilation)]
    bias, residual = _fold_epilogue(size, bias, in_dims[3], residual, in_dims[4], shape)
    y = conv2d_packed(x.flatten(0, 1), packed, weight_shape, bias, residual, stride, padding, dilation, *rest)
    return y.reshape(size, *shape), 0


@torch.library.register_vmap(ops.pack_weight_op, lib=ops.library)
def _vmap_pack_weight(info, in_dims, *args):  # type: ignore[no-untyped-def]
    return _loop(ops.pack_weight_op, info, in_dims, args)


# activation(conv(input [N, C, H, W], weight [K, C/groups, R, S]) + bias [K] + residual [N, K, P, Q]), or the residual
# behind the activation, or of each 2 x 2 the largest: input, weight, bias, residual, stride, padding, dilation, groups,
# and `Options`.
conv2d = _differentiable(ops.conv2d_op, _conv2d_setup, _conv2d_backward, _vmap_conv2d, plain.conv2d)
input_gradient = _differentiable(
    ops.input_gradient_op, _gradient_setup, _input_gradient_backward, _vmap_input_gradient, _plain_input_gradient
)
weight_gradient = _differentiable(
    ops.weight_gradient_op, _gradient_setup, _weight_gradient_backward, _vmap_weight_gradient, _plain_weight_gradient
)
# `conv2d` with a weight from `ops.pack_weight` for the same algorithm, precision and dtype: input, packed,
# weight_shape, bias, residual, stride, padding, dilation, groups, channels_last, algorithm, precision, activation,
# slope, residual_after=False, max_pool=False. channels_last: whether the plain weight was, which counts for the
# output's memory format.
conv2d_packed = _differentiable(
    ops.conv2d_packed_op, _conv2d_packed_setup, _conv2d_packed_backward, _vmap_conv2d_packed, _plain_conv2d_packed
)


# Of a layer's call: what csrc/ops/layer_gradients.cpp leaves ----------------------------------------------------------


def _gradients_in_python(
    grad: Tensor, input: Tensor, weight: Tensor, geometry: Sequence[int], transposed: bool, algorithm: str,
    precision: str, max_error: float, max_workspace: int, wanted: int,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of input (wanted & 1), weight (2) and bias (4); differentiable where gradients are recorded. 8: in
    a backward pass, which raises what goes wrong at its end. max_error, max_workspace: 0 and -1 are none."""
    try:
        split = Geometry(geometry[0:2], geometry[2:4], geometry[4:6], geometry[6])
        limits = max_error or None, None if max_workspace < 0 else max_workspace
        if transposed and algorithm != "torch":
            algorithm = "auto"  # a name says what computes the transposed convolution
        rest = algorithm, precision, settings.switches.backend_flags, *limits
        memory_format = ops.format_of(input, weight)
        seen = grad.contiguous(memory_format=memory_format)  # so that its gradients are what nn.Conv2d's are
        dx = dw = db = None
        if transposed and is_without_pixels(seen):
            dx, dw = torch.zeros_like(input), torch.zeros_like(weight)
        elif transposed:
            if wanted & 1:
                dx = conv2d(seen, weight, None, None, *split, *rest[:2], "none", 0.0, *rest[2:])
            if wanted & 2:
                dw = weight_gradient(seen, input, weight.shape, *split, *rest)
        elif torch.is_grad_enabled() or not is_plain(grad):
            if wanted & 1:
                dx = input_gradient(seen, weight, input.shape, *split, *rest)
            if wanted & 2:
                dw = weight_gradient(input, seen, weight.shape, *split, *rest)
        else:  # past the dispatcher
            if wanted & 1:
                dx = gradients.input_gradient(seen, weight, input.shape, split, *rest)
            if wanted & 2:
                dw = gradients.weight_gradient(input, seen, weight.shape, split, *rest)
        if wanted & 4:
            db = grad.sum((0, 2, 3))
        if dx is not None:
            dx = dx.contiguous(memory_format=memory_format)
    except Exception as error:
        if not wanted & 8:
            raise
        failures.raise_at_the_end(error)
        return None, None, None
    return dx, dw, db


def _backward_failed(message: str, grad: Tensor) -> None:
    failures.raise_at_the_end(failures.translated(RuntimeError(message), (grad,)))


ops.library.impl("gradients_in_python", _gradients_in_python, "CompositeImplicitAutograd")
ops.library.impl("backward_failed", _backward_failed, "CompositeExplicitAutograd")
ops.library.impl("allows_tf32", lambda: int(settings.cuda_precision() == "tf32"), "CompositeExplicitAutograd")
ops.library.impl("backend_flags", lambda: settings.switches.backend_flags, "CompositeExplicitAutograd")
