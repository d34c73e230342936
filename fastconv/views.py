"""Convolutions that are views of the two-dimensional one: `conv1d` and `Conv1d` are it with a height of 1,
`conv_transpose2d` and `ConvTranspose2d` its input gradient (`fastconv.ops.transposed`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.common_types import _size_1_t, _size_2_t

from fastconv import functional, ops, settings
from fastconv.eager import LayerState, Settings, convolve, is_eager
from fastconv.functional import conv2d
from fastconv.layer import Epilogue, Layer
from fastconv.nn import Conv2d, check_settings
from fastconv.ops import transposed
from fastconv.ops.geometry import integer, pair

__all__ = ["Conv1d", "ConvTranspose2d", "conv1d", "conv_transpose2d"]

_is_compiling = torch.compiler.is_compiling
_exclude = torch._C._ExcludeDispatchKeyGuard
_ADInplaceOrView = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
_unsafe_view = torch.ops.aten._unsafe_view.default
_conv_transpose2d = torch.conv_transpose2d

# torch.fx records each as one call, as it does conv2d.
torch.fx.wrap("conv1d")
torch.fx.wrap("conv_transpose2d")


def conv1d(
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
) -> Tensor:
    """`torch.nn.functional.conv1d` through fastconv: `fastconv.conv2d` with a height of 1.

    Args:
        input: ``[N, C, L]`` or ``[C, L]``, any strides.
        weight: ``[K, C/groups, S]``, the input's dtype and device.
        bias: ``[K]`` or None.
        stride, padding, dilation, groups: as `torch.nn.functional.conv1d`; integers, or sequences of one.
        algorithm, precision, max_error, max_workspace: as `fastconv.conv2d`.

    Returns:
        ``[N, K, Q]`` (``[K, Q]`` for an unbatched input), Q = (L + 2 padding - dilation (S-1) - 1) // stride + 1;
        contiguous, whatever the input is.

    Raises as `fastconv.conv2d`."""
    functional._require_tensor("input", input)
    functional._require_tensor("weight", weight)
    if bias is not None:
        functional._require_tensor("bias", bias)
    if input.dim() not in (2, 3):
        raise RuntimeError(f"input has shape {list(input.shape)}; expected [N, C, L] or [C, L]")
    if weight.dim() != 3:
        raise RuntimeError(f"weight has shape {list(weight.shape)}; expected [K, C/groups, S]")
    strides, dilations = _row("stride", stride, 1), _row("dilation", dilation, 1)
    if isinstance(padding, str):
        if padding not in ("same", "valid"):
            raise RuntimeError(f"padding is {padding!r}; expected 'same', 'valid', an integer or a sequence of one")
        if padding == "same" and strides != (1, 1):
            raise RuntimeError(f"stride is {stride}; expected 1 with padding='same'")
        paddings: Any = padding
    else:
        paddings = _row("padding", padding, 0)
    foreign = functional.foreign_of(input, weight, bias)
    if foreign is not None:  # it may know PyTorch's operator for rows, and no view of itself
        if algorithm not in ("auto", "torch"):
            raise ops.UnsupportedError(f"algorithm '{algorithm}' cannot serve {foreign}")
        own = paddings if isinstance(padding, str) else paddings[1:]
        return F.conv1d(input, weight, bias, strides[1:], own, dilations[1:], groups)
    y = conv2d(
        _as_image(input), weight.unsqueeze(-2), bias, strides, paddings, dilations, groups, algorithm=algorithm,
        precision=precision, max_error=max_error, max_workspace=max_workspace,
    )  # fmt: skip
    return _as_row(y)


def _as_image(x: Tensor) -> Tensor:
    """With a height of 1. A transposed input would be one in channels_last, and the output, too; PyTorch's is not."""
    return x.contiguous().unsqueeze(-2)


def _as_row(y: Tensor) -> Tensor:
    """Without it: no view, as PyTorch's is none."""
    return y.squeeze(-2) if _is_compiling() else _unsafe_view(y, (*y.shape[:-2], y.shape[-1]))


def _row(name: str, value: Any, height: int) -> tuple[Any, Any]:
    """The value for a height of 1, and the one that was asked for."""
    if isinstance(value, str):
        raise TypeError(f"{name} is {value!r}; expected an integer or a sequence of one")
    values = value if isinstance(value, (list, tuple)) else (value,)
    if len(values) != 1:
        raise RuntimeError(f"{name} is {value!r}; expected an integer or a sequence of one")
    return height, integer(name, values[0])


