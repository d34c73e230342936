"""What the layers have in common, whatever they compute: settings, and what is known of their calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from fastconv import failures, ops, settings
from fastconv.eager import (
    InferredCall,
    LayerState,
    Settings,
    TrainedCall,
    autocast_type,
    infer,
    is_constant,
    is_eager,
    mode_of,
    needs_gradient,
    switches_of,
    trained_call,
)

Epilogue = tuple[str, float, bool, bool]  # activation, slope, whether the residual is added behind it, max-pool
BARE: Epilogue = ("none", 0.0, False, False)

# What every call asks, by names that are found at once.
_Parameter = nn.Parameter
_float32 = torch.float32
_records = torch.is_grad_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_tracing_state = torch._C._get_tracing_state
_is_transformed = torch._C._are_functorch_transforms_active
_is_autocast = torch._C._is_any_autocast_enabled
_searches = torch._C._get_cudnn_benchmark
_casts = {torch.float16: Tensor.half, torch.bfloat16: Tensor.bfloat16}  # half the way of `to`


def _lowered(
    lower: torch.dtype | None, x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """What autocast makes of them; None if that takes `cast`."""
    if lower is None:
        return x, weight, bias
    to_lower = _casts.get(lower)
    if to_lower is None or x.dtype not in (lower, _float32):
        return None
    return x if x.dtype is lower else to_lower(x), to_lower(weight), None if bias is None else to_lower(bias)


class Layer(nn.Module):
    """A layer of PyTorch's with `_fastconv`, its `LayerState`. A class derived from this and then from PyTorch's."""

    _fastconv: LayerState

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
    def max_workspace(self) -> int | None:
        """The limit asked for, in bytes; None: any."""
        return self._fastconv.max_workspace

    @property
    def frozen(self) -> bool:
        """Whether the weight, as long as it requires no gradient, is taken not to change: see `fastconv.swap_`."""
        return self._fastconv.frozen

    @property
    def last_algorithm(self) -> str | None:
        """What the most recent eager call ran; None before the first."""
        return self._fastconv.last_algorithm

    @property
    def last_input_shape(self) -> tuple[int, ...] | None:
        """The input's shape in that call."""
        return self._fastconv.last_input_shape

    def __prepare_scriptable__(self) -> None:
        """What torch.jit.script asks every module first."""
        raise ops.UnsupportedError(
            f"torch.jit.script cannot compile fastconv.{type(self).__name__}: undo() the swap first (of a fused model: "
            "script the model that it was made from), or use torch.compile or torch.export"
        )

    def refresh(self) -> None:
        """Packs the weight again, for this layer's next calls and for CUDA graphs that captured it. Only a frozen layer
        needs it, after its weight was changed by hand."""
        weight: Any = self.weight
        if is_eager(weight):
            self._fastconv.refresh(self._as_packed(weight))

    def _at_once(self, x: Tensor, residual: Tensor | None = None, epilogue: Epilogue = BARE) -> Tensor | None:
        """A call of which nothing but what is kept of one like it has to be known; None if it is `convolve`'s.

        In few steps: among a network's operators every call is met cold, so that an instruction takes three times what
        it takes in a loop over one layer (docs/log/128-training-step.md), and other threads wait for each of them
        (docs/log/140-calls-at-once.md)."""
        own = self.__dict__
        parameters = own["_parameters"]
        weight, bias = parameters.get("weight"), parameters.get("bias", self)
        if not (
            type(x) is Tensor and type(weight) is _Parameter and (bias is None or type(bias) is _Parameter)
            and own["padding_mode"] == "zeros" and _dispatch_modes() == 0 and not _is_transformed()
            and _tracing_state() is None and forward_ad._current_level < 0 and not settings.log_calls
        ):  # fmt: skip
            return None
        if _records():
            if weight.requires_grad:
                return self._trained(x, weight, bias) if epilogue is BARE else None
            if needs_gradient(x, bias, residual):
                return None
        return self._inferred(x, weight, bias, residual, epilogue)

    def _trained(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """A call that trains the weight, without anything behind the convolution."""
        own, dtype = self.__dict__, x.dtype
        state = own["_fastconv"]
        # Where two calls differ in what is not asked here, what is kept of one serves the other, if not as fast.
        asked = (
            x.shape, dtype, x.requires_grad, ops.measured_generation,
            switches_of(x) if dtype is _float32 else None, _searches(),
        )  # fmt: skip
        known = state.trained.get(asked)
        if known is None:
            known = self._known_trained(x, weight, bias, asked)
            if known is None:
                return None
        call, latest, kind = known
        if call is None:
            state.elsewhere = "torch", asked[0], kind
            return self._by_torch(x, weight, bias)
        key = latest[0]
        if (
            key is None or key[10] not in (None, own["output_padding"])
            or key[1:5] != (own["stride"], own["padding"], own["dilation"], own["groups"])
        ):  # fmt: skip
            return None
        if _is_autocast():
            lowered = _lowered(autocast_type(x), x, weight, bias)
            if lowered is None:
                return None
            x, weight, bias = lowered
        state.latest, state.elsewhere = latest, None
        try:
            return ops.recorded_convolution(x, weight, bias, call)
        except failures.UnseenError:
            return None

    def _inferred(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, epilogue: Epilogue
    ) -> Tensor | None:
        """A call of which nothing is recorded."""
        own, dtype = self.__dict__, x.dtype
        state = own["_fastconv"]
        lower = autocast_type(x) if _is_autocast() else None
        # All that decides what the operator is told. Shapes it sees.
        asked = (
            own["stride"], own["padding"], own["dilation"], own["groups"], own["output_padding"], epilogue, dtype,
            lower, x.device, state.frozen, weight.requires_grad,
            settings.cuda_precision() if dtype is _float32 and x.is_cuda else None, _searches(),
        )  # fmt: skip
        known = state.inferred
        if known is None or known[0] != asked:
            known = self._known_inferred(x, weight, bias, residual, asked)
            if known is None:
                return None
        _, layer, mode, key, precision, latest = known
        if lower is not None:
            lowered = None if residual is not None else _lowered(lower, x, weight, bias)
            if lowered is None:
                return None
            x, weight, bias = lowered
        state.latest, state.elsewhere = latest, None
        try:
            return infer(state, key, precision, x, weight, bias, residual, layer, mode)
        except failures.UnseenError:
            return None

    def _known_trained(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, asked: tuple[Any, ...]
    ) -> TrainedCall | None:
        """What is known of calls of which `_trained` asks this; None if each is `convolve`'s."""
        if x.dim() != 4 or not is_eager(x, weight, bias):
            return None
        found = self._known_key(x, BARE)
        call = None if found is None else trained_call(self._fastconv, x, weight, bias, *found)
        if call is not None:
            self._fastconv.keep_trained(asked, call)
        return call

    def _known_inferred(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, asked: tuple[Any, ...]
    ) -> InferredCall | None:
        """What is known of calls of which `_inferred` asks this; None if each is `convolve`'s."""
        # A list may be written to, and is equal to itself all the while.
        if not all(map(is_constant, asked[:5])) or not is_eager(x, weight, bias, residual):
            return None
        found = self._known_key(x, asked[5])
        if found is None:
            return None
        state, (key, precision) = self._fastconv, found
        layer, mode = state.layer_of(key), mode_of(state, x, weight, precision, follows=asked[7] is not None)
        state.inferred = asked, layer, mode, key, precision, state.latest
        return state.inferred

    def _by_torch(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """PyTorch's own convolution with the layer's attributes as they are."""
        raise NotImplementedError

    def _known_key(self, x: Tensor, epilogue: Epilogue) -> tuple[Settings, str] | None:
        """What the operators know a call of `_at_once` by, and its accuracy class; None if it is not theirs."""
        raise NotImplementedError

    def _weight_and_bias(self) -> tuple[Any, Any]:
        parameters = self._parameters
        # nn.Module's __getattr__ takes longer than all else here; a parametrized weight is no parameter of the layer.
        weight: Any = parameters.get("weight")
        bias: Any = parameters.get("bias")
        if weight is None:
            weight = self.weight
        if bias is None and "bias" not in parameters:
            bias = self.bias
        return weight, bias

    def _as_packed(self, weight: Tensor) -> Tensor:
        """The weight as it is packed."""
        return weight

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if self._fastconv.frozen:
            self.refresh()

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
        if state.max_workspace is not None:
            text += f", max_workspace={state.max_workspace}"
        if state.frozen:
            text += ", frozen=True"
        return text
