"""A layer's eager call: what is kept between calls (`LayerState`), and the way to the operators that keep it.

Packed weights are a cache that cannot be stale: every use first compares the weight with the snapshot that it was
packed from, on the device, and packs again the filters that differ (csrc/ops/layer.h). Nothing here relies on
noticing a change from the host, so in-place updates, `weight.data`, `load_state_dict`, optimisers, `functional_call`
and CUDA graphs that are replayed after an update are all covered by the same path. A frozen weight, which the caller
promises not to change, is compared once.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from fastconv import failures, once, ops, settings
from fastconv.ops import plain, pooling
from fastconv.ops.autocast import cast
from fastconv.ops.geometry import integer, pair
from fastconv.tensors import PLAIN

# Layers' states whose packed weights a captured CUDA graph reads: they live as long as the layer, as its parameters do.
_held_by_graphs: weakref.WeakKeyDictionary[nn.Module, list[LayerState]] = weakref.WeakKeyDictionary()

# What every call asks, by names that are found at once.
_is_compiling = torch.compiler.is_compiling
_searches = torch._C._get_cudnn_benchmark
_transforms = torch._C._functorch.peek_interpreter_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_tracing_state = torch._C._get_tracing_state

# What is known of a call that trains its weight: what autograd's record takes, or None of one that is PyTorch's
# altogether; the layer's `latest` after it; and of PyTorch's its kind (`LayerState.last_kind`).
TrainedCall = tuple[int | None, tuple["Settings | None", int], tuple[str, ...]]

# What is known of a call of which nothing is recorded: what was asked (`Layer._inferred`), layer and mode for the
# operator, key, precision and the layer's `latest` after it.
InferredCall = tuple[tuple[Any, ...], int, int, "Settings", str, tuple["Settings | None", int]]

# algorithm, stride, padding, dilation, groups, activation, negative_slope, limits, residual_after, max_pool,
# output_padding of a transposed convolution or None
Settings = tuple[Any, ...]


_MOST_KEPT = 256  # calls of a layer that train: programs may see ever new shapes


def is_constant(value: Any) -> bool:
    """Whether the object always has that value."""
    if type(value) is tuple:
        return all(type(element) is int for element in value)
    return value is None or type(value) in (int, float, str)


def _geometry(key: Settings) -> tuple[int, ...]:
    """Stride, padding and dilation, each of height and width, and groups."""
    _, stride, padding, dilation, groups, *_ = key
    pairs = pair("stride", stride), pair("padding", padding), pair("dilation", dilation)
    return (*(size for each in pairs for size in each), integer("groups", groups))


class LayerState:
    """What a fastconv layer has beside nn.Conv2d's attributes. A copy or a pickle of it carries the settings alone.

    Packed weights and choices are kept by the operators (`ops.layer_*`), under one number for each combination of
    attributes that the layer has been called with: nearly always one.
    """

    __slots__ = (
        "__weakref__", "algorithm", "calls", "checked", "elsewhere", "frozen", "inferred", "latest", "layers", "limits",
        "lock", "max_error", "max_workspace", "precision", "resolved", "text", "trained",
    )  # fmt: skip

    def __init__(
        self, algorithm: str = "auto", precision: str | None = None, max_error: float | None = None,
        frozen: bool = False, max_workspace: int | None = None,
    ) -> None:  # fmt: skip
        self.algorithm = algorithm
        self.precision = precision
        self.max_error = max_error
        self.max_workspace = max_workspace
        self.frozen = frozen
        # What the operators get for them: the environment's settings do not change.
        self.resolved = settings.resolve_algorithm(algorithm)
        self.limits = settings.resolve_limits(max_error, max_workspace, self.resolved)
        self.text = f"{self.resolved} {precision} {self.limits.max_error} {self.limits.max_workspace}"
        self.layers: dict[Settings, int] = {}
        self.calls: dict[tuple[int, int], int] = {}  # by layer and mode: what autograd's record takes
        self.latest: tuple[Settings | None, int] = None, 0  # of the most recent call
        self.checked: tuple[tuple[Any, ...], Settings] | None = None  # what conv2d was asked for last, and its key
        # Algorithm and shape of the most recent call, if it was not the layer's but conv2d's, or PyTorch's altogether;
        # and the kind of the latter.
        self.elsewhere: tuple[str, tuple[int, ...], tuple[str, ...]] | None = None
        self.trained: dict[tuple[Any, ...], TrainedCall] = {}  # by what is asked of a call that trains
        self.inferred: InferredCall | None = None  # the last one
        self.lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return LayerState, (self.algorithm, self.precision, self.max_error, self.frozen, self.max_workspace)

    def __del__(self) -> None:
        for layer in self.layers.values():
            ops.layer_free(layer)

    def layer_of(self, key: Settings) -> int:
        """The layer of a call, which is the most recent one from now on."""
        known, layer = self.latest
        if key != known:
            layer = self.layers.get(key) or self.new_layer(key)
            self.latest = key, layer
        self.elsewhere = None
        return layer

    def keep_call(self, asked: tuple[Any, ...], key: Settings) -> None:
        """For `known_call`, which compares objects: what could change its value is not kept."""
        if all(is_constant(value) for value in asked):
            self.checked = asked, key

    def keep_trained(self, asked: tuple[Any, ...], call: TrainedCall) -> None:
        if len(self.trained) == _MOST_KEPT:
            self.trained = {}
        self.trained[asked] = call

    def new_layer(self, key: Settings) -> int:
        algorithm, *_, activation, slope, limits, after, max_pool, extra = key
        with self.lock:
            if key not in self.layers:
                extra = None if extra is None else pair("output_padding", extra)
                arguments = (algorithm, _geometry(key), activation, slope, limits, after, max_pool, extra)
                self.layers[key] = ops.layer_new(*arguments)
            return self.layers[key]

    def new_call(self, layer: int, mode: int) -> int:
        call = self.calls[layer, mode] = ops.layer_call(layer, mode)
        return call

    def pack(self, layer: int, weight: Tensor, groups: int, algorithm: str, precision: str) -> None:
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
            ops.layer_adopt(packed, snapshot, layer, algorithm, ops.PRECISIONS[precision])

    def refresh(self, weight: Tensor) -> None:
        """Packs again, in the same memory, what was packed of a weight like this one."""
        with self.lock, torch.no_grad():
            for layer in self.layers.values():
                ops.layer_refresh(weight, layer)
            if weight.is_cuda and not torch.cuda.is_current_stream_capturing():
                torch.cuda.current_stream(weight.device).synchronize()  # other streams read it without waiting

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
            self.trained = {}  # found of parameters as they were
            held = [ops.layer_forget(layer) for layer in self.layers.values()]
        if any(held) and not any(state is self for state in _held_by_graphs.get(module, [])):
            _held_by_graphs.setdefault(module, []).append(self)

    @property
    def last(self) -> tuple[str | None, tuple[int, ...] | None]:
        """Algorithm and input shape of the most recent eager call."""
        if self.elsewhere is not None:
            return self.elsewhere[:2]
        layer = self.latest[1]
        return ops.layer_last(layer)[:2] if layer else (None, None)

    @property
    def last_kind(self) -> tuple[str, ...]:
        """Layout, dtype and class of that call; empty before it, and where the general operator ran."""
        if self.elsewhere is not None:
            return self.elsewhere[2]
        layer = self.latest[1]
        return ops.layer_last(layer)[2] if layer else ()

    @property
    def is_left_to_torch(self) -> bool:
        """Whether that call, and so its gradients, was PyTorch's altogether."""
        return self.elsewhere is not None and self.elsewhere[2] != ()

    @property
    def last_algorithm(self) -> str | None:
        return self.last[0]

    @property
    def last_input_shape(self) -> tuple[int, ...] | None:
        return self.last[1]


