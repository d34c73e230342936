"""The layer: a torch.nn.Conv2d that runs fastconv's algorithms and keeps their packed weights.

Packed weights are a cache that cannot be stale: every use first compares the weight with the snapshot that it was
packed from, on the device, and packs again the filters that differ (`conv2d_refreshed`). Nothing here relies on
noticing a change from the host, so in-place updates, `weight.data`, `load_state_dict`, optimisers, `functional_call`
and CUDA graphs that are replayed after an update are all covered by the same path.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.common_types import _size_2_t
from torch.nn.modules.utils import _pair

from fastconv import _C, functional, ops, settings
from fastconv.epilogue import activate, conv2d_with_epilogue, explicit_padding
from fastconv.functional import conv2d

__all__ = ["Conv2d", "FusedConv2d"]

# torch.fx records the convolution as one call instead of tracing into its argument checks.
torch.fx.wrap("conv2d")
torch.fx.wrap("conv2d_with_epilogue")

_CHOICES_KEPT = 64  # input shapes whose choice a layer remembers; beyond that it forgets all and starts again

# Packed weights whose addresses a captured CUDA graph holds: they live as long as the layer, as its parameters do.
_held_by_graphs: weakref.WeakKeyDictionary[nn.Module, list[_Packed]] = weakref.WeakKeyDictionary()


class _Choice(NamedTuple):
    algorithm: str
    packed_bytes: int = 0  # 0: the algorithm reads the plain weight
    memory_format: torch.memory_format = torch.contiguous_format  # of the output
    is_planned: bool = True  # else conv2d chose, and only its name is known


class _Packed:
    """A weight as one algorithm reads it, and the plain weight that it was packed from."""

    __slots__ = ("bytes", "in_graph", "snapshot", "streams")

    def __init__(self, weight: Tensor, groups: int, algorithm: str, precision: str) -> None:
        # Ordinary tensors even inside inference_mode: they are written again outside of it.
        with torch.inference_mode(False), torch.no_grad():
            # In the weight's own format, so that comparing the two converts neither.
            format = torch.contiguous_format if weight.is_contiguous() else ops.format_of(weight)
            self.snapshot = weight.clone(memory_format=format)
            self.bytes = ops.pack_weight(self.snapshot, groups, algorithm, precision)
        self.in_graph = False
        self.streams: set[int] = set()
        if weight.is_cuda:
            # Once in a layer's life: after this, any stream may use the entry without waiting for the one that made it.
            stream = torch.cuda.current_stream(weight.device)
            stream.synchronize()
            self.streams.add(stream.cuda_stream)

    def used_by_current_stream(self) -> None:
        """Keeps the allocator from handing out this memory while another stream than its own still reads it."""
        device = self.bytes.device
        number = torch._C._cuda_getCurrentRawStream(device.index)
        if number not in self.streams:
            self.streams.add(number)
            stream = torch.cuda.current_stream(device)
            self.bytes.record_stream(stream)
            self.snapshot.record_stream(stream)


class LayerState:
    """What a fastconv layer has beside nn.Conv2d's attributes. A copy or a pickle of it carries the settings alone."""

    __slots__ = (
        "__weakref__",
        "algorithm",
        "choices",
        "last_algorithm",
        "last_input_shape",
        "lock",
        "max_error",
        "packed",
        "precision",
    )

    def __init__(self, algorithm: str = "auto", precision: str | None = None, max_error: float | None = None) -> None:
        self.algorithm = algorithm
        self.precision = precision
        self.max_error = max_error
        self.last_algorithm: str | None = None
        self.last_input_shape: tuple[int, ...] | None = None
        self.choices: dict[tuple[Any, ...], _Choice] = {}
        self.packed: dict[tuple[Any, ...], _Packed] = {}
        self.lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return LayerState, (self.algorithm, self.precision, self.max_error)

    def remember(self, key: tuple[Any, ...], choice: _Choice) -> None:
        if len(self.choices) >= _CHOICES_KEPT:
            self.choices.clear()
        self.choices[key] = choice

    def packed_for(
        self, layer: nn.Module, weight: Tensor, groups: int, algorithm: str, precision: str
    ) -> _Packed | None:
        """The cache's entry, made if there is none; None while a CUDA graph is captured that has none to start from.

        A packing made during the capture would hold nothing until the first replay, and belong to the graph's memory.
        """
        like = (weight.shape, groups, weight.dtype, weight.device)
        key = (algorithm, precision, *like)
        capturing = weight.is_cuda and _is_capturing(weight.device)
        with self.lock:
            entry = self.packed.get(key)
            if entry is None:
                if capturing:
                    return None
                self._drop(layer, [other for other in self.packed if other[2:] != like])
                entry = self.packed[key] = _Packed(weight, groups, algorithm, precision)
            elif weight.is_cuda:
                entry.used_by_current_stream()
                entry.in_graph |= capturing
            return entry

    def drop_packed(self, layer: nn.Module) -> None:
        """Forgets the packed weights, save those that a captured CUDA graph will read again."""
        with self.lock:
            self._drop(layer, list(self.packed))

    def _drop(self, layer: nn.Module, keys: list[tuple[Any, ...]]) -> None:
        dropped = [self.packed.pop(key) for key in keys]
        held = [entry for entry in dropped if entry.in_graph]
        if held:
            _held_by_graphs.setdefault(layer, []).extend(held)


