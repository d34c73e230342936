"""What the layers have in common, whatever they compute: settings, and what is known of their calls."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fastconv import ops
from fastconv.eager import LayerState, is_eager


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
        weight = self._packed_weight()
        if is_eager(weight):
            self._fastconv.refresh(weight)

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

    def _packed_weight(self) -> Tensor:
        """The weight as it is packed."""
        return self.weight  # type: ignore[return-value]

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