def is_eager(*tensors: Tensor | None) -> bool:
    """Whether a call on these tensors, the first of which there has to be, computes, here and now: not traced,
    transformed, faked or overridden."""
    if tensors[0] is None or _is_compiling():
        return False
    for tensor in tensors:
        if tensor is not None and not (type(tensor) in PLAIN and (tensor.is_cuda or tensor.is_cpu)):
            return False
    return (
        _transforms() is None and _dispatch_modes() == 0 and _tracing_state() is None and forward_ad._current_level < 0
    )


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd will record what is computed of these tensors."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def _run_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, key: Settings, out: Tensor | None
) -> Tensor | None:  # fmt: skip
    """A call of a layer with an epilogue by PyTorch's own convolution, if that is what the operators left to Python;
    into `out`, where that is given."""
    status = ops.layer_status()
    if status not in (ops.STATUS_TORCH, ops.STATUS_TORCH_CHANNELS_LAST):
        return None
    memory_format = torch.contiguous_format if status == ops.STATUS_TORCH else torch.channels_last
    _, stride, padding, dilation, groups, activation, slope, _, after, max_pool, _ = key
    y = F.conv2d(x, weight, bias, stride, padding, dilation, groups).contiguous(memory_format=memory_format)
    # In place: nobody else has y, and there is no gradient to record.
    if residual is not None and not after:
        y.add_(residual)
    if activation != "none":
        y = plain.activate(y, activation, slope, inplace=True)
    if residual is not None and after:
        y.add_(residual)
    if max_pool:
        y = pooling.max_pool2d(y, *pooling.TWO_BY_TWO)
    return y if out is None else out.copy_(y)