def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
    *,
    algorithm: str = "auto",
    precision: str | None = None,
    max_error: float | None = None,
    max_workspace: int | None = None,
) -> Tensor:
    """`torch.nn.functional.conv_transpose2d` through fastconv: the input gradient of a convolution, made of forward
    convolutions of stride 1 where they are the faster way.

    Args:
        input: ``[N, C, H, W]`` or ``[C, H, W]``, any strides.
        weight: ``[C, K/groups, R, S]``, the input's dtype and device.
        bias: ``[K]`` or None.
        stride, padding, output_padding, dilation: integers or pairs, as `torch.nn.functional.conv_transpose2d`.
        groups: a divisor of C.
        algorithm: ``"auto"``, or the name of the algorithm of those convolutions; ``"torch"``: PyTorch's operator.
            Gradients are `auto`'s, but for ``"torch"``.
        precision, max_error, max_workspace: as `fastconv.conv2d`.

    Returns:
        ``[N, K, P, Q]`` (``[K, P, Q]`` for an unbatched input), P = (H-1) stride - 2 padding + dilation (R-1) +
        output_padding + 1 and Q likewise; channels_last if the input or the weight is, else contiguous.

    Raises:
        TypeError: an argument of the wrong type.
        RuntimeError: shapes, dtypes or values that do not fit each other, as `torch.nn.functional.conv_transpose2d`.
        ValueError: an unknown algorithm or precision; a max_error below 1.
        fastconv.UnsupportedError: the named algorithm cannot serve one of the convolutions; an `output_padding` of at
            least the stride, which only PyTorch serves.
    """
    functional._require_tensor("input", input)
    functional._require_tensor("weight", weight)
    if bias is not None:
        functional._require_tensor("bias", bias)
    algorithm = functional._resolved_algorithm(algorithm)
    limits = settings.resolve_limits(max_error, max_workspace, algorithm)
    precision = settings.resolve_precision(precision, input.is_cuda)
    if input.dim() not in (3, 4):
        raise RuntimeError(f"input has shape {list(input.shape)}; expected [N, C, H, W] or [C, H, W]")
    if weight.dim() != 4:
        raise RuntimeError(f"weight has shape {list(weight.shape)}; expected [C, K/groups, R, S]")
    strides, paddings = pair("stride", stride), pair("padding", padding)
    extras, dilations = pair("output_padding", output_padding), pair("dilation", dilation)
    groups = integer("groups", groups)

    x = input if input.dim() == 4 else input.unsqueeze(0)
    arguments = (strides, paddings, extras, dilations, groups, algorithm, precision)
    y = _resolved_conv_transpose2d(x, weight, bias, *arguments, limits)
    return y if input.dim() == 4 else y.squeeze(0)


def _resolved_conv_transpose2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    output_padding: Sequence[int], dilation: Sequence[int], groups: int, algorithm: str, precision: str,
    limits: settings.Limits,
) -> Tensor:  # fmt: skip
    """`conv_transpose2d` of a batch, with arguments as the operators get them (`functional.resolved_conv2d`)."""
    refused = functional._refused(x, weight, bias)
    if refused is None and output_padding != (0, 0):
        refused = transposed.reason_for_torch(stride, output_padding, dilation) or None
    if refused is not None:
        if algorithm not in ("auto", "torch"):
            raise ops.UnsupportedError(f"algorithm '{algorithm}' cannot serve {refused}")
        y = F.conv_transpose2d(x, weight, bias, stride, padding, output_padding, groups, dilation)  # type: ignore[arg-type]
        if not _is_compiling():
            ops.record_torch(x.dtype, precision)
        # Not every kernel of PyTorch's keeps channels_last.
        return y.contiguous(memory_format=ops.format_of(x, weight)) if y.dim() == 4 else y
    if not _is_compiling():
        functional._require_operators()
        if settings.log_calls:
            _log(x, weight, stride, padding, output_padding, dilation, groups, algorithm, precision)
        geometry = (stride, padding, dilation, groups)
        kept = functional._by_layer(
            x, weight, bias, None, geometry, algorithm, precision, "none", 0.0, limits, False, False, output_padding
        )
        if kept is not None:
            return kept
    return transposed.conv_transpose2d(
        x, weight, bias, stride, padding, output_padding, dilation, groups, algorithm, precision,
        settings.switches.backend_flags, *limits,
    )  # fmt: skip


