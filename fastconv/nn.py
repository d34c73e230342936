"""The layer: a torch.nn.Conv2d that runs fastconv's algorithms and keeps their packed weights.

Packed weights are a cache that cannot be stale: every use first compares the weight with the snapshot that it was
packed from, on the device, and packs again the filters that differ (csrc/ops/layer.h). Nothing here relies on
noticing a change from the host, so in-place updates, `weight.data`, `load_state_dict`, optimisers, `functional_call`
and CUDA graphs that are replayed after an update are all covered by the same path.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.common_types import _size_2_t
from torch.nn.modules.utils import _pair

from fastconv import functional, ops, settings
from fastconv.epilogue import activate, conv2d_with_epilogue, explicit_padding
from fastconv.functional import conv2d
from fastconv.ops import autograd, plain
from fastconv.ops.geometry import Geometry
from fastconv.tensors import is_plain

__all__ = ["Conv2d", "FusedConv2d"]

# torch.fx records the convolution as one call instead of tracing into its argument checks.
torch.fx.wrap("conv2d")
torch.fx.wrap("conv2d_with_epilogue")

# Layers' states whose packed weights a captured CUDA graph reads: they live as long as the layer, as its parameters do.
_held_by_graphs: weakref.WeakKeyDictionary[nn.Module, list[LayerState]] = weakref.WeakKeyDictionary()

_Settings = tuple[Any, ...]  # algorithm, stride, padding, dilation, groups, activation, negative_slope, max_error


class LayerState:
    """What a fastconv layer has beside nn.Conv2d's attributes. A copy or a pickle of it carries the settings alone.

    Packed weights and choices are kept by the operators (`ops.layer_*`), under one number for each combination of
    attributes that the layer has been called with: nearly always one.
    """

    __slots__ = (
        "__weakref__", "algorithm", "elsewhere", "frozen", "latest", "layers", "lock", "max_error", "precision"
    )  # fmt: skip

    def __init__(
        self, algorithm: str = "auto", precision: str | None = None, max_error: float | None = None,
        frozen: bool = False,
    ) -> None:  # fmt: skip
        self.algorithm = algorithm
        self.precision = precision
        self.max_error = max_error
        self.frozen = frozen
        self.layers: dict[_Settings, int] = {}
        self.latest = 0  # the layer of the most recent call
        self.elsewhere: tuple[str, tuple[int, ...]] | None = None  # that call's algorithm and shape, if conv2d ran it
        self.lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return LayerState, (self.algorithm, self.precision, self.max_error, self.frozen)

    def __del__(self) -> None:
        for layer in self.layers.values():
            ops.layer_free(layer)

    def new_layer(self, key: _Settings) -> int:
        algorithm, stride, padding, dilation, groups, activation, slope, max_error = key
        with self.lock:
            if key not in self.layers:
                geometry = (*_pair(stride), *padding, *_pair(dilation), groups)
                self.layers[key] = ops.layer_new(algorithm, geometry, activation, slope, max_error)
            return self.layers[key]

    def pack(self, layer: int, weight: Tensor, groups: int, algorithm: str, precision: str, frozen: bool) -> None:
        """Packs a weight for the layer's next call."""
        # Ordinary tensors even inside inference_mode: they are written again outside of it.
        with self.lock, torch.inference_mode(False), torch.no_grad():
            # In the weight's own format, so that comparing the two converts neither.
            format = torch.contiguous_format if weight.is_contiguous() else ops.format_of(weight)
            snapshot = weight.clone(memory_format=format)
            packed = ops.pack_weight(snapshot, groups, algorithm, precision)
            if weight.is_cuda:
                # Once in a layer's life: after this, any stream may read without waiting for the one that packed.
                torch.cuda.current_stream(weight.device).synchronize()
            source = weight.data_ptr() if frozen else 0
            ops.layer_adopt(packed, snapshot, layer, algorithm, ops.PRECISIONS[precision], source)

    def admit_stream(self, layer: int) -> None:
        """Keeps the allocator from handing out packed memory while the current stream still reads it."""
        with self.lock:
            for tensor in ops.layer_packed(layer):
                if tensor.is_cuda:
                    tensor.record_stream(torch.cuda.current_stream(tensor.device))
            ops.layer_see_stream(layer)

    @property
    def packed(self) -> list[Tensor]:
        """Packed weights, without the snapshots that they were made from."""
        return [tensor for layer in list(self.layers.values()) for tensor in ops.layer_packed(layer)[::2]]

    def drop_packed(self, module: nn.Module) -> None:
        """Forgets the packed weights, save those that a captured CUDA graph will read again."""
        with self.lock:
            held = [ops.layer_forget(layer) for layer in self.layers.values()]
        if any(held) and not any(state is self for state in _held_by_graphs.get(module, [])):
            _held_by_graphs.setdefault(module, []).append(self)

    @property
    def last(self) -> tuple[str | None, tuple[int, ...] | None]:
        """Algorithm and input shape of the most recent eager call."""
        if self.elsewhere is not None:
            return self.elsewhere
        return ops.layer_last(self.latest) if self.latest else (None, None)

    @property
    def last_algorithm(self) -> str | None:
        return self.last[0]

    @property
    def last_input_shape(self) -> tuple[int, ...] | None:
        return self.last[1]