def _prepared(state: LayerState, layer: int, weight: Tensor, groups: int, precision: str) -> bool:
    """Does what the operators left to Python at a layer's call, for the next one; whether there was something."""
    status = ops.layer_status()
    if status == ops.STATUS_STREAM:
        state.admit_stream(layer)
    elif status == ops.STATUS_PACK:
        # Of this thread's call: the layer's latest may be another's, which chose otherwise.
        chosen: dict[str, Any] = ops.last_call() or {}
        state.pack(layer, weight, groups, chosen["algorithm"], precision)
    else:
        return False
    return True


def _complete(
    state: LayerState, key: Settings, precision: str, forward: Callable[..., Tensor | None], arguments: tuple[Any, ...],
    out: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """What a call of a layer's operator has left to Python, and that call again; None if neither is for here."""
    x, weight, bias, residual, *_, layer, mode = arguments
    if ops.layer_status() == ops.STATUS_MEASURE:
        once.measure(x, weight, bias, residual, key, precision)
        y = forward(*(arguments := (*arguments[:-1], mode & ~ops.MEASURED)))
        if y is not None:
            return y
    while _prepared(state, layer, weight, key[4], precision):
        y = forward(*arguments)
        if y is not None:
            return y
    return _run_torch(x, weight, bias, residual, key, out) if mode & ops.ADMITS_TORCH else None


def mode_of(state: LayerState, x: Tensor, weight: Tensor, precision: str, follows: bool = False) -> int:
    """A call's mode for the operators, save that it trains. follows: precision is known to be what PyTorch's switch
    says."""
    mode = ops.PRECISIONS[precision]
    if state.frozen and not weight.requires_grad:
        mode |= ops.FROZEN
    if follows or plain.is_of_class(x, precision):
        mode |= ops.ADMITS_TORCH
    if once.is_wanted(x):
        mode |= ops.MEASURED
    return mode


def _measured(
    mode: int, x: Tensor, weight: Tensor, bias: Tensor | None, key: Settings, precision: str, passes: Sequence[str]
) -> int:
    """The mode of a call that autograd records, so that it cannot be repeated: what is to be measured is, first."""
    if mode & ops.MEASURED:
        once.measure(x, weight, bias, None, key, precision, passes)
    return mode & ~ops.MEASURED


def infer(state: LayerState, key: Settings, precision: str, *arguments: Any) -> Tensor | None:
    """A call of `ops.layer_forward`, of which nothing is recorded, with what it leaves to Python; None if the general
    operator has to do it. Raises UnseenError for the same reason."""
    y = ops.layer_forward(*arguments)
    return _complete(state, key, precision, ops.layer_forward, arguments) if y is None else y


def convolve(
    state: LayerState, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, key: Settings,
    precision: str, follows: bool = False,
) -> Tensor | None:  # fmt: skip
    """activation(conv(input) + bias + residual), or the residual or a max-pool behind the activation, or a transposed
    convolution, of eager tensors (`is_eager`), batched or not; None if the general operator has to do it. follows:
    precision is known to be what PyTorch's switch says."""
    layer = state.layer_of(key)
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(device := "cuda" if x.is_cuda else "cpu"):
        x, weight, bias, residual = cast(device, x, weight, bias, residual)
    is_batched = x.dim() != 3
    if not is_batched:
        x, residual = x.unsqueeze(0), None if residual is None else residual.unsqueeze(0)
    trained = weight.requires_grad
    mode = mode_of(state, x, weight, precision, follows)
    y: Tensor | None
    try:
        if not (torch.is_grad_enabled() and (trained or needs_gradient(x, bias, residual))):
            y = infer(state, key, precision, x, weight, bias, residual, layer, mode)
        elif residual is None and key[5] == "none" and not key[9]:
            passes = once.passes_of(x) if trained else ("forward",)
            mode = _measured(mode, x, weight, bias, key, precision, passes)
            if trained:
                mode |= ops.TRAINED
            call = state.calls.get((layer, mode)) or state.new_call(layer, mode)
            y = ops.recorded_convolution(x, weight, bias, call)
            if not trained:
                _prepared(state, layer, weight, key[4], precision)
        else:
            return None
    except failures.UnseenError:
        return None
    return y if is_batched or y is None else y.squeeze(0)


def autocast_type(x: Tensor) -> torch.dtype | None:
    """The type that autocast gives a convolution of `x`, if it is on."""
    device = "cuda" if x.is_cuda else "cpu"
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def switches_of(x: Tensor) -> tuple[torch.dtype | None, str | None]:
    """What decides in which type or class a convolution of float32 computes: autocast, or else PyTorch's switch."""
    lower = autocast_type(x) if torch._C._is_any_autocast_enabled() else None
    return lower, settings.cuda_precision() if lower is None and x.is_cuda else None


def trained_call(
    state: LayerState, x: Tensor, weight: Tensor, bias: Tensor | None, key: Settings, precision: str
) -> TrainedCall | None:
    """What is to be known of calls like this one, of eager tensors, which trains the weight; None if `convolve` has to
    see each."""
    tensors: Any = x, weight, bias
    if autocast_type(x) is not None:
        with torch.no_grad():
            tensors = cast("cuda" if x.is_cuda else "cpu", *tensors)
    if any(tensor is not None and ops.dtype_name(tensor.dtype) == "other" for tensor in tensors):
        return None
    layer, mode = state.layer_of(key), mode_of(state, x, weight, precision)
    mode = _measured(mode, tensors[0], tensors[1], tensors[2], key, precision, once.passes_of(x)) | ops.TRAINED
    names_own = key[0] not in ("auto", "torch")
    if not names_own and ops.layer_left_to_torch(*tensors, layer, mode, x.requires_grad):
        layout = "nhwc" if ops.format_of(x, weight) == torch.channels_last else "nchw"
        return None, state.latest, (layout, ops.dtype_name(tensors[0].dtype), precision)
    return state.calls.get((layer, mode)) or state.new_call(layer, mode), state.latest, ()


def convolve_trained(
    state: LayerState, x: Tensor, weight: Tensor, bias: Tensor | None, key: Settings, precision: str
) -> Tensor | None:
    """A call of `conv2d` that trains the weight, batched and with nothing behind the convolution, by what is kept of
    another; None if it is `convolve`'s."""
    asked = key, precision, x.shape, x.dtype, x.requires_grad, ops.measured_generation, switches_of(x), _searches()
    known = state.trained.get(asked)
    if known is None:
        known = trained_call(state, x, weight, bias, key, precision)
        if known is None:
            return None
        state.keep_trained(asked, known)
    call, latest, kind = known
    if call is None:
        state.elsewhere = "torch", asked[2], kind
        ops.record_torch(autocast_type(x) or x.dtype, precision)
        y = F.conv2d(x, weight, bias, *key[1:5])
        format = ops.format_of(x, weight)
        return y if y.is_contiguous(memory_format=format) else y.contiguous(memory_format=format)
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(device := "cuda" if x.is_cuda else "cpu"):
        x, weight, bias = cast(device, x, weight, bias)
    state.latest, state.elsewhere = latest, None
    try:
        return ops.recorded_convolution(x, weight, bias, call)
    except failures.UnseenError:
        return None


def convolve_around(
    state: LayerState, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
    around: tuple[Tensor | None, Tensor | None, Tensor | None, str], key: Settings, precision: str,
) -> Tensor | None:  # fmt: skip
    """`convolve` without gradients, of batched tensors without autocast. `around`: the output that is written, scale
    and shift of an affine input, which has no residual, and the activation behind these (`ops.layer_forward_around`).
    None if the general operator has to do it, or a norm apart."""
    layer, mode = state.layer_of(key), mode_of(state, x, weight, precision)
    arguments = x, weight, bias, residual, *around, layer, mode
    try:
        y = ops.layer_forward_around(*arguments)
        return _complete(state, key, precision, ops.layer_forward_around, arguments, around[0]) if y is None else y
    except failures.UnseenError:
        return None


# The states of weights that `fastconv.conv2d` has been called with, by their identity. A weight that is gone takes its
# state along; one that is seen for the first time, and may be the last, has none.
_seen: dict[int, tuple[weakref.ref[Tensor], LayerState | None]] = {}


def state_of(weight: Tensor) -> LayerState | None:
    """What is kept for a weight of `fastconv.conv2d`; None at the first call with it."""
    key = id(weight)
    found, state = _seen.get(key, (None, None))
    if found is None or found() is not weight:
        _seen[key] = weakref.ref(weight, lambda reference: _forget(key, reference)), None
        return None
    if state is None:
        state = LayerState()
        _seen[key] = found, state
    return state


def known_call(weight: Tensor, asked: tuple[Any, ...]) -> tuple[LayerState, Settings] | None:
    """State and key of a call of `fastconv.conv2d`, if the arguments are, object for object, those of the last one with
    this weight."""
    found, state = _seen.get(id(weight), (None, None))
    if state is None or state.checked is None or found is None or found() is not weight:
        return None
    before, key = state.checked
    return (state, key) if all(map(operator.is_, before, asked)) else None


def _forget(key: int, reference: weakref.ref[Tensor]) -> None:
    if _seen.get(key, (None, None))[0] is reference:
        del _seen[key]
