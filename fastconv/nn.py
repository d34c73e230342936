"""The layer: a torch.nn.Conv2d that runs fastconv's algorithms and keeps their packed weights (`fastconv.eager`)."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.common_types import _size_2_t
from torch.nn.modules.utils import _pair

from fastconv import frozen, functional, ops, settings
from fastconv.eager import (
    LayerState,
    autocast_type,
    convolve,
    convolve_around,
    is_eager,
    needs_gradient,
)
from fastconv.epilogue import conv2d_with_epilogue, explicit_padding
from fastconv.functional import conv2d
from fastconv.layer import Epilogue, Layer
from fastconv.norm import InputNorm
from fastconv.ops import pooling, upsampling
from fastconv.ops.geometry import Geometry, pair
from fastconv.rewrites import widening
from fastconv.rewrites.folding import at_once
from fastconv.tensors import is_alike, is_plain, is_same, version_of

__all__ = ["Conv2d", "FusedConv2d", "MaxPool2d", "Upsample", "refresh"]

# What `torch.compile` meets, by names of this module: each step to a name is a guard.
_is_compiling = torch.compiler.is_compiling
_is_transformed = torch._C._are_functorch_transforms_active
_switches = settings.switches
_convolution = ops.conv2d_op
_strided = torch.strided
_is_autocast = torch._C._is_any_autocast_enabled
Parameter = nn.Parameter

_conv2d = torch.conv2d

# torch.fx records the convolution as one call instead of tracing into its argument checks.
torch.fx.wrap("conv2d")
torch.fx.wrap("conv2d_with_epilogue")


class Conv2d(Layer, nn.Conv2d):
    """torch.nn.Conv2d on fastconv's algorithms: the same arguments, parameters, buffers and state_dict.

    Input `[N, C, H, W]` or `[C, H, W]`, output `[N, K, P, Q]` or `[K, P, Q]`; float32, float16, bfloat16 by fastconv's
    own algorithms, any other dtype by PyTorch's.

    Args:
        algorithm: "auto", or the registry name of the one algorithm to run (see `fastconv.algorithms()`).
        precision: None (follow PyTorch's switches), "ieee", "fp32" or "tf32": the class of float32 arithmetic.
        max_error, max_workspace: how far "auto" may go, as a multiple of PyTorch's own error, and how many bytes of
            workspace an algorithm may take (see `fastconv.conv2d`).
        others: as for torch.nn.Conv2d.

    Raises:
        TypeError, ValueError: an argument that is not one of these.
        fastconv.UnsupportedError: in forward, if a named algorithm cannot serve the input.

    In inference the weight is kept in the form that the algorithm reads ("packed"), and every use of that checks, on
    the device, that it still belongs to the weight. `last_algorithm` and `last_input_shape` tell what the most recent
    eager call ran.
    """

    _sums_in_place = False  # the residual is added as by `+=`, which keeps the dtype, not as by `+`
    _wide: FusedConv2d | None = None  # kept by `_widened`
    _wide_of: tuple[Tensor, Tensor | None, int | None]  # weight and bias that it was made of, and the latter's version
    _dropped: tuple[FusedConv2d, ...] = ()  # captured CUDA graphs may read them

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
        max_workspace: int | None = None,
    ) -> None:
        check_settings(algorithm, precision, max_error, max_workspace)
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype
        )
        self._fastconv = LayerState(algorithm, precision, max_error, max_workspace=max_workspace)

    def forward(self, input: Tensor) -> Tensor:
        """Convolves `input` `[N, C, H, W]` or `[C, H, W]`; errors as for torch.nn.Conv2d."""
        if not _is_compiling():
            y = self._at_once(input)
            if y is not None:
                return y
        return self._convolve(input, None, "none", 0.0, False, False)

    def _by_torch(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        own = self.__dict__
        return _conv2d(x, weight, bias, own["stride"], own["padding"], own["dilation"], own["groups"])

    def _known_key(self, x: Tensor, epilogue: Epilogue) -> tuple[tuple[Any, ...], str] | None:
        return self._key(x, self.padding, *epilogue) if type(self.padding) is tuple else None

    def _convolve(
        self, input: Tensor, residual: Tensor | None, activation: str, slope: float, residual_after: bool,
        max_pool: bool,
    ) -> Tensor:  # fmt: skip
        """activation(conv(input) + bias + residual), or the residual or a 2x2 max-pool behind the activation"""
        if _is_compiling():
            return self._traced(input, residual, activation, slope, residual_after, max_pool)
        state = self._fastconv
        weight, bias = self._weight_and_bias()
        x, padding = input, self.padding
        if self.padding_mode != "zeros":
            x, padding = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode), (0, 0)
        # A replica of DataParallel lives for one call; packing for it would cost more than it saves.
        if not is_eager(x, weight, bias, residual) or "_is_replica" in self.__dict__:
            return self._plain(x, weight, bias, padding, residual, activation, slope, residual_after, max_pool)
        if type(padding) is not tuple:
            x, padding = explicit_padding(x, weight, padding, self.dilation)
        key, precision = self._key(x, padding, activation, slope, residual_after, max_pool)
        if settings.log_calls:
            self._log(x, padding, key[0], precision, activation)
        # A sum with what is of another type than autocast's is of that type.
        promotes = residual is not None and _is_autocast() and autocast_type(x) not in (None, residual.dtype)
        asked = state, x, weight, bias, residual, key, precision, state.precision is None
        y = None if promotes else convolve(*asked)
        if y is None:
            y = self._plain(x, weight, bias, padding, residual, activation, slope, residual_after, max_pool)
            last = ops.last_call()
            state.elsewhere = ("torch" if last is None else last["algorithm"], tuple(input.shape), ())
        return y

    def _traced(
        self, x: Tensor, residual: Tensor | None, activation: str, slope: float, residual_after: bool, max_pool: bool,
    ) -> Tensor:  # fmt: skip
        """`_convolve` where `torch.compile` traces it. Every name that is read is a guard, which every call of the
        compiled code pays for (docs/log/118-host.md): the common call reads few, and none of another module."""
        weight, bias = self._weight_and_bias()
        padding, dtype = self.padding, x.dtype
        if (
            not (max_pool or residual_after) and x.dim() == 4 and self.padding_mode == "zeros"
            and type(padding) is tuple and type(x) is Tensor and type(weight) is Parameter
            and (bias is None or type(bias) is Parameter) and x.layout is _strided
            and dtype.is_floating_point and dtype.itemsize > 1 and (x.is_cuda or x.is_cpu)
            and not _is_transformed() and _switches.dual_level < 0
            and (residual is None or self._is_output(residual, x, weight))
        ):  # fmt: skip
            algorithm, precision, max_error, max_workspace = self._fastconv.text.split()
            if precision == "None":  # of half types every class is the same
                precision = settings.resolve_precision(None, x.is_cuda) if dtype.itemsize == 4 else "fp32"
            return _convolution(
                x, weight, bias, residual, self.stride, padding, self.dilation, self.groups, algorithm, precision,
                activation, slope, _switches.backend_flags, None if max_error == "None" else float(max_error),
                None if max_workspace == "None" else int(max_workspace),
            )  # fmt: skip
        if self.padding_mode != "zeros":
            x, padding = F.pad(x, self._reversed_padding_repeated_twice, mode=self.padding_mode), (0, 0)
        return self._plain(x, weight, bias, padding, residual, activation, slope, residual_after, max_pool)

    def _is_output(self, residual: Any, x: Tensor, weight: Tensor) -> bool:
        """Whether the residual of a traced call is of the output's shape and type."""
        if type(residual) is not Tensor or residual.dtype != x.dtype or residual.device != x.device:
            return False
        padding: Any = self.padding
        pairs = zip(x.shape[2:], weight.shape[2:], self.stride, padding, self.dilation, strict=True)
        sizes = [(size + 2 * p - d * (r - 1) - 1) // step + 1 for size, r, step, p, d in pairs]
        return not _is_autocast() and list(residual.shape) == [x.shape[0], weight.shape[0], *sizes]

    def _key(
        self, x: Tensor, padding: Any, activation: str, slope: float, residual_after: bool, max_pool: bool
    ) -> tuple[tuple[Any, ...], str]:
        """What the operators know a call by, with padding as two integers, and its accuracy class."""
        state, own = self._fastconv, self.__dict__
        stride, dilation = own["stride"], own["dilation"]
        if type(stride) is list or type(dilation) is list:
            stride, dilation = tuple(stride), tuple(dilation)
        key = (
            state.resolved, stride, padding, dilation, own["groups"], activation, slope, state.limits, residual_after,
            max_pool, None,
        )  # fmt: skip
        return key, settings.resolve_precision(state.precision, x.is_cuda) if x.dtype is torch.float32 else "fp32"

    def _convolve_around(
        self, x: Tensor, residual: Tensor | None, out: Tensor | None, scale: Tensor | None, shift: Tensor | None,
        input_activation: str,
    ) -> Tensor | None:  # fmt: skip
        """What forward returns, of input_activation(x * scale + shift), which has no residual, and into `out`, which
        may be a range of channels; where these are given. Of eager tensors without gradients (`is_eager`). None if that
        is not for here: a norm that is faster apart, hooks, padding that is not zeros alike on both sides."""
        parameters, attributes = self._parameters, self.__dict__  # nn.Module's __getattr__ takes its time
        weight, bias = parameters.get("weight"), parameters.get("bias")
        if weight is None or "bias" not in parameters or not is_plain(weight) or "_is_replica" in attributes:
            return None
        if self.padding_mode != "zeros" or self._forward_hooks or self._forward_pre_hooks or attributes.get("max_pool"):
            return None
        padding: Any = self.padding
        if type(padding) is not tuple:
            padded, padding = explicit_padding(x, weight, padding, self.dilation)
            if padded is not x:
                return None
        activation, slope = attributes.get("activation") or "none", attributes.get("negative_slope", 0.0)
        after = residual is not None and bool(attributes.get("residual_after"))
        key, precision = self._key(x, padding, activation, slope, after, False)
        if settings.log_calls:
            self._log(x, padding, key[0], precision, activation)
        around = out, scale, shift, input_activation
        return convolve_around(self._fastconv, x, weight, bias, residual, around, key, precision)

    def _widened(self) -> FusedConv2d:
        """What the layer computes of images with channels of zeros behind its own, with such ones behind its own: a
        layer whose channels are whole accesses (`fastconv.rewrites.widening`). It is kept as packed weights of frozen
        layers are, and follows weight and bias as those do."""
        weight, bias = self._weight_and_bias()
        if self._wide is not None and self._follow(self._wide, weight, bias):
            return self._wide
        self._drop_wide()
        with torch.inference_mode(False), torch.no_grad():
            wider, wider_bias = widening.filters(at_once, weight, bias)
            if wider_bias is not None and wider_bias is bias:  # wide enough; what it follows is written into its own
                wider_bias = bias.clone()
        k, c, *kernel = wider.shape
        state, attributes = self._fastconv, self.__dict__
        wide = FusedConv2d(
            c, k, kernel, self.stride, self.padding, self.dilation, 1, bias is not None, self.padding_mode, "meta",
            weight.dtype, algorithm=state.algorithm, precision=state.precision, max_error=state.max_error,
            max_workspace=state.max_workspace, activation=attributes.get("activation"),
            negative_slope=attributes.get("negative_slope", 0.01),
            residual_after=attributes.get("residual_after", False), max_pool=attributes.get("max_pool", False),
        ).eval()  # fmt: skip
        wide._fastconv.frozen = state.frozen
        wide.weight = Parameter(wider, requires_grad=False)
        wide.bias = None if wider_bias is None else Parameter(wider_bias, requires_grad=False)
        self._keep_wide(wide, weight, bias)
        return wide

    def _follow(self, wide: FusedConv2d, weight: Tensor, bias: Tensor | None, again: bool = False) -> bool:
        """Writes into a wide layer, whose memory captured graphs may read, a weight that is another, and a bias that is
        another or was written to; again: both. False if they do not fit."""
        its_weight, its_bias, version = self._wide_of
        is_untracked = bias is not None and bias.is_inference()
        new_weight = again or not is_same(its_weight, weight)
        new_bias = again or not is_same(its_bias, bias) or version != version_of(bias) or is_untracked
        if not (new_weight or new_bias):
            return True
        if not (is_alike(its_weight, weight) and is_alike(its_bias, bias)):
            return False
        k, c = weight.shape[:2]
        with torch.inference_mode(False), torch.no_grad():
            if new_weight:
                wide.weight[:k, :c].copy_(weight)
            if wide.bias is not None and bias is not None:
                wide.bias[:k].copy_(bias)
        if new_weight:
            wide.refresh()
        if new_weight or not is_untracked:  # else it is written in every call, on each stream
            self._keep_wide(wide, weight, bias)
        return True

    def _keep_wide(self, wide: FusedConv2d, weight: Tensor, bias: Tensor | None) -> None:
        """Keeps a wide layer, and what it was made of: not what a capture records, which has not happened yet."""
        if weight.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                return
            torch.cuda.current_stream(weight.device).synchronize()  # other streams read it without waiting
        # Not the tensors themselves, which `weight.data = ...` would change, but what keeps their memory.
        kept = weight.detach(), None if bias is None else bias.detach(), version_of(bias)
        self.__dict__.update(_wide=wide, _wide_of=kept)  # no module of this one

    def _drop_wide(self) -> None:
        attributes = self.__dict__
        if self._wide is not None:
            attributes["_dropped"] = (*self._dropped, attributes.pop("_wide"))
            del attributes["_wide_of"]

    def refresh(self) -> None:
        """Packs the weight again, for this layer's next calls and for CUDA graphs that captured it. Only a frozen layer
        needs it, after its weight was changed by hand."""
        super().refresh()
        if self._wide is not None and not self._follow(self._wide, *self._weight_and_bias(), again=True):
            self._drop_wide()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._drop_wide()
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_wide", "_wide_of", "_dropped")}

    def _log(self, x: Tensor, padding: Any, algorithm: str, precision: str, activation: str) -> None:
        pairs = pair("stride", self.stride), pair("padding", padding), pair("dilation", self.dilation)
        geometry = Geometry(*pairs, self.groups)
        functional._log(x, self.weight, geometry, algorithm, precision, activation)

    def _plain(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, padding: Any, residual: Tensor | None, activation: str,
        slope: float, residual_after: bool, max_pool: bool,
    ) -> Tensor:  # fmt: skip
        state = self._fastconv
        arguments = (x, weight, bias, self.stride, padding, self.dilation, self.groups)
        if residual is None and activation == "none" and not max_pool:
            return conv2d(
                *arguments, algorithm=state.algorithm, precision=state.precision, max_error=state.max_error,
                max_workspace=state.max_workspace,
            )  # fmt: skip
        return conv2d_with_epilogue(
            *arguments, residual, activation, slope, self._sums_in_place, state.algorithm, state.precision,
            state.max_error, state.max_workspace, residual_after, max_pool,
        )  # fmt: skip


def refresh(model: nn.Module) -> None:
    """Packs the weights of all fastconv layers of `model` again, and compiles again what `compile(frozen=True)` made of
    it or of a module in it. Only what is frozen (`swap_(..., frozen=True)`, `fuse`, `compile(frozen=True)`) needs it,
    and only after weights were changed other than by `load_state_dict`, `.to()` or a new parameter.

    Raises:
        TypeError: model is not a torch.nn.Module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    for module in model.modules():
        if isinstance(module, (Layer, InputNorm)):
            module.refresh()
        frozen.forget(module)


class FusedConv2d(Conv2d):
    """A `Conv2d` that computes ``activation(conv(input) + bias + residual)`` in one pass over its output.

    Args:
        activation: None, "relu", "relu6", "silu", "leaky_relu" (with `negative_slope`), "gelu", "gelu_tanh",
            "hardswish" or "sigmoid".
        residual_after: ``activation(conv(input) + bias) + residual`` instead.
        max_pool: ``max_pool2d(activation(conv(input) + bias), 2)`` instead, which takes no residual.
        others: as for fastconv.Conv2d.

    Raises:
        TypeError, ValueError: an argument that is not one of these. The others as fastconv.Conv2d.

    `fastconv.fuse` makes them out of a convolution and what follows it.
    """

    residual_after = max_pool = False  # of layers that were pickled before there was a choice
    _needs_batch = False  # a functional batch norm is in it, whose channels are dimension 1 of whatever it gets
    _constant_dims = 0  # the most dimensions of the tensors that were multiplied or added, and are in weight and bias
    _adds_input = False  # a branch without a convolution is in the weight

    def __init__(
        self, *args: Any, activation: str | None = None, negative_slope: float = 0.01, residual_after: bool = False,
        max_pool: bool = False, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, **kwargs)
        settings.resolve_activation(activation)
        settings.check_slope(negative_slope)
        settings.check_flag("residual_after", residual_after)
        settings.check_flag("max_pool", max_pool)
        self.activation = activation
        self.negative_slope = float(negative_slope)
        self.residual_after = residual_after
        self.max_pool = max_pool

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """`residual` is what `+` takes: of the output's shape and dtype it is added inside the convolution; of another
        that `+` admits (broadcast or promoted) by PyTorch."""
        if self._needs_batch and input.dim() != 4:
            raise ValueError(
                f"input is {list(input.shape)}; expected [N, C, H, W]: torch.nn.functional.batch_norm, which is fused "
                "here, takes dimension 1 for the channels, of an unbatched image the rows"
            )
        own = self.__dict__
        after = self.residual_after and residual is not None
        epilogue = own["activation"] or "none", own["negative_slope"], after, self.max_pool
        y = None
        if not _is_compiling() and (residual is None or type(residual) is Tensor):
            y = self._at_once(input, residual, epilogue)
        if y is None:
            y = self._convolve(input, residual, *epilogue)
        if self._adds_input and _is_autocast():  # of whose type the sum is
            y = y.to(torch.promote_types(y.dtype, input.dtype))
        return self._like_constants(y) if self._constant_dims else y

    def _like_constants(self, y: Tensor) -> Tensor:
        """With the dimensions, and under autocast the dtype, that the tensors in weight and bias would give it."""
        if _is_autocast():
            y = y.to(torch.promote_types(y.dtype, self.weight.dtype))
        return y[None] if y.dim() < self._constant_dims else y

    def extra_repr(self) -> str:
        text = super().extra_repr()
        if self.activation is not None:
            text += f", activation={self.activation}"
        if self.activation == "leaky_relu":
            text += f", negative_slope={self.negative_slope}"
        if self.residual_after:
            text += ", residual_after=True"
        if self.max_pool:
            text += ", max_pool=True"
        return text


class MaxPool2d(nn.MaxPool2d):
    """torch.nn.MaxPool2d, whose eager calls on a GPU that need no gradient write values alone, by a kernel of
    fastconv's. `fastconv.fuse` puts it where a max-pool stays apart."""

    def forward(self, input: Tensor) -> Tensor:
        if not is_eager(input) or not input.is_cuda or self.return_indices or needs_gradient(input):
            return super().forward(input)
        pairs = self.kernel_size, self.stride, self.padding, self.dilation
        kernel, stride, padding, dilation = [sizes if type(sizes) is tuple else _pair(sizes) for sizes in pairs]
        return pooling.max_pool2d(input, kernel, stride, padding, dilation, self.ceil_mode)

    def __prepare_scriptable__(self) -> nn.MaxPool2d:
        """What torch.jit.script compiles in its place."""
        sizes = (self.kernel_size, self.stride, self.padding, self.dilation)
        return nn.MaxPool2d(*sizes, self.return_indices, self.ceil_mode).train(self.training)


class Upsample(nn.Upsample):
    """torch.nn.Upsample, whose eager calls on a GPU that need no gradient and repeat each pixel an integer number of
    times run a kernel of fastconv's, in channels_last. `fastconv.fuse` puts it where a model does that."""

    def forward(self, input: Tensor) -> Tensor:
        scales = self.scales(input)
        return super().forward(input) if scales is None else upsampling.upsample_nearest2d(input, *scales)

    def scales(self, input: Tensor) -> tuple[int, int] | None:
        """The integers of a call that is the operator's."""
        if not is_eager(input) or not input.is_cuda or needs_gradient(input):
            return None
        if input.dim() != 4 or input.is_contiguous():  # in NCHW it is PyTorch's, without a detour
            return None
        return upsampling.scales_of(self.mode, self.size, self.scale_factor, self.recompute_scale_factor)

    def __prepare_scriptable__(self) -> nn.Upsample:
        """What torch.jit.script compiles in its place."""
        return nn.Upsample(
            self.size, self.scale_factor, self.mode, self.align_corners, self.recompute_scale_factor
        ).train(self.training)


def check_settings(
    algorithm: str, precision: str | None, max_error: float | None = None, max_workspace: int | None = None
) -> None:
    """TypeError or ValueError if these are not an algorithm of the registry, or "auto", a precision and limits."""
    settings.check_max_error(max_error)
    settings.check_max_workspace(max_workspace)
    settings.check_algorithm(algorithm)
    if precision is not None and not isinstance(precision, str):
        raise TypeError(f"precision is {precision!r}; expected None or a string")
    if precision is not None and precision not in settings.PRECISIONS:
        raise ValueError(f"precision is '{precision}'; expected None or one of {', '.join(settings.PRECISIONS)}")