def _is_eager(*tensors: Tensor | None) -> bool:
    """Whether a call on these tensors computes, here and now: not traced, transformed, faked or overridden."""
    if torch.compiler.is_compiling():
        return False
    for tensor in tensors:
        if tensor is not None and not (is_plain(tensor) and (tensor.is_cuda or tensor.is_cpu)):
            return False
    return (
        torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._get_tracing_state() is None
        and forward_ad._current_level < 0
    )


def _needs_gradient(*tensors: Tensor | None) -> bool:
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def _autocast(tensor: Any, dtype: torch.dtype) -> Any:
    """What autocast makes of an argument of a convolution."""
    if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


def _run_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, key: _Settings, precision: str,
    memory_format: torch.memory_format,
) -> Tensor | None:  # fmt: skip
    """A layer's call by PyTorch's own convolution; None if its global switch asks for another class."""
    if not plain.is_of_class(x, precision):
        return None
    _, stride, padding, dilation, groups, activation, slope, _ = key
    y = F.conv2d(x, weight, bias, stride, padding, dilation, groups).contiguous(memory_format=memory_format)
    # In place: nobody else has y, and there is no gradient to record.
    if residual is not None:
        y.add_(residual)
    return y if activation == "none" else activate(y, activation, slope, inplace=True)