def _log(input: Tensor, weight: Tensor, *arguments: Any) -> None:
    """`arguments`: stride, padding, output_padding, dilation, groups, algorithm, precision."""
    settings.logger.debug(
        "conv_transpose2d input %s weight %s stride %s padding %s output_padding %s dilation %s groups %d "
        "algorithm %s precision %s %s %s",
        list(input.shape), list(weight.shape), *arguments, input.dtype, input.device,
    )  # fmt: skip


class Conv1d(Layer, nn.Conv1d):
    """torch.nn.Conv1d on fastconv's algorithms: the same arguments, parameters, buffers and state_dict.

    Input `[N, C, L]` or `[C, L]`, output `[N, K, Q]` or `[K, Q]`. `algorithm`, `precision` and `max_error`, the weights
    that are kept packed, and what is raised: as for fastconv.Conv2d, of which this is one with a height of 1.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: _size_1_t,
        stride: _size_1_t = 1,
        padding: str | _size_1_t = 0,
        dilation: _size_1_t = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
        device: Any = None,
        dtype: Any = None,
        *,
        algorithm: str = "auto",
        precision: str | None = None,
        max_error: float | None = None,
        max_workspace: int | None = None,
    ) -> None:
        check_settings(algorithm, precision, max_error, max_workspace)
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype
        )
        self._fastconv = LayerState(algorithm, precision, max_error, max_workspace=max_workspace)

    @property
    def last_input_shape(self) -> tuple[int, ...] | None:
        """The input's shape in the most recent eager call."""
        return without_height(self._fastconv.last_input_shape)

    def forward(self, input: Tensor) -> Tensor:
        """Convolves `input` `[N, C, L]` or `[C, L]`; errors as for torch.nn.Conv1d."""
        if not _is_compiling() and type(input) is Tensor and input.dim() == 3:
            y = self._at_once(input)
            if y is not None:
                return y
        state, x, padding = self._fastconv, input, self.padding
        if self.padding_mode != "zeros":
            x, padding = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode), (0,)
        weight, bias = self.weight, self.bias
        if not is_eager(x, weight, bias) or x.dim() not in (2, 3) or "_is_replica" in self.__dict__:
            return conv1d(
                x, weight, bias, self.stride, padding, self.dilation, self.groups, algorithm=state.algorithm,
                precision=state.precision, max_error=state.max_error,
            max_workspace=state.max_workspace,
            )  # fmt: skip
        image = self._as_conv2d(weight, bias, padding)._convolve(_as_image(x), None, "none", 0.0, False, False)
        return _as_row(image)

    def _inferred(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, epilogue: Epilogue
    ) -> Tensor | None:
        y = super()._inferred(_as_image(x), weight.unsqueeze(-2), bias, residual, epilogue)
        if y is None:
            return None
        with _exclude(_ADInplaceOrView):  # half the time of `_as_row`, which autograd may record
            return y.squeeze(-2)

    def _trained(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        return None  # what autograd records are the views, too

    def _known_key(self, x: Tensor, epilogue: Epilogue) -> tuple[Settings, str] | None:
        return self._as_conv2d(self.weight, self.bias, self.padding)._known_key(x, epilogue)

    def _as_packed(self, weight: Tensor) -> Tensor:
        return weight.unsqueeze(-2)

    def _as_conv2d(self, weight: Tensor, bias: Tensor | None, padding: Any) -> Conv2d:
        """The Conv2d that this layer is in this call: of the same state, which has the packed weights."""
        layer = Conv2d.__new__(Conv2d)
        layer.__dict__.update(
            self.__dict__,
            _parameters={"weight": weight.unsqueeze(-2), "bias": bias},
            kernel_size=(1, *self.kernel_size),
            stride=(1, *self.stride),
            padding=padding if isinstance(padding, str) else (0, *padding),
            dilation=(1, *self.dilation),
            padding_mode="zeros",
        )
        return layer


def without_height(shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """`[..., 1, L]` as `[..., L]`."""
    return None if shape is None else (*shape[:-2], shape[-1])


class ConvTranspose2d(Layer, nn.ConvTranspose2d):
    """torch.nn.ConvTranspose2d on fastconv's algorithms: the same arguments, parameters, buffers and state_dict.

    Input `[N, C, H, W]` or `[C, H, W]`, output `[N, K, P, Q]` or `[K, P, Q]`. `algorithm`, `precision`, `max_error` and
    what is raised: as for fastconv.conv_transpose2d. The weight is flipped and packed at every call: nothing is
    kept.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: _size_2_t,
        stride: _size_2_t = 1,
        padding: _size_2_t = 0,
        output_padding: _size_2_t = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: _size_2_t = 1,
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
        device: Any = None,
        dtype: Any = None,
        *,
        algorithm: str = "auto",
        precision: str | None = None,
        max_error: float | None = None,
        max_workspace: int | None = None,
    ) -> None:
        check_settings(algorithm, precision, max_error, max_workspace)
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias, dilation,
            padding_mode, device, dtype,
        )  # fmt: skip
        self._fastconv = LayerState(algorithm, precision, max_error, max_workspace=max_workspace)

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Convolves `input` `[N, C, H, W]` or `[C, H, W]`; errors as for torch.nn.ConvTranspose2d.

        `output_size`: P and Q (or the whole shape), of the sizes that the stride admits."""
        if output_size is None and not _is_compiling():
            known = self._at_once(input)
            if known is not None:
                return known
        state, own = self._fastconv, self.__dict__
        stride, padding, dilation, groups = own["stride"], own["padding"], own["dilation"], own["groups"]
        extra: Any = own["output_padding"]
        if own["padding_mode"] != "zeros":
            raise ValueError(f"padding_mode is '{self.padding_mode}'; expected 'zeros' for ConvTranspose2d")
        if output_size is not None:
            given: Any = (stride, padding, self.kernel_size, 2, dilation)
            extra = tuple(self._output_padding(input, output_size, *given))
        weight, bias = self._weight_and_bias()
        if _is_compiling() and input.dim() == 4:
            precision = settings.resolve_precision(state.precision, input.is_cuda)
            arguments = (stride, padding, extra, dilation, groups, state.resolved, precision)
            return _resolved_conv_transpose2d(input, weight, bias, *arguments, state.limits)
        eager = is_eager(input, weight, bias) and "_is_replica" not in own
        y = None
        if eager and (extra == (0, 0) or not transposed.reason_for_torch(stride, extra, dilation)):
            key, precision = self._key(input, extra)
            if settings.log_calls:
                _log(input, weight, stride, padding, extra, dilation, groups, state.resolved, precision)
            y = convolve(state, input, weight, bias, None, key, precision, state.precision is None)
        if y is None:
            y = conv_transpose2d(
                input, weight, bias, stride, padding, extra, groups, dilation, algorithm=state.algorithm,
                precision=state.precision, max_error=state.max_error, max_workspace=state.max_workspace,
            )  # fmt: skip
            if eager:
                last = ops.last_call()
                state.elsewhere = ("torch" if last is None else last["algorithm"], tuple(input.shape), ())
        return y

    def _key(self, x: Tensor, extra: Any) -> tuple[Settings, str]:
        """What the operators know a call by, with an output padding, and its accuracy class."""
        state, own = self._fastconv, self.__dict__
        stride, padding, dilation, groups = own["stride"], own["padding"], own["dilation"], own["groups"]
        key = (state.resolved, stride, padding, dilation, groups, "none", 0.0, state.limits, False, False, extra)
        return key, settings.resolve_precision(state.precision, x.is_cuda) if x.dtype is torch.float32 else "fp32"

    def _by_torch(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        own = self.__dict__
        geometry = own["stride"], own["padding"], own["output_padding"], own["groups"], own["dilation"]
        return _conv_transpose2d(x, weight, bias, *geometry)

    def _known_key(self, x: Tensor, epilogue: Epilogue) -> tuple[Settings, str] | None:
        own = self.__dict__
        extra: Any = own["output_padding"]
        if extra != (0, 0) and transposed.reason_for_torch(own["stride"], extra, own["dilation"]):
            return None
        return self._key(x, extra)