def _is_capturing(device: torch.device) -> bool:
    if device.index == torch._C._cuda_getDevice():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _is_eager(*tensors: Tensor | None) -> bool:
    """Whether a call on these tensors computes, here and now: not traced, transformed, faked or overridden."""
    if torch.compiler.is_compiling():
        return False
    for tensor in tensors:
        if tensor is not None and not (ops.transforms.is_plain(tensor) and (tensor.is_cuda or tensor.is_cpu)):
            return False
    return (
        torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._get_tracing_state() is None
        and forward_ad._current_level < 0
    )


def _needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


class Conv2d(nn.Conv2d):
    """torch.nn.Conv2d on fastconv's algorithms: the same arguments, parameters, buffers and state_dict.

    Input `[N, C, H, W]` or `[C, H, W]`, output `[N, K, P, Q]` or `[K, P, Q]`; float32, float16, bfloat16 by fastconv's
    own algorithms, any other dtype by PyTorch's.

    Args:
        algorithm: "auto", or the registry name of the one algorithm to run (see `fastconv.algorithms()`).
        precision: None (follow PyTorch's switches), "ieee", "fp32" or "tf32": the class of float32 arithmetic.
        max_error: how far "auto" may go, as a multiple of PyTorch's own error (see `fastconv.conv2d`).
        The others: as for torch.nn.Conv2d.

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
        shape = self._fastconv.last_input_shape
        return None if shape is None else tuple(shape)

    def forward(self, input: Tensor) -> Tensor:
        """Convolves `input` `[N, C, H, W]` or `[C, H, W]`; errors as for torch.nn.Conv2d."""
        return self._convolve(input)

    def _convolve(
        self, input: Tensor, residual: Tensor | None = None, activation: str = "none", slope: float = 0.0
    ) -> Tensor:
        """activation(conv(input) + bias + residual)"""
        weight, bias, state = self.weight, self.bias, self._fastconv
        padding: Any = self.padding
        x = input
        if self.padding_mode != "zeros":
            x = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = (0, 0)
        if not _is_eager(x, weight, bias, residual):
            return self._plain(x, weight, bias, padding, residual, activation, slope)
        x, padding = explicit_padding(x, weight, padding, self.dilation)
        algorithm = settings.auto_algorithm if state.algorithm == "auto" or settings.disabled else state.algorithm
        limit = settings.resolve_max_error(state.max_error, algorithm)
        # Of another dtype the dtype itself is the class.
        precision = settings.resolve_precision(state.precision, x.is_cuda) if x.dtype is torch.float32 else "fp32"
        autocast = torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type)
        key = (
            x.shape, x.stride(), x.dtype, x.get_device(), weight.shape, weight.stride(), weight.dtype,
            weight.get_device(), bias is None, self.stride, padding, self.dilation, self.groups, algorithm, precision,
            limit, torch.get_autocast_dtype(x.device.type) if autocast else None,
            None if residual is None else (residual.shape, residual.dtype, residual.get_device()),
            ops.measured_generation,
        )  # fmt: skip
        choice = state.choices.get(key)
        if choice is None and not autocast:
            choice = self._choose(x, padding, algorithm, precision, limit, residual, activation)
            if choice is not None:
                state.remember(key, choice)
        y = None
        if choice is not None:
            y = self._run_directly(x, weight, bias, padding, choice, precision, residual, activation, slope)
        if y is None:
            y = self._plain(x, weight, bias, padding, residual, activation, slope)
        if choice is None:
            call = ops.last_call()
            choice = _Choice(call["algorithm"] if call is not None else "torch", is_planned=False)
            state.remember(key, choice)
        state.last_algorithm, state.last_input_shape = choice.algorithm, input.shape
        return y

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

    def _choose(
        self, x: Tensor, padding: Any, algorithm: str, precision: str, max_error: float | None,
        residual: Tensor | None, activation: str,
    ) -> _Choice | None:  # fmt: skip
        """What conv2d would run; None where only conv2d can tell, by running or by raising."""
        weight, bias = self.weight, self.bias
        others = [t for t in (weight, bias, residual) if t is not None]
        if x.dim() not in (3, 4) or any(t.dtype != x.dtype or t.device != x.device for t in others):
            return None
        batch = x if x.dim() == 4 else x.unsqueeze(0)
        if weight.dim() != 4 or batch.size(1) != weight.size(1) * self.groups:
            return None
        if bias is not None and bias.shape != weight.shape[:1]:
            return None
        n, c, h, w = batch.shape
        k, _, r, s = weight.shape
        layout = "nhwc" if ops.format_of(batch, weight) == torch.channels_last else "nchw"
        try:
            problem = _C.ConvProblem(
                n=n, c=c, h=h, w=w, k=k, r=r, s=s, stride=_pair(self.stride), padding=padding,
                dilation=_pair(self.dilation), groups=self.groups, dtype=ops.dtype_name(x.dtype), precision=precision,
                layout=layout, bias=bias is not None, residual=residual is not None, activation=activation,
                max_error=max_error,
            )  # fmt: skip
            if residual is not None and residual.shape != (*batch.shape[: x.dim() - 3], k, problem.p, problem.q):
                return None
            row = _C.choose(algorithm, problem, ops.device_info(x.device))
        except (TypeError, ValueError, RuntimeError):
            return None
        return _Choice(row["algorithm"], row["packed_bytes"], ops.format_of(batch, weight))

    def _run_directly(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, padding: Any, choice: _Choice, precision: str,
        residual: Tensor | None, activation: str, slope: float,
    ) -> Tensor | None:  # fmt: skip
        """Runs the choice without conv2d's way through checks and dispatcher; None where that is needed: for gradients,
        autocast, a named algorithm that reads the plain weight, replicas, a graph before any use."""
        if _needs_gradient(x, weight, bias, residual):
            return None
        if choice.algorithm == "torch":
            return self._run_torch(x, weight, bias, padding, choice, precision, residual, activation, slope)
        # A replica of DataParallel lives for one call; packing for it would cost more than it saves.
        if choice.packed_bytes == 0 or getattr(self, "_is_replica", False):
            return None
        batch = x
        if x.dim() == 3:
            batch, residual = x.unsqueeze(0), None if residual is None else residual.unsqueeze(0)
        geometry = (*_pair(self.stride), *padding, *_pair(self.dilation), self.groups)
        # There is no gradient to record: below autograd a call takes two thirds of the time.
        with torch._C._AutoDispatchBelowAutograd():
            entry = self._fastconv.packed_for(self, weight, self.groups, choice.algorithm, precision)
            if entry is None:
                return None
            if settings.log_calls:
                self._log(batch, padding, choice, precision, activation)
            y = ops.conv2d_refreshed(
                batch, weight, entry.bytes, entry.snapshot, bias, residual, geometry, choice.algorithm, precision,
                activation, slope,
            )  # fmt: skip
        return y if x.dim() == 4 else y.squeeze(0)

    def _run_torch(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, padding: Any, choice: _Choice, precision: str,
        residual: Tensor | None, activation: str, slope: float,
    ) -> Tensor | None:  # fmt: skip
        if not choice.is_planned or not ops.torch_agrees(x, precision):
            return None
        if settings.log_calls:
            self._log(x, padding, choice, precision, activation)
        y = F.conv2d(x, weight, bias, self.stride, padding, self.dilation, self.groups)
        if x.dim() == 4:
            y = y.contiguous(memory_format=choice.memory_format)
        # In place: nobody else has y, and there is no gradient to record.
        if residual is not None:
            y.add_(residual)
        return y if activation == "none" else activate(y, activation, slope, inplace=True)

    def _log(self, x: Tensor, padding: Any, choice: _Choice, precision: str, activation: str) -> None:
        functional._log(
            x, self.weight, list(_pair(self.stride)), list(padding), list(_pair(self.dilation)), self.groups,
            choice.algorithm, precision, activation,
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
        The others: as for fastconv.Conv2d.

    Raises:
        As fastconv.Conv2d; ValueError for an unknown activation.

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