class _Convolution(torch.autograd.Function):
    """A layer's call with gradients: what `autograd.conv2d` registers, with less between autograd and the kernels."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, module: Conv2d, layer: int, key: _Settings,
        precision: str,
    ) -> Tensor | None:  # fmt: skip
        y = module._run(x, weight, bias, None, layer, key, precision)
        ctx.save_for_backward(x, weight)
        ctx.key, ctx.precision, ctx.layer = key, precision, layer
        ctx.state = module._fastconv  # which owns the layer
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        of_input, of_weight, of_bias, *_ = ctx.needs_input_grad
        dx = dw = db = None
        if not torch.is_grad_enabled():
            wanted = of_input * ops.WANTS_INPUT | of_weight * ops.WANTS_WEIGHT | of_bias * ops.WANTS_BIAS
            if plain.is_of_class(grad, ctx.precision):
                wanted |= ops.ADMITS_TORCH
            precision = ops.PRECISIONS[ctx.precision]
            dx, dw, db = ops.layer_gradients(grad, x, weight, ctx.layer, precision, wanted)
        of_input, of_weight, of_bias = of_input and dx is None, of_weight and dw is None, of_bias and db is None
        if of_input or of_weight or of_bias:
            algorithm, stride, padding, dilation, groups, _, _, max_error = ctx.key
            geometry = Geometry(_pair(stride), padding, _pair(dilation), groups)
            asked = (geometry, algorithm, ctx.precision, max_error)
            if of_input:
                dx = autograd.input_gradient_of(grad, weight, x.shape, *asked)
            if of_weight:
                dw = autograd.weight_gradient_of(x, grad, weight.shape, *asked)
            if of_bias:
                db = grad.sum((0, 2, 3))
        return dx, dw, db, None, None, None, None


class Conv2d(nn.Conv2d):
    """torch.nn.Conv2d on fastconv's algorithms: the same arguments, parameters, buffers and state_dict.

    Input `[N, C, H, W]` or `[C, H, W]`, output `[N, K, P, Q]` or `[K, P, Q]`; float32, float16, bfloat16 by fastconv's
    own algorithms, any other dtype by PyTorch's.

    Args:
        algorithm: "auto", or the registry name of the one algorithm to run (see `fastconv.algorithms()`).
        precision: None (follow PyTorch's switches), "ieee", "fp32" or "tf32": the class of float32 arithmetic.
        max_error: how far "auto" may go, as a multiple of PyTorch's own error (see `fastconv.conv2d`).
        others: as for torch.nn.Conv2d.

    Raises:
        TypeError, ValueError: an argument that is not one of these.
        fastconv.UnsupportedError: in forward, if a named algorithm cannot serve the input.

    In inference the weight is kept in the form that the algorithm reads ("packed"), and every use of that checks, on
    the device, that it still belongs to the weight. `last_algorithm` and `last_input_shape` tell what the most recent
    eager call ran.
    """

    _fastconv: LayerState
    _sums_in_place = False  # the residual is added as by `+=`, which keeps the dtype, not as by `+`

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: _size_2_t,
        stride: _size_2_t = 1,
        padding: str | _size_2_t = 0,
        dilation: _size_2_t = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
        device: Any = None,
        dtype: Any = None,
        *,
        algorithm: str = "auto",
        precision: str | None = None,
        max_error: float | None = None,
    ) -> None:
        check_settings(algorithm, precision, max_error)
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype
        )
        self._fastconv = LayerState(algorithm, precision, max_error)

    @property
    def algorithm(self) -> str:
        """The algorithm asked for: "auto" or a registry name."""
        return self._fastconv.algorithm

    @property
    def precision(self) -> str | None:
        """The precision asked for; None follows PyTorch's switches."""
        return self._fastconv.precision

    @property
    def max_error(self) -> float | None:
        """The limit asked for, a multiple of PyTorch's own error; None: the default."""
        return self._fastconv.max_error

    @property
    def last_algorithm(self) -> str | None:
        """What the most recent eager call ran; None before the first."""
        return self._fastconv.last_algorithm

    @property
    def last_input_shape(self) -> tuple[int, ...] | None:
        """The input's shape in that call."""
        return self._fastconv.last_input_shape

    def forward(self, input: Tensor) -> Tensor:
        """Convolves `input` `[N, C, H, W]` or `[C, H, W]`; errors as for torch.nn.Conv2d."""
        return self._convolve(input)

    def _convolve(
        self, input: Tensor, residual: Tensor | None = None, activation: str = "none", slope: float = 0.0
    ) -> Tensor:
        """activation(conv(input) + bias + residual)"""
        state, parameters = self._fastconv, self._parameters
        # nn.Module's __getattr__ takes longer than all else here; a parametrized weight is no parameter of the layer.
        weight: Any = parameters.get("weight")
        bias: Any = parameters.get("bias")
        if weight is None:
            weight = self.weight
        if bias is None:
            bias = self.bias
        x, padding = input, self.padding
        if self.padding_mode != "zeros":
            x, padding = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode), (0, 0)
        # A replica of DataParallel lives for one call; packing for it would cost more than it saves.
        if not _is_eager(x, weight, bias, residual) or "_is_replica" in self.__dict__:
            return self._plain(x, weight, bias, padding, residual, activation, slope)
        if type(padding) is not tuple:
            x, padding = explicit_padding(x, weight, padding, self.dilation)
        algorithm = state.algorithm
        if algorithm == "auto" or settings.disabled:
            algorithm = settings.auto_algorithm
        limit = settings.resolve_max_error(state.max_error, algorithm)
        key = (algorithm, self.stride, padding, self.dilation, self.groups, activation, slope, limit)
        layer = state.layers.get(key) or state.new_layer(key)
        precision = settings.resolve_precision(state.precision, x.is_cuda) if x.dtype is torch.float32 else "fp32"
        if settings.log_calls:
            self._log(x, padding, algorithm, precision, activation)
        if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight, bias, residual = (_autocast(tensor, dtype) for tensor in (x, weight, bias, residual))
        batch = x
        if x.dim() == 3:
            batch, residual = x.unsqueeze(0), None if residual is None else residual.unsqueeze(0)
        y = None
        if not _needs_gradient(x, weight, bias, residual):
            y = self._run(batch, weight, bias, residual, layer, key, precision)
        elif residual is None and activation == "none":
            y = _Convolution.apply(batch, weight, bias, self, layer, key, precision)
        if y is None:
            y = self._plain(input, weight, bias, self.padding, residual, activation, slope)
            last = ops.last_call()
            state.elsewhere = ("torch" if last is None else last["algorithm"], tuple(input.shape))
            return y
        return y if x.dim() == 4 else y.squeeze(0)

    def _run(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, layer: int, key: _Settings,
        precision: str,
    ) -> Tensor | None:  # fmt: skip
        """One call of the operators' layer on a batched input, without gradients; None if it is not for them."""
        state = self._fastconv
        state.latest, state.elsewhere = layer, None
        y = ops.layer_forward(x, weight, bias, residual, layer, ops.PRECISIONS[precision])
        while y is None:
            status = ops.layer_status()
            if status in (ops.STATUS_TORCH, ops.STATUS_TORCH_CHANNELS_LAST):
                format = torch.contiguous_format if status == ops.STATUS_TORCH else torch.channels_last
                return _run_torch(x, weight, bias, residual, key, precision, format)
            if status == ops.STATUS_STREAM:
                state.admit_stream(layer)
            elif status == ops.STATUS_PACK:
                frozen = state.frozen and weight is self.weight
                state.pack(layer, weight, self.groups, state.last_algorithm or "", precision, frozen)
            else:
                return None
            y = ops.layer_forward(x, weight, bias, residual, layer, ops.PRECISIONS[precision])
        return y

    def _log(self, x: Tensor, padding: Any, algorithm: str, precision: str, activation: str) -> None:
        geometry = Geometry(list(_pair(self.stride)), list(padding), list(_pair(self.dilation)), self.groups)
        functional._log(x, self.weight, geometry, algorithm, precision, activation)

    def _plain(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, padding: Any, residual: Tensor | None, activation: str,
        slope: float,
    ) -> Tensor:  # fmt: skip
        state = self._fastconv
        arguments = (x, weight, bias, self.stride, padding, self.dilation, self.groups)
        if residual is None and activation == "none":
            return conv2d(*arguments, algorithm=state.algorithm, precision=state.precision, max_error=state.max_error)
        return conv2d_with_epilogue(
            *arguments, residual, activation, slope, self._sums_in_place, state.algorithm, state.precision,
            state.max_error,
        )  # fmt: skip

    def __prepare_scriptable__(self) -> None:
        """What torch.jit.script asks every module first."""
        raise ops.UnsupportedError(
            f"torch.jit.script cannot compile fastconv.{type(self).__name__}: undo() the swap first (of a fused model: "
            "script the model that it was made from), or use torch.compile or torch.export"
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._fastconv.drop_packed(self)
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        state = self._fastconv
        text = super().extra_repr()
        if state.algorithm != "auto":
            text += f", algorithm={state.algorithm}"
        if state.precision is not None:
            text += f", precision={state.precision}"
        if state.max_error is not None:
            text += f", max_error={state.max_error:g}"
        return text


class FusedConv2d(Conv2d):
    """A `Conv2d` that computes ``activation(conv(input) + bias + residual)`` in one pass over its output.

    Args:
        activation: None, "relu", "relu6", "silu" or "leaky_relu" (with `negative_slope`).
        others: as for fastconv.Conv2d.

    Raises:
        ValueError: an unknown activation. The others as fastconv.Conv2d.

    `fastconv.fuse` makes them out of a convolution and what follows it.
    """

    def __init__(self, *args: Any, activation: str | None = None, negative_slope: float = 0.01, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings.resolve_activation(activation)
        self.activation = activation
        self.negative_slope = float(negative_slope)

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """`residual` is what `+` takes: of the output's shape and dtype it is added inside the convolution; of another
        that `+` admits (broadcast or promoted) by PyTorch."""
        return self._convolve(input, residual, self.activation or "none", self.negative_slope)

    def extra_repr(self) -> str:
        text = super().extra_repr()
        if self.activation is not None:
            text += f", activation={self.activation}"
        if self.activation == "leaky_relu":
            text += f", negative_slope={self.negative_slope}"
        return text


def check_settings(algorithm: str, precision: str | None, max_error: float | None = None) -> None:
    """TypeError or ValueError if these are not an algorithm of the registry, or "auto", a precision and a limit."""
    settings.check_max_error(max_error)
    if not isinstance(algorithm, str):
        raise TypeError(f"algorithm is {algorithm!r}; expected a string")
    if algorithm not in functional.ALGORITHMS:
        raise ValueError(f"algorithm is '{algorithm}'; expected one of {', '.join(functional.ALGORITHMS)}")
    if precision is not None and not isinstance(precision, str):
        raise TypeError(f"precision is {precision!r}; expected None or a string")
    if precision is not None and precision not in settings.PRECISIONS:
        raise ValueError(f"precision is '{precision}'; expected None or one of {', '.join(settings.PRECISIONS)}")
