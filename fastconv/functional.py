"""`conv2d`: `torch.nn.functional.conv2d` with residual, activation and max-pool, through fastconv's operators."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastconv import ops, settings
from fastconv.eager import Settings, convolve, convolve_trained, is_eager, known_call, needs_gradient, state_of
from fastconv.ops import autograd, plain
from fastconv.ops.geometry import integer, pair
from fastconv.tensors import PLAIN, is_foreign

_is_compiling = torch.compiler.is_compiling


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    algorithm: str = "auto",
    precision: str | None = None,
    max_error: float | None = None,
    max_workspace: int | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    negative_slope: float = 0.01,
    residual_after: bool = False,
    max_pool: bool = False,
) -> Tensor:
    """``activation(conv2d(input, weight, bias) + residual)``; all but the keywords as `torch.nn.functional.conv2d`.

    Args:
        input: ``[N, C, H, W]`` or ``[C, H, W]``, any strides.
        weight: ``[K, C/groups, R, S]``, the input's dtype and device.
        bias: ``[K]`` or None.
        stride, dilation: a positive integer or a pair of them, for height and width.
        padding: zeros on both sides: an integer of at least 0, a pair, ``"valid"`` (none) or ``"same"`` (stride 1:
            the output has the input's size).
        groups: a divisor of C and K.
        algorithm: ``"auto"``, or a name from `fastconv.algorithms`.
        precision: accuracy class of float32 tensors: ``"ieee"`` FP32 arithmetic only, ``"fp32"`` FP32-accurate by any
            means, ``"tf32"`` within `max_error` of TF32's error; None follows
            ``torch.backends.cudnn.conv.fp32_precision``, which is TF32 by default.
        max_error: how far ``"auto"`` may go: the error that an algorithm must be expected to make, as a multiple of
            PyTorch's own in the class, at least 1; None: 4, in class ``"fp32"`` on CUDA 1.5. Counts for the gradients,
            too. `fastconv.explain` tells every algorithm's, docs/concepts/numerics.md derives them.
        max_workspace: bytes of memory that an algorithm may take beside its tensors and the packed weight, a copy of
            the input in another layout included; None: any. PyTorch's own is not asked. Counts for the gradients, too.
        residual: the output's shape, the input's dtype; added before the activation, or behind it.
        activation: None, ``"relu"``, ``"relu6"``, ``"silu"``, ``"leaky_relu"`` (with `negative_slope`), ``"gelu"``,
            ``"gelu_tanh"``, ``"hardswish"`` or ``"sigmoid"``. The last four are a pass of PyTorch's where kernels do
            not end with them, as on a GPU some do: `fastconv.explain` tells.
        residual_after: ``activation(conv2d(input, weight, bias)) + residual`` instead. Where the convolution's own
            gradient will be asked for, PyTorch adds the residual: that gradient needs the activation's value.
        max_pool: ``max_pool2d(activation(conv2d(input, weight, bias)), 2)`` instead, without a residual: P and Q of the
            output are half as large, rounded down. Where a gradient will be asked for, PyTorch pools.

    Returns:
        ``[N, K, P, Q]`` (``[K, P, Q]`` for an unbatched input), P = (H + 2 padding - dilation (R-1) - 1) // stride + 1
        and Q likewise; channels_last if the input or the weight is, else contiguous.

    Raises:
        TypeError: an argument of the wrong type.
        RuntimeError: shapes, dtypes or values that do not fit each other, as `torch.nn.functional.conv2d`.
        ValueError: an unknown algorithm, precision or activation; a max_error below 1, a max_workspace
            below 0.
        fastconv.UnsupportedError: the named algorithm cannot serve this problem, or must be expected to err by more
            than the `max_error` that is given beside it, or needs more than `max_workspace`; the message says why.

    PyTorch's own convolution takes tensors of a class that gives PyTorch's operators a meaning of its own, as quantized
    ones. In forward-mode differentiation (`torch.func.jvp`), and where `torch.compile` traces a transform of
    `torch.func`, it runs whatever the algorithm asked for.
    """
    asked = (
        stride, padding, dilation, groups, algorithm, precision, max_error, max_workspace, activation, negative_slope,
    )  # fmt: skip
    is_plain = residual_after is False and max_pool is False and not _is_compiling()
    if is_plain and not settings.log_calls:
        y = _again(input, weight, bias, residual, asked)
        if y is not None:
            return y
    _require_tensor("input", input)
    _require_tensor("weight", weight)
    if bias is not None:
        _require_tensor("bias", bias)
    if residual is not None:
        _require_tensor("residual", residual)
    algorithm = _resolved_algorithm(algorithm)
    limits = settings.resolve_limits(max_error, max_workspace, algorithm)
    precision = settings.resolve_precision(precision, input.is_cuda)
    activation = settings.resolve_activation(activation)
    if type(residual_after) is not bool or type(max_pool) is not bool:
        settings.check_flag("residual_after", residual_after)
        settings.check_flag("max_pool", max_pool)
    if type(negative_slope) is not float:
        settings.check_slope(negative_slope)
    residual_after = residual_after and residual is not None and activation != "none"
    if max_pool and residual is not None:
        raise RuntimeError("max_pool is True; expected no residual beside it")
    batched = _batched_input(input, weight, residual)
    strides = pair("stride", stride)
    dilations = pair("dilation", dilation)
    groups = integer("groups", groups)
    if isinstance(padding, str):
        x, paddings = _named_padding(batched, weight, padding, strides, dilations)
    else:
        x, paddings = batched, pair("padding", padding)
    geometry = strides, paddings, dilations, groups
    if residual is not None and input.dim() == 3:
        residual = residual.unsqueeze(0)

    y = resolved_conv2d(
        x, weight, bias, residual, geometry, algorithm, precision, activation, float(negative_slope), limits,
        residual_after, max_pool, asked if is_plain and not isinstance(padding, str) else None,
    )  # fmt: skip
    return y.squeeze(0) if input.dim() == 3 else y


def _again(
    input: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, asked: tuple[Any, ...]
) -> Tensor | None:
    """`conv2d` with arguments that were checked when this weight was met last; None if they were not, or it is not for
    what is kept of that call to compute."""
    known = known_call(weight, asked)
    if known is None or not is_eager(input, weight, bias, residual) or input.layout is not torch.strided:
        return None
    state, key = known
    precision = asked[5]
    # Of half types every class is the same.
    its = settings.resolve_precision(precision, input.is_cuda) if input.dtype is torch.float32 else "fp32"
    if weight.requires_grad and torch.is_grad_enabled() and residual is None and key[5] == "none" and input.dim() == 4:
        y = convolve_trained(state, input, weight, bias, key, its)
        if y is not None:
            return y
    return convolve(state, input, weight, bias, residual, key, its, precision is None)


def resolved_conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, geometry: Sequence[Any], algorithm: str,
    precision: str, activation: str, negative_slope: float, limits: settings.Limits, residual_after: bool,
    max_pool: bool, asked: tuple[Any, ...] | None = None,
) -> Tensor:  # fmt: skip
    """`conv2d` of a batch, with arguments as the operators get them. In a function that `torch.compile` traces every
    name that is read is a guard, which every call of the compiled code pays for. asked: for `_again`, if that may
    compute the next call."""
    refused = _refused(x, weight, bias, residual)
    if refused is not None:
        if algorithm not in ("auto", "torch"):
            raise ops.UnsupportedError(f"algorithm '{algorithm}' cannot serve {refused}")
        return _through_torch(x, weight, bias, residual, geometry, activation, negative_slope, residual_after, max_pool)
    apart = (residual_after or max_pool) and needs_gradient(x, weight, bias)
    inside, after, pools = (None, False, False) if apart else (residual, residual_after, max_pool)
    y = None
    if not _is_compiling():
        _require_operators()
        if settings.log_calls:
            _log(x, weight, geometry, algorithm, precision, activation)
        y = _by_layer(
            x, weight, bias, inside, geometry, algorithm, precision, activation, negative_slope, limits, after, pools,
            asked=asked,
        )  # fmt: skip
    if y is None:
        y = autograd.conv2d(
            x, weight, bias, inside, *geometry, algorithm, precision, activation, negative_slope,
            settings.switches.backend_flags, *limits, after, pools,
        )  # fmt: skip
    if apart:
        y = plain.pooled(y) if max_pool else _added(y, residual)
    return y


def _by_layer(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, geometry: Sequence[Any], algorithm: str,
    precision: str, activation: str, negative_slope: float, limits: settings.Limits, residual_after: bool,
    max_pool: bool, output_padding: Sequence[int] | None = None, asked: tuple[Any, ...] | None = None,
) -> Tensor | None:  # fmt: skip
    """The call by what is kept for its weight; None if the weight is new, or the general operator has to do it."""
    if not is_eager(x, weight, bias, residual):
        return None
    state = state_of(weight)
    if state is None:
        return None
    stride, padding, dilation, groups = geometry
    slope = negative_slope if activation == "leaky_relu" else 0.0
    key: Settings = (
        algorithm, tuple(stride), tuple(padding), tuple(dilation), groups, activation, slope, limits, residual_after,
        max_pool, None if output_padding is None else tuple(output_padding),
    )  # fmt: skip
    if asked is not None:
        state.keep_call(asked, key)
    return convolve(state, x, weight, bias, residual, key, precision)


def _refused(input: Tensor, *others: Tensor | None) -> str | None:
    """What the operators do not take, if anything: PyTorch takes or refuses it as it always does."""
    dtype = input.dtype
    known = dtype.is_floating_point and dtype.itemsize > 1 and (input.is_cuda or input.is_cpu or input.is_meta)
    if not known or input.layout is not torch.strided:
        return f"{input.dtype} on {input.device.type}; expected float32, float16 or bfloat16 on cpu or cuda"
    return foreign_of(input, *others)


def foreign_of(*tensors: Tensor | None) -> str | None:
    """That of these tensors whose class says itself what PyTorch's operators do with it, if there is one."""
    for tensor in tensors:
        if tensor is not None and type(tensor) not in PLAIN and is_foreign(tensor):
            return f"a {type(tensor).__module__}.{type(tensor).__qualname__}; expected plain tensors"
    return None


def _require_tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; expected a torch.Tensor")


def _require_operators() -> None:
    """UnsupportedError where the operators cannot be recorded."""
    if torch._C._get_tracing_state() is not None and torch.onnx.is_in_onnx_export():
        raise ops.UnsupportedError(
            "torch.onnx.export by TorchScript cannot translate fastconv's operators: export with dynamo=True, or "
            "undo() the swap first (of a fused model: export the model that it was made from)"
        )


def _resolved_algorithm(algorithm: str) -> str:
    """What the operators get for what the caller asked for."""
    settings.check_algorithm(algorithm)
    return settings.resolve_algorithm(algorithm)


def _batched_input(input: Tensor, weight: Tensor, residual: Tensor | None) -> Tensor:
    dims = input.dim()
    if dims not in (3, 4):
        raise RuntimeError(f"input has shape {list(input.shape)}; expected [N, C, H, W] or [C, H, W]")
    if weight.dim() != 4:
        raise RuntimeError(f"weight has shape {list(weight.shape)}; expected [K, C/groups, R, S]")
    if residual is not None and residual.dim() != dims:
        raise RuntimeError(f"residual has shape {list(residual.shape)}; expected {dims} dimensions, as input")
    return input if dims == 4 else input.unsqueeze(0)


def kernel_of(weight: Tensor) -> list[int]:
    """R and S. torch.jit.trace makes tensors of sizes, which the operators do not take for integers."""
    return [int(size) if isinstance(size, Tensor) else size for size in weight.shape[2:]]


def _named_padding(
    input: Tensor, weight: Tensor, padding: str, stride: list[int], dilation: list[int]
) -> tuple[Tensor, list[int]]:
    paddings, extra = _named_padding_sizes(kernel_of(weight), padding, stride, dilation)
    return (input if extra == [0, 0] else F.pad(input, [0, extra[1], 0, extra[0]])), paddings


def _named_padding_sizes(
    kernel: Sequence[int], padding: str, stride: list[int], dilation: list[int]
) -> tuple[list[int], list[int]]:
    """Zeros on both sides, and the zeros more at the end that an even kernel needs."""
    if padding == "valid":
        return [0, 0], [0, 0]
    if padding != "same":
        raise RuntimeError(f"padding is {padding!r}; expected 'same', 'valid', an integer or a pair of integers")
    if stride != [1, 1]:
        raise RuntimeError(f"stride is {stride}; expected 1 with padding='same'")
    totals = [dilation[i] * (kernel[i] - 1) for i in range(2)]
    return [total // 2 for total in totals], [total % 2 for total in totals]


def _through_torch(
    input: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, geometry: Sequence[Any],
    activation: str, negative_slope: float, residual_after: bool, max_pool: bool,
) -> Tensor:  # fmt: skip
    y = F.conv2d(input, weight, bias, *geometry)
    if residual is not None:
        _require_alike(residual, y)
    y = plain.epilogue(y, residual, activation, negative_slope, residual_after)
    return plain.pooled(y) if max_pool else y


def _added(y: Tensor, residual: Any) -> Tensor:
    """y + residual, with what the operator would make of the residual's dtype, and refuse."""
    if torch.is_autocast_enabled(y.device.type) and residual.dtype != torch.float64:
        residual = residual.to(y.dtype)
    _require_alike(residual, y)
    return y + residual


def _require_alike(residual: Tensor, y: Tensor) -> None:
    if residual.shape != y.shape or residual.dtype != y.dtype:
        raise RuntimeError(
            f"residual is {residual.dtype} of shape {list(residual.shape)}; expected {y.dtype} of shape {list(y.shape)}"
        )


def _log(
    input: Tensor, weight: Tensor, geometry: Sequence[Any], algorithm: str, precision: str, activation: str
) -> None:
    settings.logger.debug(
        "conv2d input %s%s weight %s stride %s padding %s dilation %s groups %d %s %s algorithm %s precision %s "
        "activation %s",
        list(input.shape), "" if ops.format_of(input, weight) == torch.contiguous_format else " channels_last",
        list(weight.shape), *geometry, input.dtype, input.device, algorithm, precision,
        activation,
    )  # fmt: skip
